"""What a run says whose memory ran out: real errors are recognised, and remedies follow from sizes."""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, environment, tiny_model
from torch.distributed import DistBackendError

from zerofit.health.out_of_memory import (
    explain,
    figures_of,
    host_advice,
    is_out_of_memory,
    report,
    sizes_of,
    take_stock,
)
from zerofit.health.remedies import Held, Situation, remedies, smaller_batch
from zerofit.model.loss import install_loss
from zerofit.recipe import ClmRecipe, Seq2SeqRecipe
from zerofit.record.meters import MemoryMeter
from zerofit.record.terminal import size
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.torch_engine import TorchEngine

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
DDP = Situation(
    where="device", phase="backward", rank=1, update=3, world_size=4, local_processes=4, strategy="ddp",
    asked=2 * GIB, free=GIB // 2, total=80 * GIB, held=Held(8 * GIB, 8 * GIB, 16 * GIB, 30 * GIB),
    micro_batch=8, accumulation=2, row_tokens=1024, lengths={"block_size": 1024}, layers=24, layer_inputs=GIB,
    logits=6 * GIB, can_chunk=True, pretrained=True,
)  # fmt: skip


def options(situation: Situation) -> dict[str, float]:
    """{option: GiB saved}."""
    return {remedy.option: (remedy.saves or 0) / GIB for remedy in remedies(situation)}


# -------------------------------------------------------------------------------------------------------------- errors

