"""The simulated device in Python: torch.simgpu, as torch.cuda is of CUDA. Importing this registers the device.

Environment:
    SIMGPU_LIBRARY: the extension (zerofit/tools/simulate/build.py); sitecustomize.py imports this module where it is
        set.
    SIMGPU_MEMORY: bytes of each device, with commas between them ("1000000,2000000" are two devices); one of 16 GiB by
        default. Processes that share a device have so much each.
    SIMGPU_NAME: the device's type; simgpu by default. Libraries with lists of the types that they know (accelerate's
        fp16) let "npu" pass.
    SIMGPU_MODEL: what the device calls itself.
    SIMGPU_WITHOUT_DATA: 1: floating-point memory is never touched and reads as zeros, and nothing is computed with it
        (csrc/without_data.h).
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import SimpleNamespace
from typing import Any, Self

import torch

NAME = os.environ.get("SIMGPU_NAME", "simgpu")
WITHOUT_DATA = os.environ.get("SIMGPU_WITHOUT_DATA") == "1"
Which = torch.device | str | int | None  # a device; None: the current one


_loader = ExtensionFileLoader("simgpu_c", os.environ["SIMGPU_LIBRARY"])
_C = importlib.util.module_from_spec(ModuleSpec("simgpu_c", _loader, origin=_loader.path))
_loader.exec_module(_C)
_C.init([int(size) for size in os.environ.get("SIMGPU_MEMORY", str(16 << 30)).split(",")], WITHOUT_DATA)


def _index(device: Which = None) -> int:
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return _C.current_device() if found is None else found


# ------------------------------------------------------------------------------------------------------------- devices

_initialized = True  # torch.utils.checkpoint keeps a device's random state only where this says so


def is_available() -> bool:
    return True


is_initialized = is_available


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """torch calls it before anything else."""


device_count = _C.device_count
current_device = _C.current_device


def set_device(device: Which) -> None:
    _C.set_device(_index(device))


synchronize = torch.accelerator.synchronize  # nothing is asynchronous here; an observer sees it


def get_device_name(device: Which = None) -> str:
    return os.environ.get("SIMGPU_MODEL") or f"simulated device {_index(device)}"


def get_device_capability(device: Which = None) -> tuple[int, int]:
    return 9, 0


def get_device_properties(device: Which = None) -> SimpleNamespace:
    major, minor = get_device_capability(device)
    return SimpleNamespace(
        name=get_device_name(device),
        total_memory=_C.total(_index(device)),
        major=major,
        minor=minor,
        multi_processor_count=1,
    )


def device(which: Which) -> AbstractContextManager[object]:
    """The context in which a device is the current one."""
    return torch.accelerator.device_index(_index(which))


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


# -------------------------------------------------------------------------------------------------------------- memory


memory_stats = torch.accelerator.memory_stats
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache
mem_get_info = torch.accelerator.get_memory_info


def set_per_process_memory_fraction(fraction: float, device: Which = None) -> None:
    index = _index(device)
    _C.set_limit(index, int(_C.total(index) * fraction))


def pinned_bytes() -> int:
    """Return the bytes of the host's memory that pinned tensors take; torch.cuda has it in host_memory_stats."""
    return _C.pinned_bytes()


def peak_host_bytes(reset: bool = False) -> int:
    """Without data: the peak of what the host's floating-point tensors of a MiB or more would take, since the last
    reset; page-locked ones are rounded up to a power of two, as torch's allocator does."""
    return _C.peak_host_bytes(reset)


def observe(observer: Callable[..., None] | None) -> None:
    """Have a function called with each collective, of tensors of the device or the host, and with each thing that the
    host of a GPU would wait for; None: with nothing any more.

    Args:
        observer: called in the thread that does it with the event, bytes, and a collective's process group by name. A
            collective is named as torch's operator ("c10d::allreduce_"); its bytes are those of the larger side (what
            an all-gather brings, what a reduce-scatter takes). Waits: "item", "copy to host" and "copy to device" (but
            not where it is non_blocking and of pinned memory), "synchronize stream", "... device", "... event", "empty
            cache", and operators whose shape depends on data ("aten::nonzero").
    """
    _C.observe(observer)


# ----------------------------------------------------------------------------------------------------- random, streams

default_generators = tuple(_C.default_generator(index) for index in range(_C.device_count()))


def manual_seed(seed: int) -> None:
    default_generators[_C.current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def initial_seed() -> int:
    return default_generators[_C.current_device()].initial_seed()


def get_rng_state(device: Which = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: Which = None) -> None:
    default_generators[_index(device)].set_state(state.cpu())


class Stream(torch.Stream):
    def __new__(cls, device: Which = None, priority: int = 0, **kwargs: Any) -> Self:
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Self:
        return super().__new__(cls, device=torch.device(NAME, _C.current_device()), enable_timing=enable_timing)


current_stream = default_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream


class stream:
    """The context in which a stream is the current one; None: nothing changes."""

    def __init__(self, which: torch.Stream | None):
        self.which = which

    def __enter__(self) -> None:
        if self.which is not None:
            self.before = current_stream()
            set_stream(self.which)

    def __exit__(self, *_: object) -> None:
        if self.which is not None:
            set_stream(self.before)


if WITHOUT_DATA and not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "Meta"):
    _shapes = torch.library.Library("aten", "IMPL", "Meta")  # kept: it is taken back with the object
    _shapes.impl("mm.dtype", lambda a, b, out_dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype))

torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
