"""The Python module of the simulated device: torch.simgpu, the counterpart of torch.cuda. Importing it registers the
device.

Environment:
    SIMGPU_LIBRARY: the extension (zerofit/tools/simulate/build.py). If it is set, sitecustomize.py imports this
    module.
    SIMGPU_MEMORY: comma-separated bytes of each device ("1000000,2000000": two devices); by default one of 16 GiB.
        Processes that share a device have this much each.
    SIMGPU_NAME: the device's type; simgpu by default. accelerate allows fp16 only on types that it knows, "npu" for
    one. SIMGPU_MODEL: the device's name.
    SIMGPU_WITHOUT_DATA: 1: floating-point memory is never touched and reads as zeros; nothing is computed with it
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
DeviceLike = torch.device | str | int | None  # None: the current device

_loader = ExtensionFileLoader("simgpu_c", os.environ["SIMGPU_LIBRARY"])
_C = importlib.util.module_from_spec(ModuleSpec("simgpu_c", _loader, origin=_loader.path))
_loader.exec_module(_C)
_C.init([int(size) for size in os.environ.get("SIMGPU_MEMORY", str(16 << 30)).split(",")], WITHOUT_DATA)


def _index(device: DeviceLike = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _C.current_device() if index is None else index


# ------------------------------------------------------------------------------------------------------------- devices

_initialized = True  # torch.utils.checkpoint keeps a device's random state only where this says so


def is_available() -> bool:
    return True


is_initialized = is_available


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """torch calls this before it uses the device."""


device_count = _C.device_count
current_device = _C.current_device


def set_device(device: DeviceLike) -> None:
    _C.set_device(_index(device))


synchronize = torch.accelerator.synchronize  # nothing is asynchronous, but an observer is told


def get_device_name(device: DeviceLike = None) -> str:
    return os.environ.get("SIMGPU_MODEL") or f"simulated device {_index(device)}"


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    return 9, 0


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    major, minor = get_device_capability(device)
    return SimpleNamespace(
        name=get_device_name(device),
        total_memory=_C.total(_index(device)),
        major=major,
        minor=minor,
        multi_processor_count=1,
    )


def device(which: DeviceLike) -> AbstractContextManager[object]:
    """Return a context in which a device is the current one."""
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


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    index = _index(device)
    _C.set_limit(index, int(_C.total(index) * fraction))


def pinned_bytes() -> int:
    """Return the bytes of pinned host memory; torch.cuda has this in host_memory_stats."""
    return _C.pinned_bytes()


def peak_host_bytes(reset: bool = False) -> int:
    """Return the peak bytes, since the last reset, that the host's floating-point tensors of a MiB or more would take,
    if SIMGPU_WITHOUT_DATA is set. Pinned ones are rounded up to a power of two, as by torch's allocator."""
    return _C.peak_host_bytes(reset)


def observe(observer: Callable[..., None] | None) -> None:
    """Call a function at each collective (of device or host tensors) and at each operation for which the host of a GPU
    would wait; None: stop.

    Args:
        observer: called with (event, bytes, name of the process group of a collective) in the thread of the operation.
            A collective has the name of torch's operator ("c10d::allreduce_") and the bytes of its larger side (output
            of an all-gather, input of a reduce-scatter). Waits are "item", "copy to host" and "copy to device" (except
            non_blocking ones of pinned memory), "synchronize stream", "... device", "... event", "empty cache", and
            operators whose shape depends on data ("aten::nonzero").
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


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    default_generators[_index(device)].set_state(state.cpu())


class Stream(torch.Stream):
    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Self:
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Self:
        return super().__new__(cls, device=torch.device(NAME, _C.current_device()), enable_timing=enable_timing)


current_stream = default_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream


class stream:
    """A context in which a stream is the current one; None: nothing changes."""

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
    _shapes = torch.library.Library("aten", "IMPL", "Meta")  # kept alive: its destruction would unregister the kernel
    _shapes.impl("mm.dtype", lambda a, b, out_dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype))

torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
