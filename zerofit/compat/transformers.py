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
    """Return the name of the attention that a model with this configuration calls. transformers has ways to set it
    (`attn_implementation=`, `set_attn_implementation`) and none to read it; its own documentation reads this
    attribute. Without it: no way to know what a model attends with where the recipe does not say."""
    name: str | None = getattr(config, "_attn_implementation", None)  # a tool may have another kind of configuration
    return name


def attentions_of(model: Any) -> tuple[bool, list[str] | None]:
    """Return whether a model's code looks its attention up by name, and the flash kernels that its authors name for
    it, empty if any will do; None: it has no flash attention. `set_attn_implementation` reads them, and then warns,
    does nothing or takes another one. Without it: a warning at every run of a model that looks nothing up, and a
    kernel would be announced that the model's code never calls."""
    kernels = list(getattr(model, "_compatible_flash_implementations", None) or ())
    return bool(model._can_set_attn_implementation()), kernels if model._supports_flash_attn else None


class Renamed:
    """Another object with some attributes of its own, for reading: `with_attention` shows transformers a configuration
    that names another attention. A copy of a configuration copies a model's whole. Without it: see
    `with_attention`."""

    def __init__(self, wrapped: Any, changes: Mapping[str, Any]) -> None:
        self._wrapped = wrapped
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._wrapped, name)


def with_attention(module: Any, name: str) -> Any:
    """Return an attention module as one whose configuration names this attention. transformers' own flash function
    reads there which kernel to load, though its caller may stand under another name, as sequence parallelism does.
    Without it: it looks for a kernel of the other name on the hub."""
    return Renamed(module, {"config": Renamed(module.config, {"_attn_implementation": name})})


def documents_found_by(find: "Callable[[torch.Tensor], torch.Tensor | None]") -> AbstractContextManager[None]:
    """Within this context transformers learns from `find` which documents a row has: (B, T) positions -> (B, T)
    numbers of documents, or None if each row is one. Its own function compares positions on the device in every
    forward pass, and the host waits for the result. A mask that is given would do, but models with windows make
    several. Without it: one wait for each pass."""
    from transformers import masking_utils

    return replaced(masking_utils, "find_packed_sequence_indices", find)


def initialize(model: Any, module: "torch.nn.Module", attribute: str, drawn: "torch.nn.Parameter") -> None:
    """Fill `drawn` as the model's code initializes this parameter of one of its modules, whose parameters stay as they
    are. `initialize_weights`, which is public, initializes a whole model. Without it: weights that a checkpoint lacks
    would depend on the strategy."""
    own = getattr(module, attribute)
    for name, other in module.named_parameters(recurse=False):
        if name != attribute:
            other._is_hf_initialized = True  # type: ignore[attr-defined]  # it is not drawn again
    setattr(module, attribute, drawn)
    model._init_weights(module)
    setattr(module, attribute, own)


def keep_conversions(model: Any, keep: Callable[[Any], bool], or_usual: bool = False) -> None:
    """Keep those steps of loading (renaming, merging, quantising) that saving is to undo; where none is kept, nothing
    or (`or_usual`) what transformers undoes for models of this class. `save_original_format=False` would undo none.
    Without it: under ZeRO-3 weights are saved with names that the model has never had (LayerNorm.gamma), and a model
    whose quantised weights were made whole cannot be saved."""
    steps = getattr(model, "_weight_conversions", None)
    if steps is not None:
        kept = [step for step in steps if keep(step)]
        model._weight_conversions = None if or_usual and not kept else kept


def weights_alone(model: Any) -> Any:
    """Return a copy of a model, with the same weights, whose `save_pretrained` writes weights and no file beside them.
    transformers writes the other files first, and one that it refuses would cost the weights. Without it: a run that
    has trained may end without its weights."""
    alone = copy.copy(model)
    for name in ("config", "generation_config"):
        if hasattr(model, name):
            setattr(alone, name, Renamed(getattr(model, name), {"save_pretrained": lambda *args, **kwargs: None}))
    alone.is_remote_code = lambda: False
    return alone


def undivided_modules(model: Any) -> set[str]:
    """Return the names of the classes of modules that a model's code wants on one device: its blocks. Layers that can
    be recomputed one by one are found by their class. Without it: models that have none are compiled, and sharded, as
    a whole."""
    return set(getattr(model, "_no_split_modules", None) or ())


def recomputing_functions(
    model: "torch.nn.Module", changed: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> list[Callable[..., Any]]:
    """Return the functions that recompute modules of a model in the backward pass; with `changed` each module has what
    this makes of its function from then on. `gradient_checkpointing_enable` sets the functions, with arguments of
    torch's own alone, and nothing public reads them. Without it: no copy of a model without its weights, and no inputs
    of layers in the host's memory."""
    found = []
    for module in model.modules():
        if (function := getattr(module, "_gradient_checkpointing_func", None)) is not None:
            found.append(function)
            if changed is not None:
                module._gradient_checkpointing_func = changed(function)  # type: ignore[assignment]
    return found


@contextmanager
def exchanging_tokens_with(counts: Callable[..., Any], rows: Callable[..., Any]) -> Iterator[None]:
    """Within this context transformers' AllToAllEP exchanges through these functions. One process has no group of
    several ranks; what an exchange is made of has no interface of its own. Without it: `zerofit plan` cannot trace
    divided experts. `counts`: stands for torch.distributed.all_to_all_single, (received, sent, group=). `rows`: stands
    for the one with a gradient, (rows, received sizes, sent sizes, group) -> rows."""
    library = import_module("transformers.distributed.expert_parallel")
    arrived = SimpleNamespace(apply=lambda received: received)
    with (
        replaced(library, "all_to_all_single", counts),
        replaced(library, "all_to_all_single_autograd", rows),
        replaced(library, "_WaitTensor", arrived),
    ):
        yield


def multiplying_without_groups() -> AbstractContextManager[None]:
    """Within this context transformers multiplies experts by its own operator, and not by torch's grouped product. Its
    function asks for the device and the version of torch; no setting chooses. torch's operator has no shapes for fake
    tensors of every dtype. Without it: `zerofit plan` cannot trace experts in fp32."""
    moe = import_module("transformers.integrations.moe")
    return replaced(moe, "_can_use_grouped_mm", lambda *args: False)
