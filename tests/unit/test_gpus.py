"""A GPU that the machine has and torch does not see: told of before anything is read. And the host's threads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, environment, refusal

from zerofit.strategy import gpus


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """The root of a file system without gpus, for a torch that sees none."""
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name in ("ACCELERATE_USE_CPU", *gpus.VISIBLE.values(), *sum(gpus.ALSO_VISIBLE.values(), ())):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def put_amd(root: Path, number: int, memory: int) -> None:
    put(root / "dev/kfd")
    put(root / f"sys/class/drm/card{number}/device/mem_info_vram_total", f"{memory}\n")


def test_a_machine_without_a_gpu(machine):
    put(machine / "dev/null")
    put_amd(machine, 0, 2**29)  # the processor's own graphics
    assert gpus.gpus_of_the_machine() == {}
    gpus.check_devices()


def test_nvidia(machine, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        put(machine / "dev" / name)
    assert gpus.gpus_of_the_machine() == {"NVIDIA": 2}
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in refusal(gpus.check_devices)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver is too old" in refusal(gpus.check_devices)


def test_amd(machine, monkeypatch):
    put_amd(machine, 1, 64 * 2**30)
    assert gpus.gpus_of_the_machine() == {"AMD": 1}
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without ROCm" in refusal(gpus.check_devices)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_USE_CPU", "True"),
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles"),
        ("NVIDIA_VISIBLE_DEVICES", "void"),
    ],
)
def test_the_cpu_is_asked_for(machine, monkeypatch, name, value):
    put(machine / "dev/nvidia0")
    refusal(gpus.check_devices)
    monkeypatch.setenv(name, value)
    gpus.check_devices()


def test_a_run_asks_before_it_reads_anything(machine):
    from zerofit.recipe import ClmRecipe, parse_recipe
    from zerofit.strategy.read import read_strategy

    put(machine / "dev/nvidia0")
    recipe = parse_recipe(ClmRecipe, ["--config_name", "gpt2", "--tokenizer_name", "gpt2", "--train_file", "none.txt"])
    assert "1 NVIDIA GPU," in refusal(read_strategy, recipe)


@pytest.mark.parametrize(
    ("has", "maps", "set_by_user", "found"),
    [
        (["dev/nvidia0"], True, {}, True),
        (["dev/nvidia0"], True, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        (["dev/nvidia0"], True, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, False),
        (["dev/nvidia0"], False, {}, False),  # a virtual GPU
        (["dev/nvidia0", "dev/dxg"], True, {}, False),  # WSL
        (["dev/null"], True, {}, False),
    ],
)
def test_segments_expand_where_the_driver_can_and_nobody_says_otherwise(
    machine, monkeypatch, has, maps, set_by_user, found
):
    monkeypatch.setattr(gpus, "_maps_memory", lambda: maps)
    kept = {name: value for name, value in gpus.os.environ.items() if name not in gpus.ALLOCATOR_CONF}
    monkeypatch.setattr(gpus.os, "environ", {**kept, **set_by_user})
    for name in has:
        put(machine / name)
    gpus.use_expandable_segments()
    assert gpus.has_expandable_segments() is found
    changed = {name: gpus.os.environ[name] for name in gpus.ALLOCATOR_CONF if name in gpus.os.environ}
    assert changed == ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if found else set_by_user)


# -------------------------------------------------------------------------------------------------- the host's threads


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
