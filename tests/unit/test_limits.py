"""The parts of `zerofit compare` that launch nothing: the search, the journal, the limits, the options, the report."""

import csv
import json
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT, Samples, refusal

from zerofit.cli import main
from zerofit.data.collate import CausalCollator, ExampleCollator, PairCollator
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.parsing import parse_bytes
from zerofit.tools.compare import guess as guess_module
from zerofit.tools.compare.candidates import check_overrides, make_recipe, read_candidates
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.comparison_report import ComparisonReport
from zerofit.tools.compare.guess import PredictedSize, guess_of
from zerofit.tools.compare.memory_limits import limit_device
from zerofit.tools.compare.results import StrategyRow, common_size, conclusion, fact_of, spread
from zerofit.tools.compare.search import BATCHES, Fact, SearchState, next_size, next_step
from zerofit.tools.compare.trial import worst_case_batch
from zerofit.tools.compare.trial_files import TrialJournal
from zerofit.tools.compare.trial_launch import TrialLaunch
from zerofit.tools.compare.trial_machine import Limits, TrialMachine, choose_limits
from zerofit.tools.machine import Device
from zerofit.tools.plan.size_search import search
from zerofit.tools.tool_recipe import read_with_recipe
from zerofit.training.task import Task

SMALL = ROOT / "recipes" / "clm" / "compare-small.yaml"
GIB, MIB = 2**30, 2**20


def simulate(limit, base, each, growth=0.0, noise=0.0, seed=0, sizes=None, guess=0, per_sample=None):
    """(the largest size found, launches, the facts) of a process that takes base + each * size, and `growth` more for
    every size that it has met before."""
    random, sizes, facts, launches = Random(seed), sizes or list(range(1, 4097)), [], 0
    while (step := next_step(SearchState(sizes, facts), limit, (), guess, per_sample)) is not None:
        launches += 1
        state, grown, size = SearchState(sizes, facts), 0.0, step.first
        points, fits, fails = list(state.points), state.fits, state.fails
        while size is not None:
            peak = base + each * size + grown + random.uniform(0, noise)
            facts.append(Fact(size, peak <= limit, grown == 0.0 if growth else size == step.first, int(peak)))
            if peak > limit:
                break
            points.append((size, int(peak)))
            fits, grown = max(fits, size), grown + growth
            fails = fails if fails and fails > fits else None
            size = None if step.only_first else next_size(sizes, fits, fails, points, limit, (), per_sample)
        assert launches < 60
    return SearchState(sizes, facts).fits, launches, facts


@pytest.mark.parametrize("limit", [1009, 1100, 3000, 30000])
def test_the_exact_largest_size_is_found_in_few_launches(limit):
    true = int((limit - 1000) / 8.3)
    found, launches, facts = simulate(limit, 1000, 8.3)
    assert found == true
    assert launches <= 4
    assert {(fact.size, fact.fits) for fact in facts if fact.fresh} >= {(true, True), (true + 1, False)}


@pytest.mark.parametrize("limit", [1009, 1100, 3000, 30000])
@pytest.mark.parametrize("error", [0.0, 0.02, -0.02, 0.1, -0.1, 1.0, -0.5])
def test_a_prediction_saves_launches_and_a_wrong_one_does_no_harm(limit, error):
    true = int((limit - 1000) / 8.3)
    guess = min(4096, max(1, round(true * (1 + error))))
    found, launches, facts = simulate(limit, 1000, 8.3, guess=guess, per_sample=8.3 * (1 + error))
    assert found == true
    assert {(fact.size, fact.fits) for fact in facts if fact.fresh} >= {(true, True), (true + 1, False)}
    assert facts[0].size == guess
    if guess == true:
        assert launches == 2
    else:
        assert launches <= (4 if abs(error) < 0.05 and true < 1000 else 7)  # 3 or 4 without a prediction


def test_the_largest_batch_is_predicted_from_a_few_peaks():
    asked = []

    def guess_within(limit: int, sizes: list[int]):
        def predict(size: int) -> PredictedSize:
            asked.append(size)
            peak = 1000 + 8 * size + size // 100
            return PredictedSize(size, peak, peak <= limit)

        return guess_of(search(sizes, predict, limit))

    found = guess_within(3000, list(range(1, 4097)))
    assert (found.size, found.peak) == (249, 1000 + 8 * 249 + 2)
    assert len(asked) <= 8
    assert found.peak_at(250) == pytest.approx(1000 + 8 * 250 + 2, abs=2)
    assert guess_within(1000, [4, 8, 16]).size == 0
    assert guess_within(10**6, [4, 8, 16]).size == 16


