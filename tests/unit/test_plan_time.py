"""`zerofit plan`, time: operations against torch's own count, and the command."""

import pytest
import torch
from test_plan import ON_GPUS, gpt2, planned, tracer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from zerofit.estimate.allocations import MATRIX
from zerofit.estimate.planned_rows import Rows

LARGER = ["--block_size", "512", "--config_overrides",
          "n_layer=3,n_head=16,n_embd=2048,n_positions=512,vocab_size=8192"]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the operations


def test_traced_products_are_those_of_a_real_pass():
    model = AutoModelForCausalLM.from_config(gpt2(3), attn_implementation="sdpa")
    ids = torch.zeros(2, 48, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    steps = tracer(gpt2(3), Rows("clm", 48, loss_kind="full"), dtype=torch.float32).steps(2)
    traced = sum(one.flops for step in steps for one in step.operations if one.kind == MATRIX)
    assert traced == counter.get_total_flops() > 0  # it does not know a CPU's attention


# --------------------------------------------------------------------------------------------------------- the command


def test_the_parts_of_a_time_add_up_and_a_cpu_has_none(capsys):
    found = planned(capsys, *ON_GPUS, "--strategies", "ddp", "--batch_sizes", "4")["predictions"][0]
    assert found["seconds_per_update"] == pytest.approx(sum(found["seconds"].values()))
    assert found["tokens_per_s"] == pytest.approx(4 * 32 * found["layout"]["data"] / found["seconds_per_update"])
    assert found["bound"] in found["seconds"]
    flags = "--gpu cpu --gpu_memory 400MiB --num_gpus 2 --strategies ddp --batch_sizes 4".split()
    assert planned(capsys, *flags)["predictions"][0]["seconds_per_update"] is None


def test_the_fastest_come_first(capsys):
    found = planned(capsys, *LARGER, *ON_GPUS, "--strategies", "all", "--batch_sizes", "4")
    of_layouts = {(one["strategy"], *one["layout"].values()): one["tokens_per_s"] for one in found["predictions"]}
    order = [of_layouts[one["strategy"], *one["layout"].values()] for one in found["best"]]
    assert order == sorted(order, reverse=True)
    speeds = {one["strategy"]: one["tokens_per_s"] for one in found["predictions"]}
    assert len(order) > 6
    assert speeds["zero3"] > max(speeds["zero3_offload_optimizer"], speeds["zero3_offload"])
    assert speeds["zero2"] > speeds["zero2_offload"]


def test_padded_rows_take_the_time_of_their_mean_length_and_the_memory_of_the_longest(capsys):
    flags = [*LARGER, *ON_GPUS, "--strategies", "ddp", "--batch_sizes", "4", "--packing", "none"]
    full, short = (planned(capsys, *flags, *more)["predictions"][0] for more in ([], ["--mean_length", "128"]))
    assert short["peak_allocated_bytes"] == full["peak_allocated_bytes"]
    assert short["seconds_per_update"] < full["seconds_per_update"]
    assert short["tokens_per_s"] == pytest.approx(128 * 4 * 16 / short["seconds_per_update"])
