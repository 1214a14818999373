"""The parts of `zerofit compare` that launch nothing: search, journal, limits, options, report, runs to finish."""

import csv
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from helpers import ROOT, Samples, refusal

from zerofit.cli import main
from zerofit.data.collate import CausalCollator, ExampleCollator
from zerofit.recipe.parse import parse_recipe
from zerofit.tools.compare.candidates import check_overrides, make_recipe, read_candidates
from zerofit.tools.compare.compare import CompareOptions, ComparisonReport
from zerofit.tools.compare.comparison import StrategyRow, format_spread, summarize_results
from zerofit.tools.compare.finish import choose_micro_batch, make_finish_recipe
from zerofit.tools.compare.search import choose_next_size, find_bounds
from zerofit.tools.compare.trial import Journal, TrialMachine, choose_limit, find_outcome
from zerofit.tools.machine import Device
from zerofit.tools.tool_recipe import read_with_recipe
from zerofit.training.measurement import longest_batch

SMALL = ROOT / "recipes" / "clm" / "compare-small.yaml"
CLS = ROOT / "recipes" / "cls" / "stdlib-packages.yaml"
GIB, MIB = 2**30, 2**20


def options(*flags, config=SMALL):
    return read_with_recipe(CompareOptions, ["--config", str(config), *flags], "zerofit compare")


# -------------------------------------------------------------------------------------------------------------- search


def searched(limit, base, each, sizes=range(1, 4097), guess=0, per_sample=None):
    """{size: peak} of all that are tried where a process takes base + each * size."""
    peaks = {}
    while (size := choose_next_size(sizes, peaks, limit, guess, per_sample=per_sample)) is not None:
        peak = base + each * size
        peaks[size] = int(peak) if peak <= limit else None
        assert len(peaks) < 60
    return peaks


@pytest.mark.parametrize("limit", [1009, 30000])
@pytest.mark.parametrize("error", [None, 0.0, 0.02, -0.1, 1.0])
def test_a_prediction_saves_launches_and_a_wrong_one_does_no_harm(limit, error):
    true, known = int((limit - 1000) / 8.3), {}
    if error is not None:
        known = {"guess": min(4096, max(1, round(true * (1 + error)))), "per_sample": 8.3 * (1 + error)}
    peaks = searched(limit, 1000, 8.3, **known)
    assert find_bounds(peaks) == (true, true + 1)
    assert next(iter(peaks)) == known.get("guess", 1)
    assert len(peaks) == 2 if known.get("guess") == true else len(peaks) <= 12


# ------------------------------------------------------------------------------------------------------------- a trial


def test_a_journal_goes_on_after_a_torn_line(tmp_path):
    file = tmp_path / "journal.jsonl"
    Journal(file).add("size", key="k", size=4, outcome="fits")
    with file.open("a") as torn:
        torn.write('{"kind": "size", "key"')
    again = Journal(file)
    again.add("size", key="k", size=8, outcome="out_of_memory")
    outcomes = {size: line["outcome"] for size, line in Journal(file).results("k", 60).items()}
    assert outcomes == {4: "fits", 8: "out_of_memory"}
    again.add("size", key="late", size=8, outcome="timed_out", patience_s=60)
    assert len(again.results("late", 60)) == 1
    assert not again.results("late", 600), "more patience: not known any more"
    assert all(json.loads(line) for line in file.read_text().splitlines())


