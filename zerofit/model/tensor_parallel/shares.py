"""Weights of which each rank keeps its share, read or drawn: never more than one whole parameter is in its memory.

In the dtype in which safetensors files store them, weights are mapped into memory and not read: what a rank does not
keep takes none, and the ranks of a host share what they have read. So they are cut first, and converted then.

Random weights are those that `from_config` draws, bit for bit: the model is made without weights, the calls that would
have filled each of them are recorded with the state of the random generator, and are made again, one parameter at a
time. Where a weight comes from something that was not recorded, the whole model is drawn, and cut then.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zerofit.compat.torch import DispatchMode
from zerofit.model.parameters import replace_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_share(
    read: Callable[[torch.dtype], "PreTrainedModel"],
    keep: Callable[["PreTrainedModel"], None],
    stored: torch.dtype,
    dtype: torch.dtype,
) -> "PreTrainedModel":
    """This rank's share of a stored model, in `dtype`.

    Args:
        read: loads the whole model in a dtype.
        keep: takes away what is not of this rank's share.
        stored: the dtype to load it in.
    """
    model = read(stored)
    keep(model)
    for parameter in model.parameters():
        is_own = hasattr(parameter, "cut")  # in memory of its own already
        parameter.data = parameter.data.to(dtype, copy=not is_own)
    model.config.dtype = dtype
    return model


def stored_dtype(name: str) -> torch.dtype | None:
    """The dtype of all weights in a folder of safetensors files; None where it is not known, or is not one."""
    dtypes = set()
    for path in Path(name).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            dtypes |= {file.get_slice(each).get_dtype() for each in names}
    return DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None


# Of torch.nn.init (lecun_normal_: of transformers.initialization): they return where `is_meta` is true.
SKIPS_META = re.compile(r"\b(trunc_normal_|lecun_normal_|orthogonal_|sparse_|dirac_)\(")
RANDOM = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_")


def draw_share(make: Callable[[], "PreTrainedModel"], keep: Callable[["PreTrainedModel"], None]) -> "PreTrainedModel":
    """This rank's share of the model that `make` draws.

    Args:
        make: makes a transformers model with random weights.
        keep: takes away what is not of this rank's share.
    """
    with _Calls() as calls, _parameters_without_memory(calls):
        model = make()
    if _skips_meta(model) or not all(calls.know(parameter.data) for parameter in model.parameters()):
        model = make()
        keep(model)
        return model
    whole = {id(parameter): parameter.data for parameter in model.parameters()}
    keep(model)
    drawn = {
        id(parameter): _with_values(parameter, calls.replay(whole[id(parameter)])) for parameter in model.parameters()
    }
    replace_parameters(model, drawn)
    return model


def _skips_meta(model: nn.Module) -> bool:
    """Whether the code of a model initializes weights in a way that does nothing on the meta device, or is not here to
    be looked at."""
    names = {type(each).__module__ for each in model.modules()}
    try:
        sources = [inspect.getsource(sys.modules[name]) for name in names if not name.startswith("torch.nn.modules.")]
    except (OSError, KeyError):
        return True
    return any(map(SKIPS_META.search, sources))


def _with_values(parameter: nn.Parameter, whole: torch.Tensor) -> nn.Parameter:
    cut = getattr(parameter, "cut", None)
    made = nn.Parameter(whole if cut is None else cut.of(whole), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    if hasattr(made, "gradient_hook"):
        made.register_hook(made.gradient_hook)
    return made


@contextlib.contextmanager
def _parameters_without_memory(calls: "_Calls") -> Iterator[None]:
    """Put parameters on the meta device as modules take them. Buffers (rotary frequencies) are computed as usual, and
    what a module has given to a vector is recorded."""

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        made = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        if made.dim() < 2:
            calls.call(torch.Tensor.copy_, made.data, parameter.data, is_random=False)
        return made

    handle = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()


class _Calls(DispatchMode):
    """Records what is written to tensors on the meta device, and keeps the random generator in step."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, list[tuple[Any, ...]]] = {}  # of each storage
        self._alive: list[torch.Tensor] = []  # so that no other storage takes one's id

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name, tensor = kwargs or {}, func.__name__.split(".")[0], args[0] if args else None
        if not torch.is_tensor(tensor) or not tensor.is_meta or not name.endswith("_"):
            return func(*args, **kwargs)
        return self.call(func, tensor, *args[1:], is_random=name in RANDOM, **kwargs)

    def call(
        self, func: Callable[..., Any], tensor: torch.Tensor, *args: Any, is_random: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Record a call that would have written to a tensor on the meta device."""
        state = None
        if is_random:
            state = torch.get_rng_state()
            func(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs)
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._calls.setdefault(id(tensor.untyped_storage()), []).append((state, func, place, args, kwargs))
        self._alive.append(tensor)
        return tensor

    def know(self, tensor: torch.Tensor) -> bool:
        """Whether all that a tensor's values come from was recorded."""
        calls = self._calls.get(id(tensor.untyped_storage()), [])
        return not tensor.is_meta or (
            bool(calls) and all(self.know(each) for *_, args, _ in calls for each in args if torch.is_tensor(each))
        )

    def replay(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that a tensor on the meta device would have had; another tensor as it is."""
        if not tensor.is_meta:
            return tensor
        before = torch.get_rng_state()
        flat = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
        for state, func, place, args, kwargs in self._calls.get(id(tensor.untyped_storage()), []):
            if state is not None:
                torch.set_rng_state(state)
            func(
                flat.as_strided(*place),
                *(self.replay(each) if torch.is_tensor(each) else each for each in args),
                **kwargs,
            )
        torch.set_rng_state(before)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
