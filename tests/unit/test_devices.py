"""What devices can do is asked of torch; and the host's threads where the host computes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, environment, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit.record import meters
from zerofit.record.environment import describe_environment
from zerofit.strategy import devices, processes
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.host_memory import usable_cores
from zerofit.strategy.launch import Launch
from zerofit.strategy.strategy import Strategy

CPU = torch.device("cpu")


def test_a_cpu_pins_nothing_has_no_name_and_a_fused_optimizer():
    assert not devices.pins_memory(CPU)
    assert devices.device_name(CPU) is None
    assert devices.device_names(CPU) == []
    assert devices.faster_precisions(CPU) == []
    assert devices.has_fused_adamw(CPU)
    assert "gpus" not in describe_environment([], CPU)["hardware"]


def test_variables_of_network_memory_and_threads_are_recorded(monkeypatch):
    """And no others: the environment holds secrets."""
    names = "NCCL_SOCKET_IFNAME TORCH_NCCL_ASYNC_ERROR_HANDLING CUDA_DEVICE_MAX_CONNECTIONS GLOO_SOCKET_IFNAME "
    names += "PYTORCH_ALLOC_CONF OMP_NUM_THREADS"
    given = dict.fromkeys(names.split(), "4")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", "secret")
    recorded = describe_environment([], CPU)["variables"]
    assert given.items() <= recorded.items()
    assert "HF_TOKEN" not in recorded


@pytest.fixture
def other(monkeypatch):
    """A device kind that nobody has heard of, with two devices."""
    module = SimpleNamespace(
        get_device_name=lambda device: f"Accelerator {device.index}", is_bf16_supported=lambda: True
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    devices.pins_memory.cache_clear()
    yield torch.device("xpu:1")
    devices.pins_memory.cache_clear()


def test_devices_of_any_kind_are_named_and_pin_where_they_can(other, monkeypatch):
    assert devices.device_names(other) == ["Accelerator 0", "Accelerator 1"]
    assert describe_environment([], other)["hardware"]["gpus"] == ["Accelerator 0", "Accelerator 1"]
    assert not devices.pins_memory(other), "there is none on this machine"
    devices.pins_memory.cache_clear()
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory: SimpleNamespace(is_pinned=lambda: pin_memory))
    assert devices.pins_memory(other)
    assert not devices.pins_memory(torch.device("mps"))


def test_peaks_are_those_of_the_device_by_name_whatever_its_kind(other, monkeypatch):
    monkeypatch.setattr(meters, "device_name", lambda device: "AMD Instinct MI250X")
    assert meters.peak_flops(other, "bf16") == 191.5e12, "of one of its two dies"
    assert meters.peak_flops(other, "fp32") is None


@pytest.mark.parametrize(("precision", "hinted"), [("fp32", True), ("bf16", False)])
def test_fp32_on_a_device_that_has_bf16_is_hinted_at(other, monkeypatch, precision, hinted):
    monkeypatch.setattr(processes, "Accelerator", lambda **options: SimpleNamespace(num_processes=1, device=other))
    launch = Launch(1, 0, False, None, None, None, threads_are_the_users=True)
    _, notes = processes.start_processes(Strategy(launch, BatchSizes(1, 1, 1), precision, None, ""))
    assert [("--precision bf16" in note) for note in notes] == ([True] if hinted else [])


THREADS = """
import ctypes, os, torch
from zerofit.strategy.devices import use_threads_of_share
assert torch.get_num_threads() == 1
os.sched_getaffinity = lambda process: range(12)
use_threads_of_share()
openmp = ctypes.CDLL("libgomp.so.1")  # what DeepSpeed's CPU Adam is linked with: torch's own, where it has this name
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], openmp.omp_get_max_threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp.so.1 is Linux's")
def test_threads_are_given_back_to_torch_and_to_what_is_parallel_through_openmp():
    ours = environment(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="3", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", THREADS], env=ours, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["4", "4", "4"], done.stderr


BOUND = """
import os, sys, torch
from zerofit.strategy import devices

torch.cuda.is_available = lambda: True
cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
nodes = {0: {cores[0]}, 1: {cores[1]}, 2: set(cores)}  # NUMA nodes made up of two cores that are there
node_of = [int(node) for node in sys.argv[1]]
devices.binding._get_numa_node_index_for_gpu_index = lambda gpu_index: node_of[gpu_index]
devices.binding._get_allowed_logical_cpu_indices_for_numa_node = lambda numa_node_index: nodes[numa_node_index]
if len(sys.argv) > 2:
    def forbidden(*_):
        raise PermissionError("not permitted")
    os.sched_setaffinity = forbidden
torch.set_num_threads(2)
large = torch.ones(1000, 1000)
large @ large  # threads that are there before
sharing, note = devices.bind_to_numa_node()
devices.use_threads_of_share(sharing)
large @ large
masks = {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}
print(len(masks), sorted(map(cores.index, min(masks))), sharing, torch.get_num_threads())
print(note)
"""


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
@pytest.mark.parametrize(
    ("nodes", "forbidden", "masks", "said"),
    [
        ("0011", (), "1 [1] 2 1", "2 on the 1 cores of node 0, 2 on the 1 cores of node 1"),
        ("2222", (), "1 [0, 1] 4 1", "None"),  # one node
        ("0000", (), "1 [0, 1] 4 1", "some of the cores are beside no GPU"),
        ("0011", ("forbidden",), "1 [0, 1] 4 1", "not bound to the NUMA nodes of their GPUs: PermissionError"),
    ],
)
def test_ranks_are_bound_to_the_numa_node_of_their_gpu_with_all_their_threads(nodes, forbidden, masks, said):
    ours = environment(LOCAL_RANK="2", LOCAL_WORLD_SIZE="4", PYTHONPATH=str(ROOT))
    words = [sys.executable, "-c", BOUND, nodes, *forbidden]
    done = subprocess.run(words, env=ours, capture_output=True, text=True, cwd=ROOT)
    counted, note = done.stdout.splitlines()
    assert counted == masks, done.stderr
    assert said in note


@pytest.mark.parametrize(("offload", "of_user", "given"), [
    ("cpu", False, True), ("nvme", False, True), ("none", False, False), (None, False, False), ("cpu", True, False),
])  # fmt: skip
def test_with_a_gpu_threads_are_given_back_where_the_optimizer_is_offloaded(monkeypatch, offload, of_user, given):
    calls = []
    monkeypatch.setattr(processes, "use_threads_of_share", calls.append)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(processes, "Accelerator", lambda **options: SimpleNamespace(num_processes=1, device=CPU))
    monkeypatch.setattr(processes, "_deepspeed_plugin", lambda strategy: None)
    monkeypatch.setattr(processes, "drop_abandoned_locks", list)
    monkeypatch.setattr(processes, "check_async_io", lambda *_: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    zero = {"stage": 2} | ({"offload_optimizer": {"device": offload}} if offload else {})
    launch = Launch(1, 0, True, None, None, None, threads_are_the_users=of_user)
    processes.start_processes(Strategy(launch, BatchSizes(1, 1, 1), "bf16", {"zero_optimization": zero}, ""))
    assert bool(calls) == given


def test_deepspeed_is_spared_what_it_does_for_nothing_on_a_cpu(monkeypatch):
    """It compiles nothing with its first process group, and starts `numactl` once at most."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import TorchBackend

    backend, asked = sys.modules["deepspeed.comm.torch"], []
    monkeypatch.setattr(backend, "build_shm_op", lambda: pytest.fail("compiled"))
    monkeypatch.setattr(get_accelerator(), "device_count", lambda: asked.append(1) or 3, raising=False)
    processes.spare_deepspeed_on_a_cpu()
    assert TorchBackend.__init__.__globals__["build_shm_op"]() is None
    assert [get_accelerator().device_count() for _ in range(5)] == [3] * 5
    assert len(asked) == 1


class Casts(TorchDispatchMode):
    """Counts what is cast from one dtype to another."""

    def __init__(self):
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].dtype != output.dtype:
            self.number, self.bytes = self.number + 1, self.bytes + args[0].nbytes + output.nbytes
        return output


def casts_and_kept_bytes(layers: int, autocasts: bool) -> list[int]:
    """Of a forward and a backward pass: casts of each, their bytes, bytes that are kept in between."""
    model = tiny_model("llama", num_hidden_layers=layers, hidden_size=64, intermediate_size=172)
    model = model if autocasts else model.bfloat16()
    weights, kept = {parameter.data_ptr() for parameter in model.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.arange(4 * 64).view(4, 64) % 97
    with Casts() as casts, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            loss = model(input_ids=ids, labels=ids).loss
        forward = casts.number
        loss.backward()
    return [forward, casts.number - forward, casts.bytes, sum(storage.nbytes() for storage in kept.values())]


@pytest.mark.parametrize(
    ("autocasts", "of_a_layer"), [(True, [14, 20, 2313216, 973312]), (False, [4, 4, 786432, 718848])]
)
def test_what_bf16_costs_a_layer_with_weights_in_fp32_and_in_bf16(autocasts, of_a_layer):
    """The table of docs/measurements/strategies.md."""
    few, many = casts_and_kept_bytes(2, autocasts), casts_and_kept_bytes(6, autocasts)
    assert [(more - less) / 4 for less, more in zip(few, many)] == of_a_layer


@pytest.mark.parametrize(("precision", "kind", "accumulation", "is_told"), [
    ("bf16", "cuda", 8, True), ("bf16", "cuda", 1, False), ("bf16", "cpu", 8, False), ("fp16", "cuda", 8, False),
])  # fmt: skip
def test_a_run_that_casts_its_weights_in_each_micro_batch_is_told_of_zero1(precision, kind, accumulation, is_told):
    strategy = Strategy(Launch(1, 0, False, None, None, None), BatchSizes(1, accumulation, 1), precision, None, "")
    assert bool(strategy.faster_pair(kind)) == is_told
