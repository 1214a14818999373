"""Runs that are killed after any update: they resume, or start over, and end as if nobody had killed them."""

from pathlib import Path

import pytest
import torch
from folders import colours
from helpers import ROOT, completed, launched, main_of, metrics, updates, write_records
from safetensors.torch import load_file
from test_agreement import pairs_of_answers

from zerofit.training import causal

DISTURBED = ROOT / "tests" / "launch" / "disturbed.py"
HOW = {"task": "cls", "strategy": "single", "processes": 1}
LONG = pytest.mark.long
RUN = ["--model_type", "bert", "--train_tokenizer_vocab_size", "280", "--config_overrides",
       "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64,hidden_dropout_prob=0,"
       "attention_probs_dropout_prob=0", "--validation_split_percentage", "30", "--per_device_train_batch_size", "4",
       "--max_train_steps", "30", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--precision", "fp32",
       "--save_async", "false", "--report_to", "none"]  # fmt: skip


@pytest.fixture(scope="module")
def flags(cache, tmp_path_factory) -> list:
    rows = write_records(tmp_path_factory.mktemp("rows") / "rows.jsonl", colours()[:60])
    return [*RUN, "--train_file", rows, "--cache_dir", cache]


def killed(output: Path, update: int, *flags) -> None:
    assert launched(output, *flags, through=(DISTURBED, 0, f"kill {update}"), **HOW).returncode


def best(output: Path) -> str:
    return (output / "checkpoints" / "best").resolve().name


@pytest.mark.parametrize("saves", [
    "--save_steps 3 --save_total_limit 1 --eval_steps 2",
    *(pytest.param(each, marks=LONG) for each in (
        "--save_minutes 0 --eval_steps 1", "--save_minutes 30 --eval_steps 2", "--save_steps 1 --eval_steps 3",
        "--save_strategy epoch --save_total_limit 2 --eval_steps 4",
        "--save_steps 4 --load_best_model_at_end false --eval_steps 2",
    )),
])  # fmt: skip
def test_patience_runs_out_at_the_same_update_wherever_a_run_was_killed(flags, launched_once, tmp_path, saves):
    """Accuracies go up and down, so that worse ones lie between two that are the best."""
    flags = [*flags, *saves.split(), "--early_stopping_patience", "2"]
    undisturbed = launched_once(saves, *flags, **HOW)
    expected = metrics(undisturbed)
    assert 4 < expected[-1]["update"] < 30
    output = tmp_path / "run"
    killed(output, expected[-1]["update"] - 1, *flags)
    completed(output, *flags, **HOW)
    assert [line["update"] for line in metrics(output)] == [line["update"] for line in expected]
    assert best(output) == best(undisturbed)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (output, undisturbed))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_a_best_model_without_a_state_keeps_no_run_from_starting_over(flags, tmp_path):
    output, flags = tmp_path / "run", [*flags, "--eval_steps", "3", "--max_train_steps", "9"]
    killed(output, 8, *flags)
    left = {folder.name for folder in (output / "checkpoints").glob("update_*")}
    assert left
    killed(output, 2, *flags)
    assert {folder.name for folder in (output / "checkpoints").glob("update_*")} == left, "nothing is lost"
    done = completed(output, *flags, **HOW)
    assert "it starts over; its models stay until they come again" in done.stdout
    assert [line["update"] for line in metrics(output)] == list(range(10))


@LONG
def test_another_metric_is_never_compared_with_the_old_value(flags, tmp_path):
    """A loss of 1 is no better than an accuracy of 0.5, nor an accuracy better than it."""
    output = tmp_path / "run"
    flags = [*flags, "--eval_steps", "2", "--save_steps", "1", "--max_train_steps", "14", "--metric_for_best_model"]
    killed(output, 7, *flags, "accuracy")
    done = completed(output, *flags, "loss", **HOW)
    assert "metric_for_best_model was accuracy, and is loss now" in done.stdout
    evaluated = [line for line in metrics(output) if line["update"] > 7 and "eval_loss" in line]
    later = {line["update"]: line["eval_loss"] for line in evaluated}
    assert best(output) == f"update_{min(later, key=later.get):08}"


@pytest.mark.long
def test_what_was_measured_before_a_kill_is_not_measured_again(llama, material, tmp_path, monkeypatch):
    pairs, measured = pairs_of_answers(tmp_path, material), []
    plain = causal.log_probabilities

    def counted(model, batch):
        if len(measured) == kill_after:
            raise KeyboardInterrupt
        measured.extend([batch])
        return plain(model, batch)

    monkeypatch.setattr(causal, "log_probabilities", counted)
    monkeypatch.setattr(causal, "MIN_PAIRS_PER_WRITE", 16)
    common = [*map(str, (
        "--model_name_or_path", llama, "--train_file", pairs, "--preference_loss", "dpo", "--block_size", "128",
        "--chat_template", "none", "--global_batch_size", "8", "--per_device_train_batch_size", "2",
        "--learning_rate", "1e-3", "--max_train_steps", "2", "--validation_split_percentage", "0",
        "--cache_dir", tmp_path / "cache",
    ))]  # fmt: skip
    kill_after = 5  # batches of 8 pairs: two parts are stored, and half of a third is lost
    assert main_of("dpo")([*common, "--output_dir", str(tmp_path / "run")]) != 0
    measured.clear()
    kill_after = -1
    assert main_of("dpo")([*common, "--output_dir", str(tmp_path / "run")]) == 0
    num_pairs = sum(len(batch.samples) for batch in measured)
    total = len(pairs.read_text().splitlines())
    assert num_pairs == total - 32
    measured.clear()
    assert main_of("dpo")([*common, "--output_dir", str(tmp_path / "again")]) == 0
    assert not measured
    undisturbed = [*common, "--output_dir", str(tmp_path / "other"), "--cache_dir", str(tmp_path / "other_cache")]
    assert main_of("dpo")(undisturbed) == 0
    assert sum(len(batch.samples) for batch in measured) == total
    losses = [[line["loss"] for line in updates(metrics(tmp_path / name))] for name in ("run", "again", "other")]
    assert losses[0] == losses[1] == losses[2]
