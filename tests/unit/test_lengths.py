"""`zerofit plan --lengths`: the longest rows that a strategy holds."""

import json
from types import SimpleNamespace

import pytest
from helpers import refusal
from transformers import GPT2Config

from zerofit.cli import main
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.plan.planner import Planner
from zerofit.tools.tool_recipe import read_with_recipe

SHAPE = "n_layer=8,n_head=2,n_embd=32,n_positions=3000,vocab_size=512,attn_pdrop=0"
SMALL = ["--task", "clm", "--config_name", "gpt2", "--precision", "fp32", "--config_overrides", SHAPE,
         "--packing", "concatenate", "--per_device_eval_batch_size", "1"]  # fmt: skip
PLAN = ["plan", *SMALL, "--gpu", "cpu", "--num_gpus", "2", "--strategies", "zero3,sp"]


def planned(capsys, *flags: str) -> dict:
    assert main([*PLAN, *flags, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_longest_rows_fit_and_the_next_do_not(capsys):
    """The prediction of a length is that of the plan for rows of this length."""
    found = planned(capsys, "--gpu_memory", "100MiB", "--lengths", "1000,2000,3000")
    longest = {one["strategy"]: one["length"] for one in found["largest"]}
    assert 1000 <= longest["zero3"] < longest["sp"]
    for strategy, length in longest.items():
        fits = {one["length"]: one["fits"] for one in found["predictions"] if one["strategy"] == strategy}
        assert fits[length]
        assert not any(fits[other] for other in fits if other > length)
        assert length == 3000 or length + 1000 in fits
    alone = planned(capsys, "--gpu_memory", "100MiB", "--block_size", str(longest["sp"]), "--batch_sizes", "1")
    (same,) = (one for one in alone["predictions"] if one["strategy"] == "sp")
    assert same in found["predictions"]


def test_auto_is_each_1024_up_to_the_models_positions():
    options, _ = read_with_recipe(PlanOptions, [*PLAN[1:], "--gpu_memory", "1GiB", "--lengths", "auto"], "plan")
    model = SimpleNamespace(config=GPT2Config(n_positions=3000))
    assert Planner(options, model, None).lengths == [1024, 2048, 3000]
    options.lengths = ["1k,4k"]
    assert "the model has 3000 positions" in refusal(lambda: Planner(options, model, None).lengths)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lengths", "8x"], "lengths = 8x (--lengths): expected auto, or lengths in tokens, such as 8k,16k,32k"),
        (["--lengths", "auto", "8k"], "lengths = auto 8k: say auto alone, or lengths"),
        (["--batch_sizes", "auto", "8"], "batch_sizes = auto 8: say auto alone, or sizes"),
        (["--lengths", "1k", "--block_size", "64"], "--block_size and --lengths: keep one of the two"),
        (["--lengths", "1k", "--global_batch_size", "3"], "global_batch_size = 3 (--global_batch_size) is not a"),
    ],
)
def test_a_mistake_ends_a_plan_with_code_2(capsys, flags, words):
    strategies = ["--strategies", "zero3"]
    assert main([*PLAN, "--gpu_memory", "80MiB", *flags, *strategies]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("told", ["0", "0.0", "much"])
def test_a_device_of_no_memory_in_the_environment_is_refused_unless_an_option_says_another(capsys, monkeypatch, told):
    monkeypatch.setenv("DEVICE_MEMORY_GB", told)
    assert main([*PLAN, "--strategies", "zero3"]) == 2
    assert f"DEVICE_MEMORY_GB={told} of the environment" in capsys.readouterr().err
    assert main([*PLAN, "--gpu_memory", "80MiB", "--lengths", "1"]) == 2
    assert "DEVICE_MEMORY_GB" not in capsys.readouterr().err
