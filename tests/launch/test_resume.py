"""Runs that are left and go on: under another strategy, with other processes, after signals, and around faults."""

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import ROOT, environment, launch, launch_command, launched, metrics, updates

STORIES = ROOT.parent / "shared" / "data" / "models" / "stories260K" / "hf"
TEXT = ROOT.parent / "shared" / "data" / "text" / "tinystories_a.txt"
SHORT = [
    "--model_name_or_path", STORIES, "--train_file", TEXT, "--block_size", "64", "--per_device_train_batch_size", "4",
    "--learning_rate", "1e-3", "--record_samples", "true", "--validation_split_percentage", "1",
]  # fmt: skip


def largest_difference(name: str, ours: list[dict], theirs: list[dict]) -> float:
    assert [line["update"] for line in ours] == [line["update"] for line in theirs]
    return max(abs(a[name] / b[name] - 1) for a, b in zip(ours, theirs))


def samples(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


def test_a_run_goes_on_under_any_strategy_with_any_number_of_processes(tmp_path):
    """2 -> 1 -> 2 processes and ddp -> zero2 -> zero3 -> zero3_offload -> ddp, against the first leg uninterrupted."""
    output, run = tmp_path / "run", [*SHORT, "--max_train_steps", "12", "--save_steps", "2"]
    whole = updates(launch(output, *run, strategy="ddp", processes=2))
    ledger = samples(output)
    assert [line["update"] for line in ledger] == list(range(1, 13))
    legs, before = [(2, "zero2", 1), (4, "zero3", 2), (6, "zero3_offload", 2), (8, "ddp", 2)], 2
    for start, strategy, processes in legs:
        for update in range(start + 2, 13, 2):
            shutil.rmtree(output / "checkpoints" / f"update_{update:08}")
        shutil.rmtree(output / "model")  # as if it had been killed before
        done = launched(output, *run, strategy=strategy, processes=processes)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"after update {start}, written under" in done.stdout
        assert ("the accumulation follows" in done.stdout) == (processes != before)
        before = processes
        lines = metrics(output)
        assert [line["update"] for line in lines] == list(range(13)), "each update once"
        assert largest_difference("loss", updates(lines), whole) < 1e-5
        assert largest_difference("grad_norm", updates(lines), whole) < 1e-4
        assert largest_difference("learning_rate", updates(lines), whole) == 0
        assert samples(output) == ledger
    assert (output / "checkpoints" / "latest").resolve().name == "update_00000012"


class Run:
    """A run in the background, its output in a file."""

    def __init__(self, folder: Path, *arguments, strategy: str, processes: int):
        self.output, self.log = folder / "run", folder / "log"
        command = launch_command(self.output, *arguments, strategy=strategy, processes=processes)
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)

    def wait_for_updates(self, number: int) -> None:
        until = time.time() + 120
        while not (self.output / "metrics.jsonl").is_file() or len(metrics(self.output)) < number:
            assert time.time() < until, self.log.read_text()
            assert self.launcher.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        children = psutil.Process(self.launcher.pid).children(recursive=True)
        return next(child for child in children if "clm.py" in " ".join(child.cmdline())
                    and child.environ().get("RANK") == str(number))  # fmt: skip

    def said(self) -> str:
        """What was printed, once it has ended."""
        self.launcher.wait(timeout=60)
        return self.log.read_text()


def test_signals_and_the_clock_end_a_run_in_order(tmp_path):
    arguments = [*SHORT, "--max_train_steps", "3000"]
    run = Run(tmp_path, *arguments, strategy="ddp", processes=2)
    run.wait_for_updates(5)
    run.launcher.send_signal(signal.SIGTERM)  # which it passes on to both processes
    assert "stopped     by SIGTERM after update" in run.said()
    output, made = run.output, updates(metrics(run.output))
    assert 4 <= len(made) < 3000
    assert (output / "checkpoints" / "latest").resolve().name == f"update_{len(made):08}"
    assert json.loads((output / "environment.json").read_text())["exit_code"] == 85
    assert not (output / "model").exists()

    done = launched(output, *arguments, "--max_hours", "1e-6", processes=1)
    assert "exit status 85" in done.stderr
    assert f"after update {len(made)}, written under ddp, number of processes 2" in done.stdout
    assert f"stopped     by max_hours after update {len(made) + 1:,}" in done.stdout
    lines = updates(metrics(output))
    assert [line["update"] for line in lines] == list(range(1, len(made) + 2))
    assert lines[:-1] == made