def test_a_prediction_that_fails_is_none(monkeypatch, tmp_path):
    (tmp_path / "recipe.yaml").write_text("config_name: no-such-model\ntrain_tokenizer_vocab_size: 99\n")
    candidates = {"ddp": [str(ROOT / "accelerate_configs" / "ddp.yaml"), []]}
    request = {"task": "clm", "recipe": str(tmp_path / "recipe.yaml"), "num_processes": 2, "kind": "cpu",
               "has_gpu_kernels": False, "limit": GIB, "sizes": [1, 2], "candidates": candidates}  # fmt: skip
    assert guess_module._predictions(request) == {}
    monkeypatch.setattr(guess_module.sys, "executable", "/no/such/python")
    assert guess_module.guess(request) == {}


@pytest.mark.parametrize("growth", [3, 10, 30])
@pytest.mark.parametrize("limit", [1100, 1500, 3000])
def test_what_a_process_did_before_does_not_move_the_limit(limit, growth):
    found, launches, facts = simulate(limit, 1000, 8.3, growth=growth)
    assert found == int((limit - 1000) / 8.3)
    assert launches <= 12
    confirmed = {(fact.size, fact.fits) for fact in facts if fact.fresh}
    assert confirmed >= {(found, True), (found + 1, False)}


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_it_by_its_own_size_only(seed):
    found, launches, _ = simulate(3000, 1000, 8.3, noise=10, seed=seed)
    assert abs(found - 240) <= 2
    assert launches <= 20


def test_sizes_with_a_step_and_named_sizes():
    found, _, facts = simulate(1500, 1000, 8.3, sizes=list(range(8, 4097, 8)))
    assert found == 56
    assert all(fact.size % 8 == 0 for fact in facts)
    found, launches, facts = simulate(1500, 1000, 8.3, sizes=[8, 16, 40, 200])
    assert found == 40
    assert launches <= 3
    found, launches, _ = simulate(5000, 1000, 8.3, sizes=[8, 16, 40])
    assert (found, launches) == (40, 2)  # all fit: the largest once more


def test_a_fresh_process_overrules_another_one():
    facts = [Fact(1, True, True, 10), Fact(8, False, False), Fact(8, True, True, 50)]
    state = SearchState(list(range(1, 100)), facts)
    assert (state.fits, state.fails) == (8, None)
    state = SearchState(state.sizes, [*facts, Fact(8, False, False), Fact(9, False, True)])
    assert (state.fits, state.fails) == (8, 9)
    assert next_step(state, None) is None


def test_sizes_that_were_named_are_not_skipped_after_an_interruption():
    state = SearchState([8, 10, 12, 16], [Fact(8, True, True, 50)])
    assert next_step(state, None, [8, 10, 12, 16]).first == 10
    assert next_step(state, None).first == 16


def test_a_journal_goes_on_after_a_torn_line(tmp_path):
    file = tmp_path / "journal.jsonl"
    journal = TrialJournal(file)
    journal.add("size", key="k", launch=1, size=4, outcome="fits", fresh=True)
    with file.open("a") as torn:
        torn.write('{"kind": "size", "key"')
    again = TrialJournal(file)
    again.add("size", key="other", launch=2, size=8, outcome="out_of_memory", fresh=False)
    assert [line["size"] for line in TrialJournal(file).sizes("k", 60)] == [4]
    assert [fact_of(line) for line in TrialJournal(file).sizes("other", 60)] == [Fact(8, False, False)]
    again.add("size", key="late", launch=3, size=8, outcome="timed_out", fresh=True, patience_s=60)
    assert len(again.sizes("late", 60)) == 1
    assert not again.sizes("late", 600), "more patience: not known any more"
    assert all(json.loads(line) for line in file.read_text().splitlines())


def worst(longest, collate, size, start, *samples):
    return worst_case_batch(Task(None, Samples(samples), collate, None, None, longest=longest), size, start)