REAL = """
import resource, sys, torch
sys.path.insert(0, {root!r})
import psutil
from zerofit.record.terminal import size
from zerofit.health.out_of_memory import figures_of, is_out_of_memory
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28,) * 2)
for make in (lambda: torch.empty(2**30), lambda: bytearray(2**32), lambda: torch.arange(2**12).numpy().repeat(2**18)):
    try:
        make()
    except BaseException as error:
        print(is_out_of_memory(error), figures_of(error).get("asked"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process cannot be limited elsewhere")
def test_real_errors_of_the_host_are_recognised():
    done = subprocess.run([sys.executable, "-c", REAL.format(root=str(ROOT))], capture_output=True, text=True,
                          env=environment(), timeout=60)  # fmt: skip
    assert done.stdout.splitlines() == [
        "host 4294967296", "host None", "host 8589934592",
    ], done.stderr  # fmt: skip


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError(CUDA), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device"),
        (RuntimeError(NO_HANDLE), "device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa)`"), None),
        (DistBackendError(NCCL.format("Cuda failure 2 'out of memory'")), "device"),
        (DistBackendError(NCCL.format("Cuda failure 'out of memory'")), "device"),
        (DistBackendError(NCCL.format("Failed to CUDA calloc async 4 bytes")), "device"),
        (DistBackendError(NCCL.format("Failed to CUDA host alloc 4194304 bytes")), "host"),
        (DistBackendError(NCCL.format("Cuda failure 1 'invalid argument'")), None),
        (RuntimeError(PIN_THREAD), "host"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."), "device"),
        (RuntimeError("std::bad_alloc"), "host"),
        (OSError(12, "Cannot allocate memory"), "host"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None),
        (OSError(28, "No space left on device"), None),
        (ValueError("std::bad_alloc is a C++ exception"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    ],
)
def test_errors_by_their_text(error, where):
    assert is_out_of_memory(error) == where
    wrapped = RuntimeError("DataLoader worker failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) == where


def test_a_pinned_block_that_is_refused_is_host_memory():
    """torch says of it what it says of a device; the line of the program tells them apart."""
    found = []
    for refused in (
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).pin_memory(),
        lambda: torch.empty(2, dtype=torch.int8, pin_memory=True),
    ):
        try:
            refused()
        except (RuntimeError, AssertionError) as error:  # there is no device here
            place = error.__traceback__
            while place.tb_next and "/torch/" not in place.tb_next.tb_frame.f_code.co_filename:
                place = place.tb_next
            place.tb_next = None
            found.append(is_out_of_memory(RuntimeError("CUDA error: out of memory").with_traceback(place)))
    assert found == ["device", "host", "host"]


def test_where_cublas_cannot_start_the_message_is_not_sure(tiny_run):
    recipe, strategy, engine = tiny_run
    said = [explain(RuntimeError(text), phase="forward", update=1, recipe=recipe, strategy=strategy, engine=engine)
            for text in (NO_HANDLE, "CUDA error: out of memory")]  # fmt: skip
    assert ["mostly for want of memory, but not always" in message for message in said] == [True, False]


def test_figures_are_read_from_the_error():
    assert figures_of(torch.OutOfMemoryError(CUDA)) == {
        "asked": 2.5 * GIB, "total": round(79.1 * GIB), "free": GIB / 2, "in_use": 75 * GIB, "unused": 4 * GIB,
    }  # fmt: skip
    assert figures_of(RuntimeError("something else")) == {}


# ------------------------------------------------------------------------------------------------------------ remedies


def test_remedies_come_by_what_they_save():
    found = remedies(DDP)
    assert len(found) >= 9
    savings = [remedy.saves for remedy in found]
    assert savings == sorted(savings, reverse=True)
    assert all(saved > 0 for saved in savings)


def test_savings_follow_from_the_sizes():
    saved = options(DDP)
    assert saved["--per_device_train_batch_size 4 --gradient_accumulation_steps 4"] == 16  # half of 30 + 2 asked for
    assert saved["--loss chunked"] == 6
    assert saved["--gradient_checkpointing"] == pytest.approx(26 - 1 - 26 / 24)
    pair = "--config_file accelerate_configs/{}.yaml".format
    assert saved[pair("zero1")] == 12  # 3/4 of 16
    assert saved[pair("zero2")] == 18  # and of 8
    assert saved[pair("zero3")] == 24  # and of 8
    assert saved[pair("zero2_offload")] == 16 + 6
    assert saved["--lora"] == 24


def test_every_layer_can_be_recomputed_where_some_are():
    half = options(replace(DDP, gradient_checkpointing=2))
    assert half["--gradient_checkpointing full"] == pytest.approx(26 - 1 - (26 - 0.5) / 12)  # 12 layers are whole
    assert "--activation_offload" not in half
    full = replace(DDP, gradient_checkpointing=True, can_offload_inputs=True)
    assert options(full)["--activation_offload"] == pytest.approx(22 / 24)
    for change in ({"where": "host"}, {"can_offload_inputs": False}):
        assert "--activation_offload" not in options(replace(full, **change))
    (unknown,) = (one for one in remedies(replace(DDP, gradient_checkpointing="selective")) if one.saves is None)
    assert unknown.option == "--gradient_checkpointing full"


def test_nothing_in_force_is_proposed():
    in_force = replace(
        DDP, gradient_checkpointing=True, can_chunk=False, lora=True, precision="bf16", stage=3, strategy="zero3",
        offload_optimizer=True, offload_parameters=True, global_batch_is_set=True, lengths={}, world_size=4,
    )  # fmt: skip
    assert list(options(in_force)) == ["--per_device_train_batch_size 4"]
    assert options(replace(in_force, micro_batch=1)) == {}


def test_quantised_weights_are_not_to_be_shared_out():
    pairs = " ".join(options(replace(DDP, lora=True, quantised=True)))
    assert "zero2.yaml" in pairs
    assert "zero3" not in pairs


def test_one_process_shares_nothing():
    pairs = [option for option in options(replace(DDP, world_size=1)) if "--config_file" in option]
    assert sorted(re.findall(r"/(\w+)\.yaml", " ".join(pairs))) == ["zero2_offload", "zero3_offload"]


def saved_by(situation: Situation, pair: str) -> float | None:
    """GiB; None: it is not proposed."""
    return next((saved for option, saved in options(situation).items() if f"/{pair}.yaml" in option), None)


def test_two_processes_share_layers_or_split_rows():
    both = replace(DDP, can_share_layers=True, can_split_rows=True)
    assert saved_by(both, "tp") == pytest.approx(4 + 4 + 12 + 32 * 24 / 34 / 2)  # 3/4 of the optimizer
    assert saved_by(both, "sp") == pytest.approx(6 + 6 + 12 + 16)
    assert any("tp.yaml --gradient_accumulation_steps 4" in option for option in options(both))
    third = replace(both, stage=3, held=Held(2 * GIB, 2 * GIB, 4 * GIB, 30 * GIB))
    assert saved_by(third, "tp_zero3") == pytest.approx(32 * 24 / 34 / 2)  # the shards stay as they are
    assert saved_by(third, "sp") == 16
    assert saved_by(replace(both, phase="load"), "tp") == 4 + 4 + 12
    assert saved_by(replace(both, phase="load"), "sp") is None
    for not_possible in (DDP, replace(both, tensor=2), replace(both, sequence=2), replace(both, world_size=3)):
        assert not any(remedy.what.startswith("2 processes") for remedy in remedies(not_possible))


def test_what_takes_more_than_a_pipeline_is_not_proposed_to_it():
    pipeline = replace(DDP, stage=1, strategy="pp", pipeline=2, can_share_layers=True, can_split_rows=True)
    assert "--gradient_checkpointing" in options(pipeline)
    assert not any(".yaml" in option for option in options(pipeline))
    split_rows = replace(DDP, stage=3, strategy="sp", sequence=2)
    assert not any("offload" in option for option in options(split_rows))


def test_only_models_that_ranks_can_share_are_shared(tiny_run):
    recipe, strategy, engine = tiny_run
    found = take_stock(MemoryError(), "forward", 1, recipe, strategy, engine)
    assert (found.can_share_layers, found.can_split_rows) == (True, True)
    before = take_stock(MemoryError(), "load", None, recipe, strategy)  # by the recipe's configuration
    assert before.can_share_layers
    adapted = recipe.draft()
    adapted.lora = True
    assert not take_stock(MemoryError(), "forward", 1, adapted, strategy, engine).can_split_rows
    engine.module.config.n_head = 3
    odd = take_stock(MemoryError(), "forward", 1, recipe, strategy, engine)
    assert (odd.can_share_layers, odd.can_split_rows) == (False, False)


def test_remedies_belong_to_the_phase():
    for phase in ("update", "load", "save"):
        assert not any("batch_size" in option or "loss" in option for option in options(replace(DDP, phase=phase)))
    evaluation = options(replace(DDP, phase="evaluate", eval_batch=16, generates=True, beams=4))
    assert evaluation["--per_device_eval_batch_size 8"] == 16
    assert evaluation["--num_beams 1"] == 24
    assert "--gradient_checkpointing" not in evaluation


def test_optimizer_state_that_is_still_to_come_counts():
    first = replace(DDP, phase="update", held=Held(8 * GIB, 8 * GIB, 0, GIB), due=Held(optimizer=16 * GIB))
    assert options(first)["--config_file accelerate_configs/zero1.yaml"] == 12
    assert "optimizer state (none now; about 16.00 GiB to come)" in report(first)


def test_gradients_that_are_gone_are_not_saved():
    evaluating = replace(DDP, phase="evaluate", held=Held(8 * GIB, 0, 16 * GIB, GIB), due=Held(gradients=8 * GIB))
    assert options(evaluating)["--lora"] == 16
    assert options(replace(evaluating, phase="update"))["--lora"] == 24


def test_offload_is_proposed_where_the_host_has_room():
    room = {
        "zero2_offload": 17 * GIB,
        "zero3_offload": 25 * GIB,
    }  # four processes, each with a quarter of 16 (+ 8) GiB
    for pair, free in room.items():
        option = f"--config_file accelerate_configs/{pair}.yaml"
        assert option in options(replace(DDP, host_free=free))
        assert option not in options(replace(DDP, host_free=free - 2 * GIB))


def test_host_memory_has_remedies_of_its_own():
    offloading = replace(
        DDP, where="host", stage=3, offload_optimizer=True, dataloader_workers=4, lengths={},
        held=Held(0, 0, 16 * GIB, 4 * GIB), copies={"save_async": 16 * GIB, "dataloader_num_workers": 2 * GIB},
    )  # fmt: skip
    assert list(options(offloading)) == [
        "--num_processes 2 --gradient_accumulation_steps 4",
        "--config_file accelerate_configs/zero3.yaml",
        "--save_async false",
        "--dataloader_num_workers 0",
    ]


def test_every_pair_that_is_proposed_exists():
    named = set()
    for stage in range(4):
        for offload in (False, True) if stage > 1 else (False,):
            for where in ("device", "host"):
                situation = replace(DDP, stage=stage, offload_optimizer=offload, where=where, can_share_layers=True,
                                    can_split_rows=True)  # fmt: skip
                named |= set(re.findall(r"--config_file (\S+)", " ".join(options(situation))))
    assert len(named) >= 10
    assert all((ROOT / name).is_file() for name in named), named


def test_every_option_that_is_proposed_exists():
    known = {*ClmRecipe().to_dict(), *Seq2SeqRecipe().to_dict(), "config_file", "num_processes", "save_async"}
    situations = (DDP, replace(DDP, phase="evaluate", eval_batch=4, beams=2, generates=True),
                  replace(DDP, where="host", dataloader_workers=2))  # fmt: skip
    named = {name for s in situations for option in options(s) for name in re.findall(r"--(\w+)", option)}
    assert len(named) >= 10
    assert named <= known


@pytest.mark.parametrize(("sizes", "smaller"), [((8, 1), (4, 2)), ((6, 3), (3, 6)), ((5, 1), (1, 5)), ((1, 4), None)])
def test_the_global_batch_stays(sizes, smaller):
    assert smaller_batch(*sizes) == smaller


def test_the_message_is_short_and_says_where():
    lines = report(DDP).splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("out of memory: rank 1 of 4, backward of update 3, the device's memory")
    assert lines[1] == "  asked for 2.00 GiB; 512.0 MiB of 80.00 GiB free"
    assert any(re.fullmatch(r"\s+activations, logits and workspace\s+30\.00 GiB", line) for line in lines)


# ---------------------------------------------------------------------------------------------------- of a real engine


@pytest.fixture
def tiny_run():
    """(recipe, strategy, engine) of a tiny GPT-2 on the CPU."""
    recipe = ClmRecipe(config_name="gpt2", block_size=64, per_device_train_batch_size=4)
    launch = SimpleNamespace(rank=0, world_size=1)
    strategy = SimpleNamespace(
        layout=ParallelLayout(), name="single", deepspeed=None, batches=BatchSizes(4, 1, 1), launch=launch,
        precision="fp32", shards_parameters=False, tensor=1, stage=0,
    )  # fmt: skip
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, is_main_process=True)
    accelerator.prepare = lambda model, optimizer: (model, SimpleNamespace(optimizer=optimizer))
    model = tiny_model("gpt2")
    install_loss(model, "full")
    engine = TorchEngine(strategy, accelerator, model, recipe, None)
    return recipe, strategy, engine


def test_an_engine_is_measured(tiny_run):
    recipe, strategy, engine = tiny_run
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes.")
    message = explain(error, phase="backward", update=1, recipe=recipe, strategy=strategy, engine=engine)
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    assert re.search(rf"weights\s+{size(weights)}", message)
    assert f"about {size(2 * weights)} to come" in message
    assert "asked for 1.00 GiB" in message
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 2" in message
    assert "offload" not in message, "on a CPU there is nothing to move to the host"
    assert any("batch_size" in line for line in host_advice(recipe, strategy, engine))


def on_a_device(engine, monkeypatch, peak: int) -> None:
    """Let the engine's device be another one than the CPU, whose allocator has had this peak."""
    engine.accelerator.device = torch.device("meta")
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: peak)