def test_who_dies_is_spoken_for_and_nobody_waits_for_it(tmp_path):
    run = Run(tmp_path, *SHORT, "--max_train_steps", "3000", strategy="zero2", processes=2)
    run.wait_for_updates(5)
    rank = run.rank(1)
    rank.kill()
    said = run.said()
    assert f"rank 1 (pid {rank.pid}) ended without a word in phase" in said
    assert "SIGKILL" in said
    assert "rank 0 leaves in phase" in said
    assert "another process is gone" in said
    assert "[rank0]: Traceback" not in said


def test_a_rank_without_memory_says_what_held_it_and_what_would_help(tmp_path):
    run = Run(tmp_path, *SHORT, "--max_train_steps", "3000", strategy="ddp", processes=2)
    run.wait_for_updates(5)
    rank = run.rank(1)
    held = int(Path(f"/proc/{rank.pid}/status").read_text().split("VmData:")[1].split()[0]) * 1024
    rank.rlimit(psutil.RLIMIT_DATA, (held + 2**19, held + 2**19))
    said = run.said()
    assert "out of memory: rank 1 of 2, " in said
    assert "exitcode  : 87" in said
    table, remedies = said.partition("held by this rank")[2].split("what would help, by what it saves:")
    assert "optimizer state" in table
    assert "--gradient_checkpointing" in remedies
    assert "--per_device_train_batch_size 2 --gradient_accumulation_steps 2" in remedies
    assert "[rank1]: Traceback" not in said


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> list:
    """A model in which one word is NaN, texts of which one has that word, and the options to train on them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("poisoned")
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("Z")["input_ids"][-1]] = torch.nan
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    random.seed(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "big", "red", "dog", "run", "fast", "to", "him"]
    texts = [" ".join(random.choice(words) for _ in range(40)) for _ in range(96)]
    texts[37] = "Z Z Z " + texts[37]
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        "--model_name_or_path", folder, "--train_file", file, "--validation_split_percentage", "0", "--block_size",
        "64", "--packing", "none", "--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--save_steps",
        "2", "--learning_rate", "1e-3", "--record_samples", "true",
    ]  # fmt: skip


def check_fault(output: Path, action: str) -> int:
    """The fault's record: the sample is named with its text, on the rank that had it. Returns the update."""
    (fault,) = [json.loads(line) for line in (output / "faults.jsonl").read_text().splitlines()]
    assert fault["action"] == action
    assert fault["reason"] == "loss is nan"
    broken = [part for part in fault["micro_batches"] if part["loss"] != part["loss"]]
    assert len(fault["micro_batches"]) == 2
    assert len(broken) == 1, "one rank only"
    (index,) = [index for index in broken[0]["samples"] if fault["heads"][str(index)].startswith("Z Z Z")]
    assert index == 37
    assert len(fault["heads"]) == 8
    return fault["update"]


def test_a_poisoned_sample_never_reaches_the_weights(poisoned, tmp_path):
    skipped, rewound, stopped = tmp_path / "skip", tmp_path / "rewind", tmp_path / "stop"
    skip = launch(skipped, *poisoned, "--on_fault", "skip", strategy="ddp", processes=2)
    at = check_fault(skipped, "skip")
    assert [line["update"] for line in skip] == list(range(1, 13))
    assert skip[at - 1]["fault"] == "loss is nan"
    good = [line for line in skip if line["update"] != at]
    assert all(line["loss"] < 7 and line["grad_norm"] < 100 for line in good)
    assert good[-1]["loss"] < good[0]["loss"]

    done = launched(rewound, *poisoned, "--on_fault", "rewind", strategy="zero3", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert check_fault(rewound, "rewind") == at
    assert f"left out: update {at}" in done.stdout
    again = metrics(rewound)
    assert [line["update"] for line in again] == list(range(1, 13)), "each update once"
    assert largest_difference("loss", [line for line in again if line["update"] != at], good) < 1e-5
    assert samples(rewound) == [line for line in samples(skipped) if line["update"] != at]

    done = launched(stopped, *poisoned, strategy="zero2", processes=2)
    assert "exitcode  : 86" in done.stderr
    assert check_fault(stopped, "stop") == at
    assert f"stopped     by a fault after update {at - 1} of 12: update {at}: loss is nan" in done.stdout
    assert "--on_fault skip" in done.stdout
    assert (stopped / "checkpoints" / "latest").resolve().name == f"update_{at - 1:08}"
    more = launch(stopped, *poisoned, "--on_fault", "skip", processes=1)
    assert [line["update"] for line in more] == list(range(1, 13))
    assert largest_difference("loss", [line for line in more if line["update"] != at], good) < 1e-5
