"""What a run says whose memory ran out: real errors are recognised, and remedies follow from sizes."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, environment, tiny_model
from torch.distributed import DistBackendError

from zerofit.estimate.remedies import Shortage, find_remedies, state_setup
from zerofit.health.out_of_memory import explain, find_exhausted_memory, measure
from zerofit.model.loss import install_loss
from zerofit.recipe import ClmRecipe
from zerofit.record.terminal import size
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.engines import TorchEngine
from zerofit.strategy.layout import ParallelLayout
from zerofit.tools.plan.plan import main as plan_main

GIB = 2**30
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 512.00 MiB is "
    "free. Process 4242 has 3.60 GiB memory in use. Including non-PyTorch memory, this process has 75.00 GiB memory "
    "in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 4.00 GiB is reserved by PyTorch but "
    "unallocated."
)
NO_HANDLE = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO "
    "for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n{}"
)
PIN_THREAD = (
    "Caught AcceleratorError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
    '  File "pin_memory.py", line 60, in pin_memory\n    return data.pin_memory()\n'
    "torch.AcceleratorError: CUDA error: out of memory"
)


def strategy_of(stage=None, precision="fp32", ranks=4, offload=(), batches=(8, 2), tensor=1, pipeline=1, sequence=1):
    """A stand-in. `stage` of ZeRO, None (one process, DDP) or fsdp2; `offload`: optimizer, param."""
    zero = {"stage": stage, **{f"offload_{part}": {"device": "cpu"} for part in offload}}
    return SimpleNamespace(
        name="ddp" if stage is None else f"zero{stage}",
        precision=precision,
        batches=BatchSizes(*batches, ranks),
        deepspeed={"zero_optimization": zero} if isinstance(stage, int) else None,
        zero_stage={None: 0, "fsdp2": 3}.get(stage, stage),
        launch=SimpleNamespace(rank=1, world_size=ranks),
        layout=ParallelLayout(ranks, tensor=tensor, pipeline=pipeline, sequence=sequence),
    )


def shortage(strategy=None, recipe=None, **changes) -> Shortage:
    """8 GiB of weights, as many of gradients, 16 of moments under DDP; 32 of activations, 6 of them logits."""
    recipe = recipe or ClmRecipe(model_name_or_path="m", block_size=1024)
    strategy = strategy or strategy_of()
    setup = state_setup(strategy, recipe, 2 * GIB)
    changes = {"layers": 24, "logits": 6 * GIB, "local_processes": 4, "phase": "backward",
               "on_host": False, "held": setup.held(), "rest": 32 * GIB, **changes}  # fmt: skip
    return Shortage(recipe=recipe, strategy=strategy, setup=setup, **changes)


def options(s: Shortage) -> dict[str, float]:
    """{option: GiB saved}."""
    return {remedy.option: remedy.saves / GIB for remedy in find_remedies(s)}


def pair(name: str) -> str:
    return f"--config_file accelerate_configs/{name}.yaml"


REAL = """
import resource, sys, torch
sys.path.insert(0, {root!r})
import psutil
from zerofit.record.terminal import size
from zerofit.health.out_of_memory import requested_bytes, find_exhausted_memory
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28,) * 2)
for make in (lambda: torch.empty(2**30), lambda: bytearray(2**32), lambda: torch.arange(2**12).numpy().repeat(2**18)):
    try:
        make()
    except BaseException as error:
        print(find_exhausted_memory(error), requested_bytes(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process cannot be limited elsewhere")
def test_real_errors_of_the_host_are_recognised():
    done = subprocess.run(
        [sys.executable, "-c", REAL.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert done.stdout.splitlines() == ["host 4294967296", "host 0", "host 8589934592"], done.stderr


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError(CUDA), "device"),
        (RuntimeError(NO_HANDLE), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa)`"), None),
        (DistBackendError(NCCL.format("Cuda failure 2 'out of memory'")), "device"),
        (DistBackendError(NCCL.format("Failed to CUDA host alloc 4194304 bytes")), "host"),
        (RuntimeError(PIN_THREAD), "host"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), "device"),
        (RuntimeError("std::bad_alloc"), "host"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
    ],
)
def test_errors_by_their_text(error, where):
    assert find_exhausted_memory(error) == where
    wrapped = RuntimeError("DataLoader worker failed")
    wrapped.__cause__ = error
    assert find_exhausted_memory(wrapped) == where


def test_at_most_five_remedies_come_by_what_they_save():
    assert options(shortage()) == {
        "--gradient_checkpointing": pytest.approx(26 - 26 / 24),
        pair("zero3"): 8 + 8 + 16 - (8 + 8 + 24) / 4,
        pair("zero3_offload"): 32,
        pair("zero2_offload"): 24,
        "--lora": 24,
    }
    saved = [remedy.saves for remedy in find_remedies(shortage())]
    assert saved == sorted(saved, reverse=True)


def test_nothing_in_force_is_proposed():
    recipe = ClmRecipe(model_name_or_path="m", lora=True, gradient_checkpointing=True, global_batch_size=64)
    in_force = shortage(strategy_of(3, "bf16", offload=("optimizer", "param")), recipe, logits=0)
    assert list(options(in_force)) == ["--per_device_train_batch_size 4"]
    single = strategy_of(3, "bf16", offload=("optimizer", "param"), batches=(1, 2))
    assert options(shortage(single, recipe, logits=0)) == {}


@pytest.mark.parametrize(
    ("strategy", "quantised", "pairs"),
    [
        ({}, False, ["zero2_offload", "zero3", "zero3_offload"]),
        ({}, True, []),  # an adapter has next to no state
        ({"stage": 3}, False, ["zero3_offload", "zero3_offload_optimizer"]),
        ({"stage": 2, "offload": ("optimizer",)}, False, ["zero3_offload", "zero3_offload_optimizer"]),
        ({"stage": 1, "tensor": 2}, False, ["tp_zero3"]),
        ({"stage": 1, "pipeline": 2}, False, []),
    ],
)
def test_pairs_that_are_proposed_fit_the_run_and_exist(strategy, quantised, pairs):
    recipe = ClmRecipe(lora=quantised, load_in_4bit=quantised, gradient_checkpointing=True)
    found = options(shortage(strategy_of(**strategy), recipe, phase="update", rest=0))
    named = re.findall(r"--config_file (\S+)", " ".join(found))
    assert sorted(named) == [f"accelerate_configs/{name}.yaml" for name in pairs]
    assert all((ROOT / name).is_file() for name in named)


@pytest.fixture
def tiny_run():
    """(recipe, strategy, engine) of a tiny GPT-2 on the CPU."""
    recipe = ClmRecipe(config_name="gpt2", block_size=64, per_device_train_batch_size=4)
    strategy = strategy_of(ranks=1, batches=(4, 1))
    strategy.tensor, strategy.shards_parameters, strategy.launch.rank = 1, False, 0
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, is_main_process=True)
    accelerator.prepare = lambda model, optimizer: (model, SimpleNamespace(optimizer=optimizer))
    model = tiny_model("gpt2")
    install_loss(model, "full")
    engine = TorchEngine(strategy, accelerator, model, recipe, None)
    return recipe, strategy, engine


def run_of(recipe, strategy, engine=None, **known):
    known = {"task": "clm", "row_tokens": None, "program_bytes": 0, "parameters": 0, **known}
    return SimpleNamespace(recipe=recipe, strategy=strategy, engine=engine, **known)


def test_an_engine_is_measured(tiny_run):
    recipe, strategy, engine = tiny_run
    recipe.remember_sources({"block_size": "--block_size"})
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes.")
    facts = run_of(recipe, strategy, engine)
    message = explain(error, "backward", 1, facts)
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    assert message.startswith("out of memory: rank 0 of 1, backward of update 1, host memory (ddp, fp32)")
    assert "asked for 1.00 GiB; " in message
    assert re.search(rf"weights\s+{size(weights)}", message)
    assert f"about {size(2 * weights)} to come" in message
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 2" in message
    assert "offload" not in message, "on a CPU there is nothing to move to the host"


def test_the_command_at_the_end_is_a_plan_of_this_run(tiny_run, capsys):
    recipe, strategy, engine = tiny_run
    recipe.remember_sources({"block_size": "--block_size", "config_name": "--config_name"})
    message = explain(MemoryError(), "backward", 1, run_of(recipe, strategy, engine))
    words = shlex.split(message.splitlines()[-1])
    assert words[:8] == ["zerofit", "plan", "--task", "clm", "--block_size", "64", "--config_name", "gpt2"]
    assert plan_main([*words[2:], "--strategies", "single", "--batch_sizes", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"]


def test_host_memory_beside_a_device_and_before_there_is_an_engine(tiny_run, monkeypatch):
    recipe, strategy, _ = tiny_run
    monkeypatch.setattr("zerofit.health.out_of_memory.resident_bytes", lambda: 5 * GIB)
    facts = run_of(recipe, strategy, parameters=GIB, program_bytes=2 * GIB)
    found = measure(MemoryError(), "load", facts)
    assert (found.held.weights, found.rest, found.expected().weights) == (3 * GIB, 0, 4 * GIB)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (GIB, 80 * GIB))
    message = explain(MemoryError(), "load", None, facts)
    assert "--save_async false" in message
    assert "--host_memory" in message
    assert message.endswith("--gpu_memory 81920MiB")
