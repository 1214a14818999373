"""`zerofit plan`, time: operations against torch's own count, links and updates against formulas, the search."""

import pytest
import torch
from test_plan import ON_GPUS, RECIPE, gpt2, planned, tracer
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from zerofit.cli import main
from zerofit.estimate.device_speeds import VERSION, Calibration, cpu_name, key_name, place_of, read_calibration
from zerofit.estimate.exchanges import (
    Exchange,
    Exchanges,
    MeasuredLinks,
)
from zerofit.estimate.operations import ALL_GATHER, ALL_REDUCE, KINDS, MATRIX, REDUCE_SCATTER
from zerofit.estimate.planned_rows import Rows
from zerofit.estimate.speeds import Curve, Speeds
from zerofit.estimate.timing import PassTime, update_time

GIGA = 1e9
LARGER = ["--block_size", "512", "--config_overrides",
          "n_layer=3,n_head=16,n_embd=2048,n_positions=512,vocab_size=8192"]  # fmt: skip
ON_CPU = ["--gpu", "cpu", "--gpu_memory", "400MiB", "--num_gpus", "2"]


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


def flat(rate: float = GIGA, **settings) -> Speeds:
    rates = {(kind, half): Curve(((1.0, rate),)) for kind in KINDS for half in (False, True)}
    common = {"operation_s": 0.0, "is_queued": False, "adam": GIGA, "host_link": GIGA, "contention": 0.0,
              "peak_half": None, "source": "here"}  # fmt: skip
    return Speeds(rates, **(common | settings))


def test_an_update_hides_what_runs_beside_it_and_no_more():
    links = MeasuredLinks({(ALL_REDUCE, False): Curve(((1.0, GIGA),))}, 2, GIGA)
    passes = PassTime(1.0, 2.0, {MATRIX: 3.0})

    def seconds(bytes, contention=0.0, hidden=True, accumulation=1, **settings) -> float:
        exchanges = Exchanges(last_backward=[Exchange(ALL_REDUCE, bytes)], hidden=hidden)
        return update_time(
            passes,
            exchanges,
            flat(contention=contention),
            links,
            accumulation,
            world_size=2,
            per_machine=8,
            half=False,
            **settings,
        ).seconds

    assert seconds(1e9) == pytest.approx(3.0)
    assert seconds(5e9) == pytest.approx(6.0)  # 2 of the 5 seconds are hidden
    assert seconds(1e9, contention=0.15) == pytest.approx(3.15)
    assert seconds(1e9, hidden=False) == pytest.approx(4.0)
    assert seconds(5e9, accumulation=4) == pytest.approx(12.0 + 3.0)
    assert seconds(1e9, accumulation=4, pipeline=3) == pytest.approx(12.0 * (1 + 2 / 4))  # Narayanan et al. 2021


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def calibrated(monkeypatch, tmp_path) -> Calibration:
    """This machine, as if it had been measured with two processes."""
    monkeypatch.setattr("zerofit.estimate.device_speeds.cache_root", lambda _: tmp_path)
    rates = {key_name(kind, half): [(1.0, 1e10)] for kind in KINDS for half in (False, True)}
    links = {key_name(kind, half): [(1.0, GIGA)] for kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
             for half in (False, True)}  # fmt: skip
    made = Calibration(VERSION, cpu_name(), 2, rates, links, 1e-6, 1e8, None, "a test")
    made.write()
    return made


def test_what_was_measured_is_used_on_this_machine(capsys, calibrated):
    assert read_calibration(cpu_name()).rates.keys() == calibrated.rates.keys()
    found = planned(capsys, *ON_CPU, "--strategies", "ddp", "--batch_sizes", "4")["predictions"][0]
    assert found["seconds_per_update"] == pytest.approx(sum(found["seconds"].values()))
    assert found["tokens_per_s"] == pytest.approx(4 * 32 * 2 / found["seconds_per_update"])
    assert found["bound"] in found["seconds"]
    assert found["mfu"] is None  # of a CPU no peak is known
    alone = planned(capsys, "--gpu", "cpu", "--gpu_memory", "400MiB", "--strategies", "single", "--batch_sizes", "4")
    assert alone["predictions"][0]["seconds_per_update"] < found["seconds_per_update"]  # it has both cores


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


# ----------------------------------------------------------------------------------------------------- the calibration


def test_a_calibration_needs_no_recipe_and_is_kept(capsys, monkeypatch, tmp_path, calibrated):
    place_of(cpu_name()).unlink()
    found = {"rates": calibrated.rates, "links": calibrated.links, "operation_s": 1e-6, "adam": 1e8, "host_link": None}
    asked = []
    monkeypatch.setattr("zerofit.tools.plan.calibrate._measure", lambda processes: asked.append(processes) or found)
    assert main(["plan", "--calibrate"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out
    assert read_calibration(cpu_name()).rates.keys() == calibrated.rates.keys()
    assert main(["plan", *RECIPE, *ON_CPU, "--calibrate", "--strategies", "ddp", "--batch_sizes", "1"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert asked == [2, 2]