def test_the_program_is_no_part_of_a_device_s_peak(tiny_run, monkeypatch):
    """It is on the host: of a device's peak nothing is to be taken away but what the model holds there."""
    recipe, strategy, engine = tiny_run
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    on_a_device(engine, monkeypatch, weights + 3 * 2**20)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
    found = take_stock(error, "forward", 1, recipe, strategy, engine, program_bytes=600 * 2**20)
    assert (found.held.weights, found.held.rest) == (weights, 3 * 2**20)
    assert found.activations == 4 * 2**20
    batch = next(remedy for remedy in remedies(found) if "batch_size" in remedy.option)
    assert batch.saves == 2 * 2**20  # half of the rows


def test_on_a_cpu_the_program_is_no_activation(tiny_run, monkeypatch):
    recipe, strategy, engine = tiny_run
    monkeypatch.setattr(MemoryMeter, "peak_bytes", lambda self: 900 * 2**20)
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    found = take_stock(MemoryError(), "forward", 1, recipe, strategy, engine, program_bytes=600 * 2**20)
    assert found.held.rest == 300 * 2**20 - weights


def test_ddp_holds_gradients_from_the_beginning(tiny_run, tmp_path):
    """Its buckets do, once, whether there are gradients by now or not."""
    recipe, strategy, engine = tiny_run
    weights = sum(parameter.nbytes for parameter in engine.module.parameters())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        engine.model = torch.nn.parallel.DistributedDataParallel(engine.module, gradient_as_bucket_view=True)
        found = take_stock(MemoryError(), "forward", 1, recipe, strategy, engine)
    finally:
        torch.distributed.destroy_process_group()
    assert found.held.gradients == found.due.gradients == weights


