"""The simulated device as DeepSpeed's accelerator: its memory, streams and random state, the CPU's built operators."""

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


def _no(self) -> bool:
    return False


def _yes(self) -> bool:
    return True


def _of(name: str):
    """A method that calls the function of this name in simgpu."""

    def call(self, *args, **kwargs):
        return getattr(simgpu, name)(*args, **kwargs)

    return call


class SimulatedAccelerator(CPU_Accelerator):
    """A CPU_Accelerator, since its operators (CPUAdam) are to be built for the host, with a device all the same."""

    def __init__(self):
        super().__init__()
        self._name, self._communication_backend_name = simgpu.NAME, "gloo"

    is_available = is_bf16_supported = is_fp16_supported = _yes
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _no

    set_device, current_device, device_count = _of("set_device"), _of("current_device"), _of("device_count")
    device, synchronize = _of("device"), _of("synchronize")
    get_rng_state, manual_seed, initial_seed = _of("get_rng_state"), _of("manual_seed"), _of("initial_seed")
    manual_seed_all = _of("manual_seed_all")
    stream, current_stream, default_stream = _of("stream"), _of("current_stream"), _of("default_stream")
    empty_cache, memory_allocated, memory_stats = _of("empty_cache"), _of("memory_allocated"), _of("memory_stats")
    max_memory_allocated, memory_reserved = _of("max_memory_allocated"), _of("memory_reserved")
    max_memory_reserved = max_memory_cached = _of("max_memory_reserved")
    memory_cached = memory_reserved
    reset_peak_memory_stats = reset_max_memory_allocated = reset_max_memory_cached = _of("reset_peak_memory_stats")

    # CPU_Accelerator has put its own, which pin nothing, before these of the base class.
    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pin_memory = DeepSpeedAccelerator._torch_pin_memory
    _torch_empty_pinned = DeepSpeedAccelerator._torch_empty_pinned

    @property
    def Stream(self):
        return simgpu.Stream

    @property
    def Event(self):
        return simgpu.Event

    def communication_backend_name(self):
        return "gloo"

    def device_name(self, device_index=None):
        return simgpu.NAME if device_index is None else f"{simgpu.NAME}:{device_index}"

    def current_device_name(self):
        return self.device_name(simgpu.current_device())

    def set_rng_state(self, new_state, device_index=None):
        simgpu.set_rng_state(new_state, device_index)

    def default_generator(self, device_index):
        return simgpu.default_generators[device_index]

    def total_memory(self, device_index=None):
        return simgpu.mem_get_info(device_index)[1]

    def available_memory(self, device_index=None):
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def on_accelerator(self, tensor):
        return tensor.device.type == simgpu.NAME

    def supported_dtypes(self):
        return [torch.float, torch.half, torch.bfloat16]


def _tensor_type(dtype: torch.dtype):
    """What torch.cuda.FloatTensor is: called with sizes or with data."""

    def make(*args):
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=dtype, device=simgpu.NAME)
        return torch.empty(args, dtype=dtype, device=simgpu.NAME)

    return property(lambda self: make)


for _name, _dtype in TENSOR_TYPES.items():
    setattr(SimulatedAccelerator, _name, _tensor_type(_dtype))
