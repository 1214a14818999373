"""Recomputation of activations in the backward pass: of each layer, or all but those that take long to compute.

transformers runs its layers through torch.utils.checkpoint (modeling_layers.py, GradientCheckpointingLayer), which
draws random numbers again as they were drawn, so the gradients are the same to the last bit. Not those of T5 and mT5:
all layers use one table of relative positions, and its gradient is summed in another order. "selective" is torch's
create_selective_checkpoint_contexts.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zerofit.compat.torch import DispatchMode, argument_names
from zerofit.compat.transformers import recomputing_functions
from zerofit.model.stages import whole_model
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm")  # products of linear layers; the last is float8's


def enable_recomputation(
    model: "PreTrainedModel", which: bool | str, keeps_attention: bool = True, compiled: bool = False
) -> None:
    """Recompute activations of the model's layers; in a frozen model gradients enter the first layer, too. Raises
    UserError: the model's code cannot do this.

    Args:
        which: the value of gradient_checkpointing. True: each layer; "selective": of each layer all but linear
            layers' products and fused attention.
        keeps_attention: of "selective"; if not, attention is recomputed too.
        compiled: torch.compile reads the layers, which marks operators in torch's own contexts alone.
    """
    check_recomputation(whole_model(model), which)
    if which is True:
        model.activation_checkpointing_enable()
    else:
        contexts = functools.partial(selective_contexts, keeps_attention, compiled)
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def check_recomputation(model: "PreTrainedModel", which: bool | str) -> None:
    """Raises UserError where a model (not a stage of it) cannot recompute what gradient_checkpointing says."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    name = f"a {model.config.model_type} ({type(model).__name__})"
    option = "gradient_checkpointing"
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{option}: {name} cannot compute blocks again. Remove it, or use a smaller batch")
    if which is not True and not any(isinstance(each, GradientCheckpointingLayer) for each in model.modules()):
        raise UserError(f"{option} = {which}: {name} computes all blocks again, or none. Use --{option} full")


def selective_contexts(keeps_attention: bool = True, compiled: bool = False) -> tuple[DispatchMode, DispatchMode]:
    """Return (context of the forward pass, of the recomputation) of a layer, for torch.utils.checkpoint."""
    saving, replaying = create_selective_checkpoint_contexts(_policy, allow_cache_entry_mutation=True)
    if compiled:
        return saving, replaying
    return SelectiveMode(saving, keeps_attention), SelectiveMode(replaying, keeps_attention)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results that `SelectiveMode` asks for. A compiler asks for all operators."""
    is_kept = _operator_kind(operator) is not None and not _has_dropout(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveMode(DispatchMode):
    """torch's context of selective checkpointing, asked only about results that are kept: those of products, of fused
    attention, and of in-place changes to one of these (a linear layer adds its bias so where its input is not
    contiguous). torch's recomputation refuses a pass that has other operators than the forward pass, and ZeRO-3
    fetches weights otherwise each time. Attention with dropout is recomputed: otherwise it would draw no random
    numbers, and later ones would differ."""

    def __init__(self, context: DispatchMode, keeps_attention: bool):
        super().__init__()
        self.context = context
        self.keeps_attention = keeps_attention
        self.kept: dict[int, torch.UntypedStorage] = {}  # id: storage; views share their tensor's storage object

    def __exit__(self, *error: Any) -> None:
        self.kept.clear()
        super().__exit__(*error)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _operator_kind(operator)
        keeps = kind == "product"
        if kind == "change":
            keeps = isinstance(args[0], torch.Tensor) and id(args[0].untyped_storage()) in self.kept
        elif kind == "attention":
            keeps = self.keeps_attention and not _has_dropout(operator, args, kwargs)
        if not keeps:
            return operator(*args, **kwargs)
        result = self.context.__torch_dispatch__(operator, types, args, kwargs)
        for kept in result if isinstance(result, tuple) else (result,):
            if isinstance(kept, torch.Tensor):
                storage = kept.untyped_storage()
                self.kept[id(storage)] = storage
        return result


@functools.cache
def _operator_kind(operator: Any) -> str | None:
    """Return the kind of an operator: a product, fused attention (torch's kernel, or one of a package: flash_attn, a
    hub's kernel), an in-place change, or None."""
    if operator.name() in MATRIX_PRODUCTS:
        return "product"
    if "attention" in operator.name() or "attn" in operator.name():
        return "attention"
    return "change" if operator.name().partition(".")[0].endswith("_") else None


def _has_dropout(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of an operator has a probability of dropout above 0."""
    for place, (name, default) in enumerate(argument_names(operator)):
        value = kwargs.get(name, args[place] if place < len(args) else default)
        if "dropout" in name and isinstance(value, (int, float)) and value > 0:
            return True
    return False


def offload_inputs(model: torch.nn.Module, saved: Callable[[], AbstractContextManager[Any]]) -> None:
    """Offload the inputs of the layers that `model` recomputes, for instance to CPU memory. Tensors that are saved
    within such a layer have hooks of their own. `saved`: makes a context in which autograd saves tensors there
    (torch.autograd.graph.save_on_cpu)."""
    recomputing_functions(model, lambda checkpoint: functools.partial(_offload_and_checkpoint, checkpoint, saved))


def _offload_and_checkpoint(checkpoint: Any, saved: Any, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    with saved():
        return checkpoint(layer, *args, **kwargs)
