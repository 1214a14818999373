"""Private parts of transformers. Tried with transformers 5.23 and 5.24 (of experts: 5.23)."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.compat import replaced

if TYPE_CHECKING:
    import torch


def attention_of(config: Any) -> str | None:
    """Return the name of the attention that a model with this configuration calls. transformers has public ways to set
    it (`attn_implementation=`, `set_attn_implementation`), but none to read it; its own documentation reads this
    attribute. Without it: the attention is unknown where the recipe does not set it."""
    name: str | None = getattr(config, "_attn_implementation", None)  # a tool may have another kind of configuration
    return name


def attentions_of(model: Any) -> tuple[bool, list[str] | None]:
    """Return whether a model's code looks up its attention by name, and the flash kernels that its authors list
    (empty: any; None: no flash attention). `set_attn_implementation` reads both, and then warns, does nothing or takes
    another kernel. Without it: a warning at every run of a model that looks nothing up, and zerofit would announce a
    kernel that the model's code never calls."""
    kernels = list(getattr(model, "_compatible_flash_implementations", None) or ())
    return bool(model._can_set_attn_implementation()), kernels if model._supports_flash_attn else None


class Renamed:
    """A read-only view of an object, in which some attributes have other values: `with_attention` shows transformers a
    configuration with another attention. A real copy would copy the whole configuration of a model. Without it: see
    `with_attention`."""

    def __init__(self, wrapped: Any, changes: Mapping[str, Any]) -> None:
        self._wrapped = wrapped
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._wrapped, name)


def with_attention(module: Any, name: str) -> Any:
    """Return a view of an attention module whose configuration names this attention. transformers' flash function
    reads there which kernel to load, though sequence parallelism has set another name. Without it: it looks for a
    kernel of that name on the hub."""
    return Renamed(module, {"config": Renamed(module.config, {"_attn_implementation": name})})


def documents_found_by(find: "Callable[[torch.Tensor], torch.Tensor | None]") -> AbstractContextManager[None]:
    """Within this context transformers calls `find` to separate the documents of a row: (B, T) positions -> (B, T)
    document numbers, or None if each row is one document. Its own function compares positions on the device in every
    forward pass, and the host waits for the result. A mask as an input would also do, but models with windows need
    several. Without it: one wait in each pass."""
    from transformers import masking_utils

    return replaced(masking_utils, "find_packed_sequence_indices", find)


def initialize(model: Any, module: "torch.nn.Module", attribute: str, drawn: "torch.nn.Parameter") -> None:
    """Fill `drawn` as the model's code would initialize the parameter `attribute` of a module; the module's parameters
    stay unchanged. The public `initialize_weights` initializes a whole model. Without it: weights that a checkpoint
    lacks would depend on the strategy."""
    original = getattr(module, attribute)
    for name, parameter in module.named_parameters(recurse=False):
        if name != attribute:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # it is not initialized again
    setattr(module, attribute, drawn)
    model._init_weights(module)
    setattr(module, attribute, original)


def keep_conversions(model: Any, keep: Callable[[Any], bool], or_usual: bool = False) -> None:
    """Keep the steps of loading (renaming, merging, quantising) that saving must undo: those for which `keep` is true.
    Where none is kept, saving undoes nothing, or with `or_usual` the usual steps of the model's class.
    `save_original_format=False` would undo none. Without it: under ZeRO-3 weights are saved with names that the model
    has never had (LayerNorm.gamma), and a model whose quantised weights were dequantised cannot be saved."""
    steps = getattr(model, "_weight_conversions", None)
    if steps is not None:
        kept = [step for step in steps if keep(step)]
        model._weight_conversions = None if or_usual and not kept else kept


def weights_alone(model: Any) -> Any:
    """Return a copy of a model, with the same weights, whose `save_pretrained` writes only weights. transformers
    writes the other files first, and if it refuses one of them, it never writes the weights. Without it: a trained run
    may end without its weights."""
    alone = copy.copy(model)
    for name in ("config", "generation_config"):
        if hasattr(model, name):
            setattr(alone, name, Renamed(getattr(model, name), {"save_pretrained": lambda *args, **kwargs: None}))
    alone.is_remote_code = lambda: False
    return alone


def undivided_modules(model: Any) -> set[str]:
    """Return the class names of the modules that a model's code wants on one device: its blocks. Layers that can be
    recomputed are found by their class instead. Without it: models without such layers are compiled, and sharded, as a
    whole."""
    return set(getattr(model, "_no_split_modules", None) or ())


def recomputing_functions(
    model: "torch.nn.Module", changed: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> list[Callable[..., Any]]:
    """Return the functions that recompute a model's modules in the backward pass. With `changed`, each module's
    function is replaced by the result of `changed(function)`. `gradient_checkpointing_enable` sets only torch's
    function, and nothing public reads it. Without it: no copy of a model without its weights, and no offload of layer
    inputs to the CPU."""
    functions = []
    for module in model.modules():
        if (function := getattr(module, "_gradient_checkpointing_func", None)) is not None:
            functions.append(function)
            if changed is not None:
                module._gradient_checkpointing_func = changed(function)  # type: ignore[assignment]
    return functions


@contextmanager
def exchanging_tokens_with(counts: Callable[..., Any], rows: Callable[..., Any]) -> Iterator[None]:
    """Within this context transformers' AllToAllEP exchanges through these functions. A single process has no group of
    several ranks, and there is no public way to set the functions. Without it: `zerofit plan` cannot trace divided
    experts. `counts`: replaces torch.distributed.all_to_all_single, (received, sent, group=). `rows`: replaces the
    version with a gradient, (rows, received sizes, sent sizes, group) -> rows."""
    library = import_module("transformers.distributed.expert_parallel")
    arrived = SimpleNamespace(apply=lambda received: received)
    with (
        replaced(library, "all_to_all_single", counts),
        replaced(library, "all_to_all_single_autograd", rows),
        replaced(library, "_WaitTensor", arrived),
    ):
        yield


def multiplying_without_groups() -> AbstractContextManager[None]:
    """Within this context transformers computes experts with its own operator instead of torch's grouped matrix
    product. It chooses by the device and the version of torch, without a setting. torch's operator does not support
    fake tensors of every dtype. Without it: `zerofit plan` cannot trace experts in fp32."""
    moe = import_module("transformers.integrations.moe")
    return replaced(moe, "_can_use_grouped_mm", lambda *args: False)