@pytest.mark.parametrize(("text", "code", "how", "where"), [
    ("error: 2 problems\n  1. one\n  2. two\nTraceback (most recent call last):\nCalledProcessError\n", 1, "refused",
     None),
    ("\nrank 0 (pid 7) ended without a message in forward\n  cause    the kernel's out-of-memory killer ended it\n", 1,
     "out_of_memory", "host"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", 1, "out_of_memory", "device"),
    ("    return data.pin_memory()\nRuntimeError: CUDA error: out of memory\n", 1, "out_of_memory", "host"),
    ("  rank      : 0\n  exitcode  : -9 (pid: 7)\n", 1, "killed", None),
    ("", -9, "killed", None),
    ("ValueError: shapes\n", 1, "failed", None),
    ("", 0, "failed", None),
])  # fmt: skip
def test_a_launch_that_ended_without_answers_is_explained(text, code, how, where, tmp_path):
    ended = SimpleNamespace(text=text, exit_code=code, log=tmp_path / "log", seconds=1.0)
    result = find_outcome(ended)
    assert (result["outcome"], result.get("where")) == (how, where)


# -------------------------------------------------------------------------------------------------------- longest rows


def worst(longest, collate, size, start, *samples):
    data = SimpleNamespace(train=Samples(samples), longest=longest)
    return longest_batch(SimpleNamespace(data=data, collate=collate), size, start)


@pytest.mark.parametrize(
    ("positions", "expected"), [(np.arange(5), list(range(8))), (np.array([0, 1, 2, 0, 1]), [0, 1, 2, 0, 1, 0, 1, 2])]
)
def test_one_document_stays_one_and_packed_ones_stay_several(positions, expected):
    row = {"input_ids": np.arange(5), "labels": np.arange(5), "position_ids": positions}
    batch = worst({"input_ids": 8}, CausalCollator(0), 2, 0, row)
    assert batch.inputs["position_ids"][0].tolist() == expected
    assert worst({"input_ids": 3}, CausalCollator(0), 1, 0, row).inputs["input_ids"].tolist() == [[0, 1, 2]]


def test_examples_keep_their_labels():
    rows = [{"input_ids": np.arange(n), "token_type_ids": np.zeros(n, int), "label": np.int64(n)} for n in (2, 9)]
    batch = worst({"input_ids": 8}, ExampleCollator({"input_ids": 0, "token_type_ids": 0}), 3, 1, *rows)
    assert batch.inputs["input_ids"].shape == batch.inputs["token_type_ids"].shape == (3, 8)
    assert batch.labels.tolist() == [9, 2, 9]
    assert batch.num_tokens == batch.num_positions


# ------------------------------------------------------------------------------------------------------------- options


def test_mistakes_are_named():
    assert "expected a size such as 24GiB" in refusal(options, "--memory_limit", "lots")
    assert "expected auto, or sizes" in refusal(options, "--batch_sizes", "8,big")
    assert "no effect without batch_sizes = auto" in refusal(options, "--batch_sizes", "8,16", "--granularity", "4")
    assert options("--batch_sizes", "40,8", "16")[0].micro_batches == [8, 16, 40]
    assert "--output_dir has no effect" in refusal(make_recipe, *options("--finish", "--output_dir", "x"))


def test_strategies_and_what_they_override(monkeypatch):
    monkeypatch.chdir(ROOT)
    plain, lora = read_candidates(["zero2", "zero2:lora=true:lora-r=4"])
    assert lora.flags == ["--lora", "true", "--lora_r", "4"]
    assert "Did you mean zero" in refusal(read_candidates, ["zero9", "ddp"])
    assert "sets nothing" in refusal(read_candidates, ["zero2:lora"])
    recipe, _ = make_recipe(*options())
    check_overrides([plain, lora], recipe, options()[1])
    assert "Did you mean lora" in refusal(check_overrides, read_candidates(["zero2:lorra=true"]), recipe, options()[1])
    said = refusal(check_overrides, read_candidates(["ddp:per_device_train_batch_size=4"]), recipe, options()[1])
    assert "set by the comparison" in said


# ------------------------------------------------------------------------------------------------------------- machine


def machine(devices=()) -> TrialMachine:
    environment = {
        "hardware": {"cpu": "a CPU", "cores": 2},
        "packages": {"torch": "2.13"},
        "python": "3.11",
        "zerofit_commit": "0123456789abcdef",
        "zerofit_changed": False,
    }
    kind = "cuda" if devices else "cpu"
    return TrialMachine(kind, tuple(devices), 2, 24 * GIB, 20 * GIB, environment=environment)


GPU = Device("GPU", 80 * GIB, 79 * GIB)
CONTEXT = 640 * MIB


def test_limits_are_what_the_devices_have():
    """Contexts of processes that share a device are counted: the allocator's limit knows nothing of them."""
    assert choose_limit(machine([GPU, GPU]), 2, None) == (None, [])
    simulated = replace(machine([Device("npu", GIB, GIB)]), kind="npu", simulated={"ZEROFIT_SIMULATED": "1"})
    assert choose_limit(simulated, 1, None) == (GIB, [])
    limit, notes = choose_limit(machine([GPU]), 2, 24 * GIB)
    assert limit == 24 * GIB
    assert "gloo" in notes[0]
    assert choose_limit(machine([GPU]), 4, None)[0] == int(0.9 * (80 * GIB - 4 * CONTEXT) / 4)
    exact = 20 * GIB - CONTEXT
    assert choose_limit(machine([GPU]), 4, exact)[0] == exact
    assert "Use --num_processes 3" in refusal(choose_limit, machine([GPU]), 4, exact + 1)
    small = Device("GPU", 2 * GIB, 2 * GIB)
    assert "each needs 640.0 MiB" in refusal(choose_limit, machine([small]), 4, None)


def test_without_a_gpu_a_limit_is_needed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("zerofit.tools.compare.compare.inspect_trial_machine", lambda: machine())
    assert main(["compare", "--config", str(SMALL), "--output", str(tmp_path / "out")]) == 2
    assert "set --memory_limit, e.g. 1GiB" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- report


ABOUT = {"longest": {"input_ids": 128}, "mean_sample": 50, "num_samples": 1000, "accumulation": 1,
         "precision": "fp32", "parameters": 10**6}  # fmt: skip


def tried(size, peak=None, rate=1.0):
    """A result of the journal; without a peak the size does not fit."""
    if peak is None:
        return {"size": size, "outcome": "out_of_memory", "where": "device", "phase": "backward"}
    ranks = [dict.fromkeys(("allocated", "reserved", "host"), peak * MIB - rank) for rank in (1, 0)]
    return {"size": size, "outcome": "fits", "ranks": ranks, "samples_per_s": rate, "tokens_per_s": 100 * rate,
            "loss": 2.5, "seconds": [1.0], "load": [0.5, 1.0], "cores": 2, "about": ABOUT}  # fmt: skip


def test_the_report_has_all_of_it(tmp_path):
    rows = [
        StrategyRow("ddp", [tried(4, 500, 8.0), tried(8, 600, 10.0), tried(9)]),
        StrategyRow("zero2", [tried(8, 400, 9.0), tried(32, 800, 12.0), tried(40, 900, 9.5), tried(41)]),
        StrategyRow("zero3|x", [tried(1)]),
    ]
    options = SimpleNamespace(source=lambda name: "recipes/clm/x.yaml", task="clm", num_processes=2, steps=5)
    done = SimpleNamespace(timer=None, rows=lambda: rows, machine=machine([GPU]), options=options, limit=1000 * MIB)
    report = ComparisonReport(done, "zerofit compare --config <x>", ["left out"])
    report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count('<img alt="') == 2
    assert (tmp_path / "memory.svg").read_text().count("<!-- 0 -->") == 2, "both axes begin at 0"
    assert ">none (out of memory in backward)</td>" in page
    assert "://" not in page, "it loads nothing"
    assert "&lt;x&gt;" in page
    text = (tmp_path / "report.md").read_text()
    for words in ("zero3\\|x", "0123456789ab", "left out", "1,000.0 MiB"):
        assert words in text, words
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 8
    assert [line["outcome"] for line in lines].count("out_of_memory") == 3
    assert lines[1]["reserved_bytes"] == str(600 * MIB)
    assert "zero2" in report.for_terminal()


@pytest.mark.parametrize(
    ("seconds", "load", "words", "without"),
    [
        ([[1.0, 1.01], [0.5, 0.51]], [1.0, 2.0], "The fastest is b", "timed updates"),
        ([[1.0, 1.4, 0.6], [0.5, 0.9, 0.9]], [1.0, 2.0], "From a it differs by no more than the timed updates", "No "),
        ([[1.0, 1.0], [0.5, 0.5]], [1.0, 9.1], "load average: a 1.0 to 9.1, b 1.0 to 9.1", "The fastest"),
    ],
)
def test_a_headline_has_the_spread_and_the_load(seconds, load, words, without):
    measured = {"load": load, "cores": 2}
    rows = [
        StrategyRow(name, [tried(8, 500, 16 / sorted(each)[len(each) // 2]) | measured | {"seconds": each}])
        for name, each in zip("ab", seconds)
    ]
    said = summarize_results(rows)
    assert words in said
    assert without not in said
    assert format_spread(rows[0].best | {"seconds": [0.8, 1.0, 1.25]}) == "45%"  # 1.25 to 0.8 of the median's rate


# ------------------------------------------------------------------------------------------------------ runs to finish


@pytest.mark.parametrize(("best", "global_batch", "size"), [
    (44, None, 44), (44, 64, 32), (44, 88, 44), (44, 90, 15), (8, 1024, 8), (200, 64, 32), (44, 2, 1),
])  # fmt: skip
def test_the_batch_divides_the_global_batch(best, global_batch, size):
    assert choose_micro_batch(best, global_batch, 2) == size


def test_runs_have_the_recipe_as_it_is(tmp_path):
    given, cls = options("--finish", "--save_steps", "50", "--eval_steps", "9", "--gradient_accumulation_steps", "4",
                         "--global_batch_size", "32", config=CLS)  # fmt: skip
    values = make_finish_recipe(given, cls)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    run = parse_recipe(cls, ["--config", str(recipe), "--per_device_train_batch_size", "8", "--output_dir", "x"])
    assert (run.global_batch_size, run.gradient_accumulation_steps) == (32, None)
    assert (run.eval_steps, run.save_steps, run.num_train_epochs) == (9, 50, given.num_train_epochs)
    assert "output_dir" not in values
    trials = make_recipe(given, cls)[0]
    assert not {"save_steps", "eval_steps", "global_batch_size"} & trials.keys(), "trials have no use for them"
    said = refusal(make_finish_recipe, *options("--finish", "--num_processes", "3", config=CLS))
    assert "global_batch_size = 32" in said
    assert "no multiple of 3" in said