def test_rows_of_text_are_stretched_and_wholly_trained_on():
    chat = {"input_ids": np.arange(5), "labels": np.array([-100, -100, 2, 3, -100]), "num_tokens": np.array(4)}
    batch = worst({"input_ids": 12}, CausalCollator(0), 3, 0, chat)
    assert batch.inputs["input_ids"].shape == (3, 12)
    assert batch.num_targets == 3 * 11
    assert batch.num_tokens == batch.num_positions == 36
    assert batch.inputs["input_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_examples_keep_their_labels():
    rows = [{"input_ids": np.arange(n), "token_type_ids": np.zeros(n, int), "label": np.int64(n)} for n in (2, 9)]
    batch = worst({"input_ids": 8}, ExampleCollator({"input_ids": 0, "token_type_ids": 0}), 3, 1, *rows)
    assert batch.inputs["input_ids"].shape == batch.inputs["token_type_ids"].shape == (3, 8)
    assert batch.labels.tolist() == [9, 2, 9]
    assert batch.num_tokens == batch.num_positions


def test_sources_and_targets_have_lengths_of_their_own():
    pair = {"input_ids": np.arange(3), "labels": np.arange(3)}
    batch = worst({"input_ids": 7, "labels": 5}, PairCollator(0), 2, 0, pair)
    assert batch.inputs["input_ids"].shape == (2, 7)
    assert batch.inputs["labels"].shape == (2, 5)
    assert batch.num_targets == 10


def options(*flags, config=SMALL):
    return read_with_recipe(CompareOptions, ["--config", str(config), *flags], "zerofit compare")


def test_sizes_of_memory():
    assert parse_bytes("24GiB") == parse_bytes("24G") == 24 * GIB
    assert parse_bytes("1.5 MiB") == 3 * MIB // 2
    assert parse_bytes("24GB") == 24 * 10**9
    for wrong in ("", "GiB", "-1GiB", "24 apples", "0GiB", "iB"):
        with pytest.raises(ValueError):
            parse_bytes(wrong)


def test_mistakes_are_named():
    assert "expected a size such as 24GiB" in refusal(options, "--memory_limit", "lots")
    assert "expected auto, or sizes" in refusal(options, "--batch_sizes", "8,big")
    assert "no effect with batch_sizes" in refusal(options, "--batch_sizes", "8,16", "--granularity", "4")
    said = refusal(make_recipe, *options("--per_device_train_batch_size", "4", "--save_steps", "9"))
    assert "--per_device_train_batch_size has no effect in a comparison" in said
    assert options("--batch_sizes", "40,8", "16")[0].sizes == [8, 16, 40]


def test_strategies_and_what_they_override(monkeypatch):
    monkeypatch.chdir(ROOT)
    plain, lora = read_candidates(["zero2", "zero2:lora=true:lora-r=4"])
    assert lora.flags == ["--lora", "true", "--lora_r", "4"]
    said = refusal(read_candidates, ["zero9", "ddp"])
    assert "Did you mean zero" in said
    assert "sets nothing" in refusal(read_candidates, ["zero2:lora"])
    recipe = make_recipe(*options())
    check_overrides([plain, lora], recipe, options()[1])
    said = refusal(check_overrides, read_candidates(["zero2:lorra=true"]), recipe, options()[1])
    assert "Did you mean lora" in said
    said = refusal(check_overrides, read_candidates(["ddp:per_device_train_batch_size=4"]), recipe, options()[1])
    assert "set by the comparison" in said


def test_the_recipe_of_trials_is_a_recipe_for_every_one_in_the_tree(tmp_path):
    recipes = sorted((ROOT / "recipes").glob("*/*.yaml"))
    assert len(recipes) >= 12
    for path in recipes:
        given, cls = options(config=path)
        made = make_recipe(given, cls)
        file = tmp_path / path.name
        file.write_text(made.to_yaml())
        again = parse_recipe(cls, ["--config", str(file)])
        assert again.global_batch_size is None
        assert again.save_strategy == "no"
        assert bool(given.global_batch_size and not given.gradient_accumulation_steps) == bool(made.notes)


def machine(devices=(), memory=24 * GIB, available=20 * GIB) -> TrialMachine:
    environment = {"hardware": {"cpu": "a CPU", "cores": 2}, "packages": {"torch": "2.13"}, "python": "3.11",
                   "zerofit_commit": "0123456789abcdef", "zerofit_changed": False}  # fmt: skip
    kind = "cuda" if devices else "cpu"
    return TrialMachine(kind, tuple(devices), 2, memory, available, environment=environment)


GPU = Device("GPU", 80 * GIB, 79 * GIB)


def test_limits_are_what_the_machine_has():
    assert choose_limits(machine(), 2, GIB) == Limits(GIB, [])
    assert choose_limits(machine(), 2, None).device == int(0.75 * 24 * GIB / 2)
    shared = choose_limits(machine([GPU]), 2, 24 * GIB)
    assert shared.device == 24 * GIB
    assert "gloo" in shared.notes[0]


CONTEXT = 640 * MIB


def test_more_than_the_machine_has_is_refused():
    """Contexts of processes that share a device are counted: the allocator's limit knows nothing of them."""
    assert "at most 384MiB" in refusal(choose_limits, machine(), 64, GIB)
    limit = choose_limits(machine([GPU]), 4, None).device
    assert limit == int(0.9 * (80 * GIB - 4 * CONTEXT) / 4)
    exact = 20 * GIB - CONTEXT
    assert choose_limits(machine([GPU]), 4, exact).device == exact
    assert "Use --num_processes 3" in refusal(choose_limits, machine([GPU]), 4, exact + 1)
    small = Device("GPU", 2 * GIB, 2 * GIB)
    assert "each needs 640.0 MiB" in refusal(choose_limits, machine([small]), 4, None)


@pytest.mark.parametrize(("limit", "fits"), [(38 * GIB, True), (39 * GIB, False)])
def test_what_contexts_take_is_measured_before_the_cap(limit, fits, monkeypatch):
    """Two ranks on 80 GiB, of which their contexts and another program have 3 GiB, and each allocator 256 MiB."""
    fractions = []
    free = 80 * GIB - 3 * GIB - 2 * 256 * MIB
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (free, 80 * GIB))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 256 * MIB)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    if fits:
        assert limit_device(torch.device("cuda"), limit, ranks=2) == limit
        assert fractions == [38 / 80]
    else:
        with pytest.raises(ValueError, match=r"2 processes use it, and 3\.00 GiB are in use .* At most 38\.50 GiB"):
            limit_device(torch.device("cuda"), limit, ranks=2)
        assert not fractions


