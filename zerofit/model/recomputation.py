"""Which activations the backward pass computes again: of each layer, of every N-th one, or all but those that take
long to compute.

transformers runs its layers through torch.utils.checkpoint (modeling_layers.py, GradientCheckpointingLayer), which
draws random numbers again as they were drawn, so the gradients are the same to the last bit.
"""

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zerofit.model.kept_results import keep_results, keeping_contexts
from zerofit.model.stages import whole_model
from zerofit.recipe.errors import UserError
from zerofit.recipe.fields import Recomputation

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)  # of linear layers


def enable_recomputation(
    model: torch.nn.Module,
    which: Recomputation | bool | str | int,
    is_traced: bool = False,
    keeps_attention: bool = True,
) -> None:
    """Recompute activations of the model's layers; in a frozen model gradients enter the first layer, too.

    Args:
        which: the value of gradient_checkpointing. True: each layer; "selective": of each layer all but linear
            layers' products and fused attention; N: the first layer, the (N + 1)-th, the (2 N + 1)-th, ... of those
            that the model has, in their order: encoder, then decoder; the layers of this stage of a pipeline.
        is_traced: by fake tensors or torch.compile, which see torch's own contexts of "selective" alone.
        keeps_attention: of "selective", traced; if not, attention is recomputed too.

    Raises:
        UserError: the model's code cannot do this, or the model has fewer than N layers.
    """
    check_recomputation(whole_model(model), which)
    if which is True:
        model.activation_checkpointing_enable()
    elif which == "selective":
        for operator in () if is_traced else (*PRODUCTS, *attention_operators()):
            keep_results(operator, _keeps)
        contexts = functools.partial(selective_contexts, keeps_attention) if is_traced else keeping_contexts
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    else:
        model.activation_checkpointing_enable(every_n_layers=which)


def check_recomputation(model: torch.nn.Module, which: bool | str | int) -> None:
    """Raises UserError where a model (not a stage of it) cannot recompute what gradient_checkpointing says."""
    name, option = f"a {model.config.model_type} ({type(model).__name__})", "gradient_checkpointing"
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{option}: the code of {name} cannot compute its blocks again. Remove this option; a smaller "
            "--per_device_train_batch_size also saves activations"
        )
    layers = count_layers(model)
    if which is not True and not layers:
        raise UserError(
            f"{option} = {which}: the code of {name} computes all blocks again, or none. Use --{option} full"
        )
    if type(which) is int and which > layers:
        raise UserError(
            f"{option} = {which}: every {which}-th layer is to be computed again, and {name} has {layers} layers. Use "
            f"--{option} N with an N of at most {layers}, full or selective"
        )


def count_layers(model: torch.nn.Module) -> int:
    """The layers that transformers recomputes one at a time."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def selective_contexts(keeps_attention: bool = True) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """(context of the forward pass, of the recomputation) for torch.utils.checkpoint: dispatch modes."""
    noting, replaying = create_selective_checkpoint_contexts(functools.partial(_policy, keeps_attention))
    return noting, Replayed(replaying)


class Replayed(TorchDispatchMode):
    """torch's context of the recomputation, asked about matrix products and attention only: it refuses a pass that has
    other operators than the forward pass, and ZeRO-3 fetches weights otherwise each time."""

    def __init__(self, replaying: TorchDispatchMode):
        super().__init__()
        self.replaying = replaying

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in PRODUCTS or _is_attention(operator):
            return self.replaying.__torch_dispatch__(operator, types, args, kwargs)
        return operator(*args, **(kwargs or {}))


def _policy(keeps_attention: bool, context: Any, operator: Any, *args, **kwargs) -> CheckpointPolicy:
    is_kept = operator in PRODUCTS or (keeps_attention and _is_attention(operator))
    is_kept = is_kept and _keeps(operator, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the result of a product or of attention is kept. Attention that drops weights is not: what is not
    computed again draws no random numbers, and those that follow would be others."""
    return operator in PRODUCTS or not _drops(operator, args, kwargs)


def attention_operators() -> list[Any]:
    """The fused kernels of attention that are loaded, and some operators that no forward pass has."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        if ("attention" in name or "attn" in name) and not is_composed:
            space, _, operator = name.partition("::")
            operator, _, overload = operator.partition(".")
            found.append(getattr(getattr(getattr(torch.ops, space), operator), overload or "default"))
    return found


@functools.cache
def _is_attention(operator: Any) -> bool:
    """Whether it is a fused kernel of attention: torch's, or one of a package (flash_attn, a hub's kernel)."""
    return "attention" in operator.name() or "attn" in operator.name()


def _drops(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator has a probability of dropout above 0."""
    for place, argument in enumerate(operator._schema.arguments):
        value = kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
        if "dropout" in argument.name and isinstance(value, (int, float)) and value > 0:
            return True
    return False
