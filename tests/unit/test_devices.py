"""What devices can do is asked of torch; and the host's threads where the host computes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, environment

from zerofit.record.environment import describe_environment
from zerofit.strategy import devices

CPU = torch.device("cpu")


def test_a_cpu_pins_nothing_has_no_name_and_a_fused_optimizer():
    assert not devices.pins_memory(CPU)
    assert devices.device_name(CPU) is None
    assert devices.device_names(CPU) == []
    assert devices.faster_precisions(CPU) == []
    assert devices.has_fused_adamw(CPU)
    assert "gpus" not in describe_environment([], CPU)["hardware"]


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
