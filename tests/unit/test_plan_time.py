"""`zerofit plan`, time: operations against torch's own count, links and updates against formulas, the search."""

from types import SimpleNamespace

import pytest
import torch
from test_plan import ON_GPUS, gpt2, planned, tracer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from zerofit.estimate import timing
from zerofit.estimate.allocations import ALL_REDUCE, MATRIX
from zerofit.estimate.exchanges import Collectives, Exchanges
from zerofit.estimate.planned_rows import Rows
from zerofit.estimate.speeds import Speeds
from zerofit.estimate.timing import PassTime, update_time

GIGA = 1e9
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


# ----------------------------------------------------------------------------------------------- rates, links, updates


def test_an_update_hides_what_runs_beside_it_and_no_more(monkeypatch):
    flat = Speeds({}, GIGA, 0.0, GIGA, GIGA, GIGA, 1)
    links = SimpleNamespace(seconds=lambda exchange, *_: exchange.bytes / GIGA)
    passes = PassTime(1.0, 2.0, {MATRIX: 3.0})

    def seconds(bytes, hidden=True, accumulation=1, **settings) -> float:
        exchanges = Exchanges(last_backward=[Collectives(ALL_REDUCE, bytes)], hidden=hidden)
        return update_time(
            passes,
            exchanges,
            flat,
            links,
            accumulation,
            world_size=2,
            per_machine=8,
            **settings,
        ).seconds

    monkeypatch.setattr(timing, "CONTENTION", 0.15)
    assert seconds(1e9) == pytest.approx(3.15)
    monkeypatch.setattr(timing, "CONTENTION", 0.0)
    assert seconds(1e9) == pytest.approx(3.0)
    assert seconds(5e9) == pytest.approx(6.0)  # 2 of the 5 seconds are hidden
    assert seconds(1e9, hidden=False) == pytest.approx(4.0)
    assert seconds(5e9, accumulation=4) == pytest.approx(12.0 + 3.0)
    assert seconds(1e9, accumulation=4, pipeline=3) == pytest.approx(12.0 * (1 + 2 / 4))  # Narayanan et al. 2021


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
