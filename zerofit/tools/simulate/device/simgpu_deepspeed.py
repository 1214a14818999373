"""DeepSpeed's accelerator of the simulated device: the device's memory, streams and random state, the CPU's
operators."""

from typing import Any

import simgpu
import torch
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}

# methods that are functions of simgpu
METHODS_OF_SAME_NAME = (
    "set_device current_device device_count device synchronize get_rng_state manual_seed initial_seed manual_seed_all "
    "stream current_stream default_stream empty_cache memory_allocated memory_stats max_memory_allocated "
    "memory_reserved max_memory_reserved reset_peak_memory_stats set_rng_state"
).split()
METHODS_OF_OTHER_NAME = {  # {method: function of simgpu}
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


class SimulatedAccelerator(CPU_Accelerator):
    """DeepSpeed's accelerator of the simulated device. It is a CPU_Accelerator, so that CPUAdam is built for the
    host."""

    def __init__(self) -> None:
        super().__init__()
        self._name = simgpu.NAME
        self._communication_backend_name = "gloo"

    def is_synchronized_device(self) -> bool:
        return False

    def is_fp16_supported(self) -> bool:
        return True

    # CPU_Accelerator overrides these methods of the base class with ones that pin nothing.
    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    @property
    def Stream(self) -> type[torch.Stream]:
        return simgpu.Stream

    @property
    def Event(self) -> type[torch.Event]:
        return simgpu.Event

    def device_name(self, device_index: int | None = None) -> str:
        return simgpu.NAME if device_index is None else f"{simgpu.NAME}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(simgpu.current_device())

    def default_generator(self, device_index: int) -> torch.Generator:
        return simgpu.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return simgpu.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == simgpu.NAME


def _tensor_type(dtype: torch.dtype) -> property:
    """Return a property like torch.cuda.FloatTensor, which is called with sizes or with data."""

    def make(*args: Any) -> torch.Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device=simgpu.NAME)
        return torch.empty(args, dtype=dtype, device=simgpu.NAME)

    return property(lambda self: make)


for _name, _dtype in TENSOR_TYPES.items():
    setattr(SimulatedAccelerator, _name, _tensor_type(_dtype))
for _name, _function in {**dict(zip(METHODS_OF_SAME_NAME, METHODS_OF_SAME_NAME)), **METHODS_OF_OTHER_NAME}.items():
    setattr(SimulatedAccelerator, _name, staticmethod(getattr(simgpu, _function)))
