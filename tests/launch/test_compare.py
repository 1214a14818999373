"""`zerofit compare`, for real, on simulated devices: it is interrupted in every way and resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from folders import tools_in_this_process
from helpers import ROOT, environment

from zerofit.cli import main as zerofit
from zerofit.tools.compare.finish import FinishedRun
from zerofit.tools.runs import LAUNCH_VARIABLE
from zerofit.tools.simulate.build import missing

TINY = {
    "config_name": "gpt2", "config_overrides": "n_layer=2,n_head=2,n_embd=32,n_positions=64", "block_size": 64,
    "train_tokenizer_vocab_size": 300, "train_file": "*.md", "document_separator": "paragraph",
    "learning_rate": 1e-3, "global_batch_size": 64, "per_device_eval_batch_size": 2,
}  # fmt: skip


pytestmark = pytest.mark.skipif(bool(missing()), reason=f"the simulated device: {missing()}")


@pytest.fixture
def recipe(tmp_path, cache) -> Path:
    file = tmp_path / "clm" / "tiny.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump({**TINY, "cache_dir": cache}))
    return file


def start(recipe: Path | None, output: Path, *flags: str) -> subprocess.Popen:
    config = ["--config", str(recipe)] if recipe else []
    command = [sys.executable, "-m", "zerofit.cli", "compare", *config, "--output", str(output)]
    command += ["--steps", "2", *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    )


def run(recipe: Path | None, output: Path, *flags: str) -> tuple[int, str]:
    process = start(recipe, output, *flags)
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


def journal(output: Path, kind: str) -> list[dict]:
    file = output / "journal.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [line for line in lines if line["kind"] == kind]


def until(condition, seconds: float = 120):
    """What the condition gives as soon as it is something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come about")


def marked(marks: set[str]) -> list[psutil.Process]:
    """The processes of launches with these marks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(LAUNCH_VARIABLE) in marks and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def marks(output: Path) -> set[str]:
    return {line["mark"] for line in journal(output, "launch")}


def ranks(output: Path) -> list[psutil.Process]:
    commands = [(process, " ".join(process.cmdline())) for process in marked(marks(output))]
    return [
        process
        for process, command in commands
        if "train/clm.py" in command and "RANK" in process.environ() and "watchdog_process" not in command
    ]


def test_a_comparison_is_made_once(recipe, tmp_path, monkeypatch, capfd):
    """The limit is one at which the larger size does not fit; the same command again launches nothing."""
    output = tmp_path / "comparison"
    flags = ("--strategies", "ddp", "--num_processes", "1", "--batch_sizes", "2,1024", "--memory_limit", "300MiB")
    code, said = run(recipe, output, *flags)
    assert code == 0, said
    assert "ddp: holds 2, and 1024 does not" in said
    for file in ("report.html", "report.md", "results.csv"):
        assert (output / file).is_file()
    launches = journal(output, "launch")
    monkeypatch.chdir(ROOT)
    with tools_in_this_process():
        assert zerofit(["compare", "--config", str(recipe), "--output", str(output), "--steps", "2", *flags]) == 0
    assert journal(output, "launch") == launches, "nothing is repeated"
    assert "ddp holds the largest batch, 2 per process" in capfd.readouterr().out


@pytest.mark.long
def test_a_comparison_survives_whatever_is_killed(recipe, tmp_path):
    """A rank, the comparison itself, a launcher: what was found is not tried again, and no process is left."""
    output = tmp_path / "comparison"
    flags = ("--strategies", "ddp", "--batch_sizes", "2,4096", "--memory_limit", "300MiB")

    first = start(recipe, output, *flags)
    os.kill(until(lambda: ranks(output))[0].pid, signal.SIGKILL)
    until(lambda: journal(output, "size"))
    first.kill()  # whatever it was doing
    first.communicate()
    found = journal(output, "size")
    assert found[0]["size"] == 2
    assert found[0]["outcome"] == "fits"

    second = start(recipe, output, *flags)
    until(lambda: len(journal(output, "launch")) > len(journal(output, "end")) and ranks(output))
    launcher = next(process for process in marked(marks(output)) if "RANK" not in process.environ())
    os.kill(launcher.pid, signal.SIGKILL)
    said, _ = second.communicate(timeout=600)
    assert second.returncode == 0, said
    assert "resumes where it was interrupted" in said
    assert not marked(marks(output))
    sizes = journal(output, "size")
    assert [line["size"] for line in sizes if line["outcome"] == "fits" and line["key"] == found[0]["key"]] == [2]
    assert [line["size"] for line in sizes if line["outcome"] == "out_of_memory"] == [4096]
    assert "ddp: holds 2, and 4096 does not" in said


@pytest.mark.long
def test_strategies_are_trained_to_the_end_and_not_again(recipe, tmp_path):
    """One global batch, each evaluating in batches of its own: equal figures, and nothing is trained a second time."""
    output = tmp_path / "finished"
    flags = ("--strategies", "ddp,zero2:per_device_eval_batch_size=4", "--batch_sizes", "2", "--memory_limit",
             "300MiB", "--finish", "--eval_steps", "2", "--max_train_steps", "3", "--config_overrides",
             "n_layer=2,n_head=2,n_embd=32,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0")  # fmt: skip
    code, said = run(recipe, output, *flags)
    assert code == 0, said
    ddp, zero2 = (FinishedRun.read("", 2, file.with_suffix("")) for file in sorted((output / "runs").glob("*.log")))
    assert (ddp.global_batch, ddp.lines[-1]["update"]) == (64, 3)
    assert [run.recipe["per_device_eval_batch_size"] for run in (ddp, zero2)] == [2, 4]
    assert ddp.figures["eval_loss"] == pytest.approx(zero2.figures["eval_loss"], rel=1e-5)
    assert ddp.evaluation["evaluation_samples_per_s"] > 0
    assert "One global batch of 64 for all" in said
    assert "## Trained to the end" in (output / "report.md").read_text()
    launches = len(journal(output, "launch"))
    code, said = run(recipe, output, *flags)
    assert code == 0, said
    assert len(journal(output, "launch")) == launches
    assert said.count("trained at 2 per process before") == 2