# ------------------------------------------------------------------------------------------- before there is an engine

LOADING = replace(
    DDP, phase="load", update=None, held=Held(3 * GIB, rest=GIB), due=Held(8 * GIB, 8 * GIB, 16 * GIB),
    parameters=2 * GIB,
)  # fmt: skip


def test_while_loading_only_what_makes_weights_smaller_helps():
    pair = "--config_file accelerate_configs/{}.yaml".format
    assert options(LOADING) == {
        pair("zero3_offload"): 8, "--lora --load_in_4bit --precision bf16": 7, pair("zero3"): 6,
        "--lora --precision bf16": 4,
    }  # fmt: skip
    assert list(options(replace(LOADING, stage=2))) == [
        pair("zero3_offload"), "--lora --load_in_4bit --precision bf16", pair("zero3"), "--precision bf16",
    ]  # fmt: skip
    half = replace(LOADING, stage=3, element=2, precision="bf16")
    assert list(options(half)) == [pair("zero3_offload")]
    assert list(options(replace(half, where="host", on_cpu=True))) == [], "fewer processes would hold more each"
    on_cpu = options(replace(LOADING, where="host", on_cpu=True))
    assert on_cpu == {
        "--num_processes 2 --gradient_accumulation_steps 4": 16, pair("zero3"): 6, "--lora --precision bf16": 4,
    }  # fmt: skip


