"""Weights of which each rank keeps its share, read or drawn.

In the dtype in which safetensors files store them, weights are mapped into memory and not read: what a rank does not
keep takes none, and the ranks of a host share what they have read. So they are cut first, and converted then. Random
weights are drawn by the first rank, the only one that has all of them for a moment.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zerofit.model.export_review import stored_weights
from zerofit.model.parameters import replace_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(name: str) -> torch.dtype | None:
    """The dtype of all weights in a folder of safetensors files; None where it is not known, or is not one."""
    dtypes = {dtype for _, dtype in stored_weights(Path(name)).values()}
    return DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None


def draw_share(make: Callable[[], "PreTrainedModel"], keep: Callable[["PreTrainedModel"], None]) -> "PreTrainedModel":
    """This rank's share of the model that `make` draws. The first rank draws it, and sends each parameter to the
    others, which are to have the same ones bit for bit; all ranks call this together. `keep`: takes away what is not
    of this rank's share."""
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    draws = ranks == 1 or distributed.get_rank() == 0
    with contextlib.nullcontext() if draws else _parameters_without_memory():
        model = make()
    drawn = {id(parameter): parameter.data for parameter in model.parameters()}
    keep(model)
    kept = {id(parameter): parameter for parameter in model.parameters()}
    own = {}
    for key in list(drawn):
        whole = drawn.pop(key)
        if ranks > 1:
            whole = _from_first_rank(whole)
        if key in kept:
            own[key] = _with_values(kept[key], whole)
    replace_parameters(model, own)
    return model


def _from_first_rank(whole: torch.Tensor) -> torch.Tensor:
    """The first rank's values of a tensor that others have on the meta device."""
    device = torch.device("cpu")
    if distributed.get_backend() != "gloo":
        device = torch.accelerator.current_accelerator() or device
    values = torch.empty(whole.shape, dtype=whole.dtype, device=device) if whole.is_meta else whole.to(device)
    distributed.broadcast(values, 0)
    return values.cpu()


def _with_values(parameter: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
    cut = getattr(parameter, "cut", None)
    made = nn.Parameter(whole if cut is None else cut.of(whole), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    if hasattr(made, "gradient_hook"):
        made.register_hook(made.gradient_hook)
    return made


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Put parameters on the meta device as modules take them. Buffers (rotary frequencies) are computed as usual."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()