ENDINGS = [
    ("error: task_name = 'x': no such task\n", 1, "refused", ""),
    ("\nrank 0 (pid 7) ended without a message in forward\n  cause    the kernel's out-of-memory killer ended it\n", 1,
     "out_of_memory", "host"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", 1, "out_of_memory", "device"),
    ("    return data.pin_memory()\nRuntimeError: CUDA error: out of memory\n", 1, "out_of_memory", "host"),
    ("  rank      : 0\n  exitcode  : -9 (pid: 7)\n", 1, "killed", ""),
    ("", -9, "killed", ""),
    ("ValueError: shapes\n", 1, "failed", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "how", "where"), ENDINGS)
def test_a_launch_that_ended_without_answers_is_explained(text, code, how, where, tmp_path):
    launch = object.__new__(TrialLaunch)
    launch.on_cpu = "CUDA" not in text
    ended = SimpleNamespace(
        text=text, process=SimpleNamespace(returncode=code, poll=lambda: code), log=tmp_path / "log", seconds=1.0
    )
    ending = launch._ending_without_report(ended)
    assert (ending.how, ending.where) == (how, where)


def trial(size, peak=None, rate=1.0, fresh=True, launch=1):
    if peak is None:
        return {"size": size, "outcome": "out_of_memory", "where": "device", "phase": "backward", "fresh": fresh,
                "launch": launch}  # fmt: skip
    ranks = [dict.fromkeys(("allocated", "reserved", "total", "host"), peak * MIB - rank) for rank in (1, 0)]
    return {"size": size, "outcome": "fits", "fresh": fresh, "ranks": ranks, "with_evaluation": ranks,
            "held": [{"parameters": 9 * MIB, "optimizer": 18 * MIB}] * 2, "samples_per_s": rate,
            "tokens_per_s": 100 * rate, "loss": 2.5, "launch": launch, "seconds": [1.0]}  # fmt: skip


ABOUT = {"longest": {"input_ids": 128}, "mean_sample": 50, "num_samples": 1000, "accumulation": 1,
         "precision": "fp32", "parameters": 10**6}  # fmt: skip


EVALUATED = {"evaluation_seconds": 0.5, "evaluation_samples_per_s": 32.0, "evaluation_samples": 16}


def rows():
    sizes = list(range(1, 100))
    of_ddp = [trial(4, 500, 8.0), trial(8, 600, 10.0), trial(9), trial(8, 590, 11.0, False)]
    of_zero2 = [
        trial(8, 400, 9.0) | EVALUATED,
        trial(40, 900, 9.5) | EVALUATED,
        trial(32, 800, 12.0, False),
        trial(41),
    ]
    of_each = {"ddp": of_ddp, "zero2": of_zero2, "zero3|x": [trial(1)]}
    return [StrategyRow(name, sizes, trials, ABOUT) for name, trials in of_each.items()]


def test_rows_say_what_the_trials_say():
    ddp, zero2, none = rows()
    assert (ddp.largest, zero2.largest, none.largest) == (8, 40, 0)
    assert all(row.is_confirmed for row in rows())
    assert ddp.at(8)["samples_per_s"] == 10.0  # of the fresh process
    assert zero2.best["size"] == 32
    assert zero2.epoch_s == pytest.approx(1000 / 12)
    assert common_size(rows()) == 8
    assert ddp.bytes_per_sample == 25 * MIB
    assert none.limit_text == "none (out of memory in backward)"
    assert StrategyRow("a", [4, 8], [trial(4, 1), trial(8, 2)]).limit_text == "8 or more"
    assert not StrategyRow("a", [4, 8], [trial(4, 1), trial(8, fresh=False)]).is_confirmed


def comparison_of(notes: tuple = (), **changes) -> SimpleNamespace:
    options = SimpleNamespace(source=lambda name: "recipes/clm/x.yaml", task="clm", num_processes=2, steps=5)
    common = {"variable": BATCHES, "timer": None, "rows": rows, "machine": machine(), "options": options}
    return SimpleNamespace(**{**common, "limits": Limits(1000 * MIB, [*notes]), **changes})


def test_the_report_has_all_of_it(tmp_path):
    comparison = comparison_of(["a note"])
    report = ComparisonReport(comparison, "zerofit compare --config <x>", ["left out"])
    report.write(tmp_path)
    html_report = (tmp_path / "report.html").read_text()
    assert html_report.count('<img alt="') == 2
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("memory", "throughput"))
    assert (tmp_path / "memory.svg").read_text().count("<!-- 0 -->") == 2, "both axes begin at 0"
    assert ">none (out of memory in backward)</td>" in html_report
    assert "://" not in html_report, "it loads nothing"
    assert "&lt;x&gt;" in html_report
    text = (tmp_path / "report.md").read_text()
    for words in ("zero3\\|x", "0123456789ab", "a note", "left out", "1,000.0 MiB", "40 runs, 41 out of"):
        assert words in text.lower() or words in text, words
    with (tmp_path / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    assert [line["outcome"] for line in lines].count("out_of_memory") == 3
    assert lines[1]["peak_with_evaluation_bytes"] == str(600 * MIB)
    assert "zero2" in report.for_terminal()
    assert "one batch of 16 samples" in text
    shown = [dict(zip(report.speed_table()[0], row)) for row in report.speed_table()[1:]]
    assert [row["evaluation samples/s"] for row in shown] == ["-", "32", "-"]
    assert [line["evaluation_seconds"] for line in lines if line["strategy"] == "zero2"] == ["0.5", "0.5", "", ""]


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
        StrategyRow(
            name, [8], [trial(8, 500, 16 / sorted(each)[len(each) // 2]) | measured | {"seconds": each}], ABOUT
        )
        for name, each in zip("ab", seconds)
    ]
    said = conclusion(rows)
    assert words in said
    assert without not in said
    assert spread(rows[0].best | {"seconds": [0.8, 1.0, 1.25]}) == "45%"  # 1.25 to 0.8 of the median's rate


@pytest.mark.parametrize(
    ("flag", "instead"),
    [("output_dir x", "--output"), ("per_device_train_batch_size 4", "--batch_sizes"), ("resume never", "resumes")],
)
def test_a_run_s_option_names_that_of_a_comparison(flag, instead, capsys):
    model = ["--config_name", "gpt2", "--train_tokenizer_vocab_size", "300", "--train_file", str(ROOT / "README.md")]
    assert main(["compare", "--task", "clm", *model, *f"--{flag}".split()]) == 2
    said = capsys.readouterr().err
    assert f"--{flag.split()[0]} has no effect in a comparison" in said
    assert instead in said.partition("comparison")[2]


@pytest.mark.parametrize(("is_trying", "words"), [(False, "starts, for"), (True, "its updates, for")])
def test_a_silent_launch_says_how_long(is_trying, words, capsys):
    """Each minute without an answer."""
    launch = TrialLaunch.__new__(TrialLaunch)
    launch.trying, launch.is_trying, launch.patience_s = 16, is_trying, 1000.0
    launch._answers = launch._failures = SimpleNamespace(poll=list)
    clock = SimpleNamespace(seconds=0.0, process=SimpleNamespace(returncode=0))

    def wait(until: float) -> str:
        clock.seconds += 10
        return "ended" if clock.seconds > 300 else "running"

    clock.wait = wait
    assert launch._follow(clock, {}).how == "failed"
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert all(f"16  {words}" in line for line in said)
    assert said[0].endswith("1:10 now")