def test_the_model_s_size_stands_against_the_limit():
    lines = report(replace(LOADING, total=24 * GIB)).splitlines()
    assert lines[2] == (
        "  the model has 2,147,483,648 parameters: of each rank 8.00 GiB of weights, 32.00 GiB with gradients and "
        "optimizer state, of the 24.00 GiB that it may have (8.00 GiB too much)"
    )
    assert re.fullmatch(r"\s+weights, so far \(about 8\.00 GiB once loaded\)\s+3\.00 GiB", lines[4])
    assert "(activations come on top)" in report(LOADING)
    shared = report(replace(LOADING, where="host", on_cpu=True, total=24 * GIB, process_limit=7 * GIB))
    assert "of the 6.00 GiB that it may have" in shared, "four processes share the host"
    assert "no option saves memory here" in report(replace(LOADING, pretrained=False, where="host", local_processes=1,
                                                           world_size=1, on_cpu=True))  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "precision", "lora", "sizes"),
    [
        (None, "fp32", False, (400, 400, 800)), (None, "bf16", False, (400, 400, 800)),
        (None, "bf16", True, (200, 0, 0)), (1, "bf16", False, (200, 200, 300)),
        (2, "bf16", False, (200, 50, 300)), (3, "bf16", False, (50, 50, 300)), (3, "fp32", True, (100, 0, 0)),
        ("fsdp2", "bf16", False, (100, 100, 200)), ("fsdp2", "bf16", True, (50, 0, 0)),
    ],
)  # fmt: skip
def test_the_state_of_a_rank_by_the_number_of_parameters(stage, precision, lora, sizes):
    strategy = SimpleNamespace(deepspeed={} if isinstance(stage, int) else None, precision=precision,
                               stage={None: 0, "fsdp2": 3}.get(stage, stage), layout=ParallelLayout(4),
                               tensor=1)  # fmt: skip
    found = sizes_of(strategy, ClmRecipe(lora=lora), 100)
    assert (found.weights, found.gradients, found.optimizer) == sizes


def test_the_state_of_a_rank_that_has_half_of_each_layer():
    strategy = SimpleNamespace(deepspeed={}, stage=2, precision="bf16", tensor=2,
                               layout=ParallelLayout(4, tensor=2))  # fmt: skip
    found = sizes_of(strategy, ClmRecipe(), 100)
    assert (found.weights, found.gradients, found.optimizer) == (100, 50, 300)


def test_what_is_loaded_so_far_is_measured(tiny_run, monkeypatch):
    recipe, strategy, _ = tiny_run
    monkeypatch.setattr("zerofit.health.out_of_memory.resident_bytes", lambda: 5 * GIB)
    found = take_stock(MemoryError(), "load", None, recipe, strategy, parameters=GIB, program_bytes=2 * GIB)
    assert (found.held.weights, found.held.rest, found.weights, found.whole) == (3 * GIB, 2 * GIB, 4 * GIB, 16 * GIB)
    advice = host_advice(recipe, strategy, parameters=GIB)
    assert advice[0].startswith("model    the model has 1,073,741,824 parameters")


def test_copies_for_checkpoints_are_given_up_only_where_there_are_any(tiny_run):
    """In a first forward pass `--save_async false` stood before all others."""
    recipe, strategy, engine = tiny_run
    moments = (("forward", 0), ("forward", 2**30), ("load", 0))
    of_run = {"update": 1, "recipe": recipe, "strategy": strategy, "engine": engine}
    said = [explain(MemoryError(), phase=phase, copied=copied, **of_run) for phase, copied in moments]
    assert ["--save_async false" in message for message in said] == [False, True, False]
    assert "about 1.00 GiB  --save_async false" in said[1]


def test_what_cannot_be_measured_is_left_out(tiny_run):
    recipe, strategy, _ = tiny_run
    message = explain(MemoryError(), phase="load", update=None, recipe=recipe, strategy=strategy)
    assert message.startswith("out of memory: rank 0 of 1, load, host memory")
    assert "held by this rank" not in message
    assert "about" not in message
