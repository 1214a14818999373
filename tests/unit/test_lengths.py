"""`--lengths` of `zerofit plan` and `zerofit compare`: the longest rows that a strategy holds."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from helpers import ROOT, check_refusal, refusal
from unit.test_limits import ABOUT, MIB, comparison_of, trial, worst

from zerofit.cli import main
from zerofit.data.collate import CausalCollator
from zerofit.tools.compare import guess
from zerofit.tools.compare.candidates import check_overrides, make_recipe, read_candidates
from zerofit.tools.compare.compare_options import CompareOptions
from zerofit.tools.compare.comparison_report import ComparisonReport
from zerofit.tools.compare.results import StrategyRow, conclusion, with_rates_of
from zerofit.tools.compare.search_variable import LENGTHS
from zerofit.tools.lengths_option import parse_length, possible_lengths, read_lengths
from zerofit.tools.tool_recipe import read_with_recipe

SHAPE = "n_layer=8,n_head=2,n_embd=32,n_positions=3000,vocab_size=512,attn_pdrop=0"
SMALL = ["--task", "clm", "--config_name", "gpt2", "--precision", "fp32", "--config_overrides", SHAPE,
         "--packing", "concatenate", "--per_device_eval_batch_size", "1"]  # fmt: skip
PLAN = ["plan", *SMALL, "--gpu", "cpu", "--num_gpus", "2", "--strategies", "zero3,sp"]
LONG = ROOT / "recipes" / "clm" / "llama-long-context.yaml"


def planned(capsys, *flags: str) -> dict:
    assert main([*PLAN, *flags, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_lengths_are_read():
    assert [parse_length(text) for text in ("8k", "8K", " 100 ")] == [8192, 8192, 100]
    assert read_lengths(["16k,8k", "100"]) == [100, 8192, 16384]
    for wrong in ("", "k", "8kk", "1", "-8k", "1.5k", "8 k", "many"):
        with pytest.raises(ValueError):
            parse_length(wrong)


def test_every_1024th_length_up_to_the_models_positions():
    config = SimpleNamespace(max_position_embeddings=2500, model_type="llama")
    assert possible_lengths(["auto"], config) == [1024, 2048, 2500]
    assert possible_lengths(["2k"], config) == [2048]


def test_the_longest_rows_fit_and_the_next_do_not(capsys, tmp_path, monkeypatch):
    """The prediction of a length is that of the plan for rows of this length, and the first guess of a comparison."""
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
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({
        "config_name": "gpt2", "config_overrides": SHAPE, "precision": "fp32", "packing": "concatenate",
        "per_device_eval_batch_size": 1, "per_device_train_batch_size": 1,
    }))  # fmt: skip
    monkeypatch.setattr(guess, "_programs", lambda request: {False: 0, True: 0})
    guesses = guess._predictions({
        "task": "clm", "recipe": str(recipe), "num_processes": 2, "kind": "cpu", "limit": 100 * MIB, "by_length": True,
        "sizes": [1000, 2000, 3000], "has_gpu_kernels": False,
        "candidates": {"zero3": ["zero3", []], "sp": ["sp", []]},
    })  # fmt: skip
    assert {name: one.size for name, one in guesses.items()} == longest


def test_the_report_says_what_limits_the_length(capsys, tmp_path):
    assert main([*PLAN, "--gpu_memory", "900MiB", "--lengths", "auto", "--write", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rows of 1,024 to 3,000 tokens" in said
    assert "Not memory but 3,000 tokens (the model's max_position_embeddings) limit: zero3, sp x2." in said
    assert "--per_device_train_batch_size 1" in (tmp_path / "sp_x2.sh").read_text()
    assert "--block_size 3000" in (tmp_path / "sp_x2.sh").read_text()
    assert main([*PLAN, "--gpu_memory", "900MiB", "--lengths", "1k", "--per_device_train_batch_size", "2"]) == 0
    said = capsys.readouterr().out
    assert "the longest of --lengths" in said
    row = next(line.split() for line in said.splitlines() if line.startswith("  zero3 "))
    assert "1,024" in row
    assert row[row.index("1,024") + 1] == "2", "the micro-batch is the recipe's"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lengths", "8x"], "lengths = '8x': expected auto, or lengths of rows in tokens, such as 8k,16k,32k"),
        (["--lengths", "2k,4k"], "the model has 3000 positions (max_position_embeddings), and 4096 is more"),
        (["--lengths", "1k", "--block_size", "64"], "--block_size and --lengths: keep one of the two"),
        (["--lengths", "1k", "--batch_sizes", "2"], "batch_sizes has no effect with lengths = 1k"),
        (
            ["--lengths", "1k", "--global_batch_size", "3"],
            "global_batch_size = 3 (--global_batch_size) is not a multiple",
        ),
    ],
)
def test_a_mistake_ends_a_plan_with_code_2(capsys, flags, words):
    strategies = ["--strategies", "zero3"]
    assert main([*PLAN, "--gpu_memory", "80MiB", *flags, *strategies]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_only_the_causal_task_has_lengths(capsys):
    flags = ["--task", "cls", "--config_name", "deberta-v2-xlarge", "--gpu", "h100-80gb", "--lengths", "1k"]
    assert main(["plan", *flags]) == 2
    assert "only train/clm.py has rows of any length" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- compare


def options(*flags: str):
    return read_with_recipe(CompareOptions, ["--config", str(LONG), *flags], "zerofit compare")


def test_mistakes_of_a_comparison_are_named():
    assert "lengths = 'auto':" in refusal(options, "--lengths", "auto")
    flags = "--lengths 1k --finish --batch_sizes 3 --block_size 9".split()
    check_refusal(("finish has no effect", "batch_sizes has no effect", "--block_size and --lengths"), options, *flags)


def test_trials_have_the_recipes_micro_batch_and_no_length_of_their_own(monkeypatch):
    monkeypatch.chdir(ROOT)
    given, cls = options("--lengths", "16k,8k", "--per_device_train_batch_size", "2")
    assert given.sizes == [8192, 16384]
    made = make_recipe(given, cls)
    assert made.values["per_device_train_batch_size"] == 2
    assert "block_size" not in made.values
    shape = {"config_name": "llama-3.1-8b", "tokenizer_name": "x"}
    values = {name: value for name, value in made.values.items() if name != "model_name_or_path"} | shape
    recipe = type(made)(values, [])
    plain = read_candidates(["zero3", "zero3:per_device_train_batch_size=1"])
    check_overrides(plain, recipe, cls, given.lengths)
    assert "131072 positions" in refusal(check_overrides, plain, recipe, cls, ["256k"])
    fixed = read_candidates(["zero3:block_size=64"])
    assert "block_size is set by the comparison itself" in refusal(check_overrides, fixed, recipe, cls, ["8k"])


def test_rows_have_the_length_that_is_tried():
    """One document stays one, packed documents stay several."""
    for positions, expected in ((np.arange(5), list(range(8))), (np.array([0, 1, 2, 0, 1]), [0, 1, 2, 0, 1, 0, 1, 2])):
        row = {"input_ids": np.arange(5), "labels": np.arange(5), "position_ids": positions}
        batches = worst({"input_ids": 5}, CausalCollator(0), row)
        assert batches.batch(2, 0).inputs["input_ids"].shape == (2, 5)
        batch = batches.batch(2, 0, {"input_ids": 8})
        assert batch.inputs["input_ids"].shape == (2, 8)
        assert batch.inputs["position_ids"][0].tolist() == expected
        assert batch.num_tokens == 16
    assert batches.batch(1, 0, {"input_ids": 3}).inputs["input_ids"].tolist() == [[0, 1, 2]]


def rows():
    lengths = [1024, 2048, 4096]
    zero3 = StrategyRow("zero3", lengths, [trial(1024, 300, 4.0), trial(2048, 600, 2.0), trial(4096)], ABOUT)
    sp = StrategyRow("sp", lengths, [trial(1024, 200, 3.0), trial(2048, 350, 1.5), trial(4096, 650, 0.8)], ABOUT)
    return [zero3, sp]


def test_the_report_has_lengths_and_tokens(tmp_path):
    comparison = comparison_of(variable=LENGTHS, rows=rows)
    comparison.options.source = lambda name: ""
    report = ComparisonReport(comparison, "zerofit compare --lengths 1k,2k,4k", [])
    report.write(tmp_path)
    assert report.main_table() == [
        ("strategy", "longest rows", "factor", "its peak", "peak at 2,048", "tokens/s", "tokens/s at 2,048"),
        ("zero3", "2048", "1.00", "600.0 MiB", "600.0 MiB", "200", "200"),
        ("sp", "4096 or more", "2.00", "650.0 MiB", "350.0 MiB", "80", "150"),
    ]
    text = (tmp_path / "report.md").read_text()
    assert "sp holds the longest rows, 4,096 tokens, 2 times the 2,048 of zero3." in text
    assert "micro-batch 1; accumulation 1. All rows have the length" in text
    assert "largest batch" not in text
    assert "tokens of a row" in (tmp_path / "throughput.svg").read_text()
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["length"] for line in lines] == ["1024", "2048", "4096"] * 2
    untimed = [replace(row, trials=[with_rates_of(line, []) for line in row.trials]) for row in rows()]
    comparison.rows = lambda: untimed
    assert [len(line) for line in report.main_table()] == [5, 5, 5]
    none = [
        StrategyRow("ddp", [1024], [trial(1024)], ABOUT),
        StrategyRow("zero2", [1024], [], {}, "failed at length 1024"),
    ]
    assert conclusion(none, LENGTHS) == (
        "No length fits within this limit under ddp. zero2: failed, without a result."
    )
