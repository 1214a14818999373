"""`zerofit plan`, layouts: shares of layers and rows in a trace, what ranks exchange, and the search of degrees."""

import json

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from helpers import ROOT

from zerofit.cli import main
from zerofit.estimate.allocations import ALL_GATHER, ALL_REDUCE, ATTENTION, MATRIX, REDUCE_SCATTER
from zerofit.estimate.planned_model import PlannedModel, read_planned_model
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.strategy.layout import ParallelLayout
from zerofit.tools.plan.plan_options import Degrees, PlanOptions, possible_degrees, read_pair
from zerofit.tools.tool_recipe import read_with_recipe

GPT2 = [
    "--config_name",
    "gpt2",
    "--config_overrides",
    "n_layer=2,n_head=4,n_embd=64,n_positions=128,vocab_size=301,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
]
LLAMA = [
    "--config_name",
    "llama-2-7b",
    "--config_overrides",
    "num_hidden_layers=3,hidden_size=64,"
    "intermediate_size=128,num_attention_heads=8,num_key_value_heads=4,vocab_size=512",
]
COMMON = ["--task", "clm", "--block_size", "64", "--precision", "fp32", "--gpu_memory", "8GiB"]
ALONE, SHARED = ParallelLayout(), ParallelLayout(2, tensor=2)


def steps_of(model: PlannedModel, layout: ParallelLayout, batch_size: int = 2):
    return model.tracer(PlannedStrategy("zero2", layout, "fp32", DeepSpeedZeroConfig(stage=2))).steps(batch_size)


def total(steps, kind: str, attribute: str) -> int:
    return sum(getattr(one, attribute) for step in steps for one in step.operations if one.kind == kind)


def exchanged(steps, kind: str, phase: str) -> list[int]:
    return [one.bytes for step in steps if step.phase == phase for one in step.operations if one.kind == kind]


@pytest.mark.parametrize("flags", [GPT2, LLAMA])
def test_products_and_tokens_are_shared_and_layers_meet_eight_times(flags):
    """Korthikanti et al. 2022: two all-gathers and two reduce-scatters of (B, T, H) a layer in each pass."""
    options, _ = read_with_recipe(PlanOptions, [*COMMON, *flags], "test")
    model = read_planned_model(options, "clm", on_gpu=True)
    alone, shared = steps_of(model, ALONE), steps_of(model, SHARED)
    assert total(shared, MATRIX, "flops") == pytest.approx(total(alone, MATRIX, "flops") / 2, rel=0.01)
    assert total(shared, ATTENTION, "flops") == total(alone, ATTENTION, "flops") / 2
    hidden, layers = 2 * 64 * 64 * 4, model.config.num_hidden_layers
    assert exchanged(shared, ALL_REDUCE, "forward") == [hidden], "the embedding"
    meetings = {"forward": (2 * layers, 2 * layers), "loss": (0, 1), "backward": (2 * layers + 1, 2 * layers + 1)}
    for phase, (scattered, gathered) in meetings.items():
        assert exchanged(shared, REDUCE_SCATTER, phase) == scattered * [hidden]
        assert exchanged(shared, ALL_GATHER, phase) == gathered * [hidden]
    norms = (2 * layers + 1) * (1 if flags is LLAMA else 2)  # a weight, or a weight and a bias
    assert exchanged(shared, ALL_REDUCE, "backward") == norms * [64 * 4]
    assert not exchanged(alone, ALL_REDUCE, "forward")


def test_degrees_divide_the_processes_of_a_machine(monkeypatch):
    monkeypatch.chdir(ROOT)

    def degrees(name, *sizes):
        return possible_degrees(name, read_pair(name), *sizes)

    assert [(one.tensor, one.sequence) for one in degrees("tp_zero2", 16, 8, 24)] == [(2, 1), (4, 1), (8, 1)]
    assert degrees("sp", 6, 6, 24)[1] == Degrees(sequence=3)
    assert degrees("zero3", 8, 8, 24) == [Degrees()]
    assert degrees("accelerate_configs/tp.yaml", 8, 8, 24) == [Degrees(tensor=2)]
    assert [one.pipeline for one in degrees("pp", 16, 8, 6)] == [2, 4]  # no more stages than layers
    three_axes = {(one.tensor, one.pipeline) for one in degrees("3d", 16, 8, 24)}
    assert three_axes == {(2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (8, 2)}


def planned(capsys, *flags: str) -> dict:
    assert main(["plan", *COMMON, *flags, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_layouts_are_searched_and_those_that_the_model_does_not_have_are_refused(capsys):
    found = planned(capsys, *LLAMA, "--num_gpus", "16", "--gpu", "a100-40gb", "--strategies", "zero1,tp,sp",
                    "--global_batch_size", "16", "--max_batch_size", "8")  # fmt: skip
    layouts = {
        (one["strategy"], one["layout"]["tensor"], one["layout"]["sequence"], one["layout"]["data"])
        for one in found["predictions"]
    }
    assert layouts == {("zero1", 1, 1, 16), ("tp", 2, 1, 8), ("tp", 4, 1, 4), ("sp", 1, 2, 8), ("sp", 1, 4, 4),
                       ("sp", 1, 8, 2)}  # fmt: skip
    assert list(found["refused"]) == ["tp x8"]
    assert "num_key_value_heads = 4" in found["refused"]["tp x8"]
    for one in found["predictions"]:
        replicas = one["layout"]["data"]
        assert one["per_device_train_batch_size"] * one["gradient_accumulation_steps"] * replicas == 16
        assert one["layout"]["pipeline"] == 1


def test_plan_advises_what_is_faster_of_fsdp2_and_zero3(capsys):
    flags = "--task clm --config_name gpt2 --train_tokenizer_vocab_size 300 --block_size 64 --precision bf16 "
    flags += "--gpu a100-80gb --num_gpus 16 --batch_sizes 4 --strategies zero3,fsdp2"
    assert main(["plan", *flags.split()]) == 0
    said = capsys.readouterr().out
    assert "fsdp2 shards as much as zero3, and is predicted to make" in said
    assert "fsdp_reshard_after_forward: false in the YAML of fsdp2 fits, too" in said
