"""How launches end, for the one who has started them: exit code, record, and the last words."""

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from helpers import BIN, ROOT, environment, metrics, on_a_terminal, updates


def zerofit(*words) -> list[str]:
    return [sys.executable, "-m", "zerofit.cli", "launch", *map(str, words)]


def recorded(folder):
    return json.loads((folder / "environment.json").read_text())["exit_code"]


@pytest.fixture(scope="module")
def options(llama, material, cache) -> list:
    return [
        "--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--block_size", "64",
        "--per_device_train_batch_size", "4", "--max_train_steps", "3000", "--cache_dir", cache,
        "--validation_split_percentage", "0",
    ]  # fmt: skip


def test_a_mistake_in_several_processes_is_the_last_thing_on_the_screen_and_not_repeated(tmp_path):
    command = zerofit("--num_processes", "2", "--max_restarts", "3", "train/clm.py", "--output_dir", tmp_path / "run",
                      "--learnin_rate", "1")  # fmt: skip
    code, shown = on_a_terminal(command, cwd=ROOT, env=environment())
    lines = [line for line in shown.split("\r\n") if line]
    message = "error: --learnin_rate is not an option. Did you mean learning_rate?"
    assert code == recorded(tmp_path / "run") == 2
    assert lines[-2] == message
    assert "no restart (the same command would end in the same way: a mistake)" in lines[-1]
    assert lines.count(message) == 1
    assert not any("Traceback" in line or "torch/distributed" in line for line in lines)


def test_a_signal_reaches_the_ranks_and_the_code_comes_back(options, tmp_path):
    """Nobody reads what is printed after the first update: the run goes on without a terminal."""
    program = ["train/clm.py", "--output_dir", tmp_path / "run", *options]
    command = zerofit("--num_processes", "2", "--max_restarts", "1", *program)
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        said = ""
        while "update " not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 85, said
    assert recorded(tmp_path / "run") == 85
    assert (tmp_path / "run" / "checkpoints" / "latest").is_dir()


@pytest.mark.long
def test_a_rank_that_is_killed_is_started_again(options, tmp_path):
    """The losses are those of a run that nobody has disturbed. A restart leaves no code of the failure."""
    short = ["--max_train_steps", "150", "--save_steps", "25"]
    program = ["--num_processes", "2", "train/clm.py", *options, *short, "--output_dir"]
    assert subprocess.run(zerofit(*program, tmp_path / "whole"), cwd=ROOT, env=environment()).returncode == 0
    command = zerofit("--max_restarts", "2", *program, tmp_path / "run")
    said, killed = "", False
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            said += line
            if not killed and re.match(r"update +60/", line):
                ranks = [
                    each
                    for each in psutil.Process(process.pid).children(recursive=True)
                    if each.environ().get("RANK") == "1"
                ]
                ranks[0].kill()
                killed = True
    assert process.returncode == recorded(tmp_path / "run") == 0, said
    assert "rank 1 was killed by SIGKILL" in said
    assert said.count("restart 1 of 2") == 1
    assert said.count("resumed   ") == 1
    whole, run = ([line["loss"] for line in updates(metrics(tmp_path / name))] for name in ("whole", "run"))
    assert run == whole
    assert len(run) == 150


def test_a_stop_before_there_is_a_rank_is_on_record(tmp_path):
    command = zerofit("--num_processes", "2", "train/clm.py", "--output_dir", tmp_path / "run")
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == recorded(tmp_path / "run") == 85


LAUNCHERS = {
    "python": [sys.executable],
    "accelerate, 1": [BIN / "accelerate", "launch", "--config_file", "accelerate_configs/single.yaml"],
    "accelerate, 2": [BIN / "accelerate", "launch", "--config_file", "accelerate_configs/ddp.yaml", "--num_processes",
                      "2", "--main_process_port", "0"],
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc_per_node", "2"],
    "zerofit launch": [BIN / "zerofit", "launch", "--num_processes", "2"],
}  # fmt: skip
ENDS = {"closed": os.close, "Ctrl-C": lambda terminal: os.write(terminal, b"\x03")}


@pytest.mark.long  # what a run does at each of these signals: unit/test_exit_code.py
@pytest.mark.parametrize(("launcher", "end"), itertools.product(LAUNCHERS, ENDS))
def test_a_run_whose_terminal_is_closed_is_saved(options, tmp_path, launcher, end):
    """The launcher is the terminal's own program, as in `ssh -t HOST accelerate launch ...`."""
    run, terminal, its = tmp_path / "run", *pty.openpty()
    more = ["--strategy", "ddp"] if launcher == "torchrun" else []
    command = [*LAUNCHERS[launcher], "train/clm.py", "--output_dir", run, *options, *more]
    lead = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", lead, *map(str, command)]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    shown = b""
    while shown.count(b"update ") < 2:
        assert process.poll() is None, shown.decode()
        shown += os.read(terminal, 4096)
    ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if str(run) in each.cmdline()]
    ENDS[end](terminal)
    if end == "Ctrl-C":
        drain = threading.Thread(target=read_to_the_end, args=(terminal,), daemon=True)
        drain.start()
    process.wait(60)
    assert not psutil.wait_procs(ranks, timeout=60)[1]
    done = metrics(run)[-1]["update"]
    assert recorded(run) == 85
    assert (run / "checkpoints" / "latest").resolve().name == f"update_{done:08}"


def read_to_the_end(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass
