"""Seeded faults, one after another, in runs that a scheduler would keep up: nobody hangs, somebody names the machine,
and at the end each update was made once, with the loss of a run that nobody has disturbed.

ZEROFIT_FAULTS=20 is how many each strategy meets (4 by default).
"""

import os
import random
import signal
import time

import pytest
from helpers import metrics, updates
from machines import wait_for

FAULTS = int(os.environ.get("ZEROFIT_FAULTS", "4"))
BETWEEN = 6  # updates from one fault to the next, at least
WATCHDOG_MINUTES = 0.5


def kill_rank(machine, draw, run) -> str:
    rank, process = draw.choice(sorted(machine.ranks().items()))
    process.kill()
    return f"rank {rank}"


def stop_rank(machine, draw, run) -> str:
    rank, process = draw.choice(sorted(machine.ranks().items()))
    process.send_signal(signal.SIGSTOP)
    return f"rank {rank}"


def kill_launcher(machine, draw, run) -> str:
    run.running[machine.number].kill()
    return f"machine {machine.number}"


def lose_machine(machine, draw, run) -> str:
    machine.power_off()
    time.sleep(draw.uniform(0, 3))
    machine.plug()
    return machine.name


def pull_cable(machine, draw, run) -> str:
    machine.unplug()
    time.sleep(60 * WATCHDOG_MINUTES + 10)
    machine.plug()
    return machine.name


def loosen_cable(machine, draw, run) -> str:
    """Too short for anybody to notice."""
    machine.unplug()
    time.sleep(2)
    machine.plug()
    return machine.name


def signal_run(machine, draw, run) -> str:
    run.running[machine.number].send_signal(signal.SIGTERM)
    return "SIGTERM"


KINDS = (kill_rank, stop_rank, kill_launcher, lose_machine, pull_cable, loosen_cable, signal_run)
CABLES = (pull_cable, loosen_cable)  # a rank that saves or evaluates has more patience: the run may just go on
STRATEGIES = {"ddp": 0, "zero2": 1, "zero3": 2, "fsdp2": 3, "tp": 4}


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_faults_one_after_another(job, strategy):
    """Two machines of two processes (tp: each layer is split within a machine, the data among them)."""
    steps = (FAULTS + 1) * BETWEEN * 5
    common = {"steps": steps, "strategy": strategy, "processes": 4}
    whole = job("whole", **common).start_all()
    assert whole.ends(60 + 3 * steps) == [0, 0], whole.said()[-6000:]

    options = ["--watchdog_minutes", WATCHDOG_MINUTES, "--save_steps", 5]
    run = job("run", **common, options=options, flags=["--max_restarts", 100, "--rendezvous_minutes", 2])
    draw, seed = random.Random(STRATEGIES[strategy]), STRATEGIES[strategy]
    run.start_all()
    unnamed = []
    for number in range(FAULTS):
        run.kept_up_to(run.last_update() + BETWEEN)
        kind, machine = KINDS[(seed + number) % len(KINDS)], run.machines[draw.randrange(2)]
        wait_for(lambda machine=machine: len(machine.ranks()) == 2, 120, "two ranks on each machine")
        before = run.logs()
        names = kind(machine, draw, run), machine.name, f"machine {machine.number}"
        at_fault = run.last_update()

        def is_over(before=before, kind=kind, names=names, at_fault=at_fault) -> bool:
            words = run.said(before)
            if any(name in words for name in names):
                return True
            return kind in CABLES and run.last_update() >= at_fault + 2 and "restart" not in words

        run.kept_up(150, is_over)
        if not is_over():
            unnamed.append(f"{kind.__name__}:\n{run.said(before)[-3000:]}")
    assert run.kept_up(60 + 3 * steps) == [0, 0], run.said()[-6000:]
    assert not unnamed, "\n".join(unnamed)
    made = [line["update"] for line in updates(metrics(run.folder))]
    assert made == list(range(1, steps + 1))
    losses, expected = run.losses(), whole.losses()
    assert max(abs(losses[update] - expected[update]) for update in expected) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("what", ["output_dir", "train_file"])
def test_a_folder_or_a_file_that_is_not_shared_is_named(job, tmp_path, material, what):
    run, changed = job("run"), ["--output_dir", tmp_path / "elsewhere"]
    if what == "train_file":
        (tmp_path / "other.txt").write_text((material / "text" / "train.txt").read_text() * 2)
        changed = ["--train_file", tmp_path / "other.txt"]
    run.start(0)
    run.running[1] = run.machines[1].start(*run.command(1), *changed, log=run.log(1))
    assert set(run.ends(150)) <= {1, 2}
    assert what in run.said()
    assert "on machine gpu01" in run.said()


@pytest.mark.long
def test_two_hundred_healthy_updates_without_an_alarm(job):
    options = ["--watchdog_minutes", WATCHDOG_MINUTES]
    run = job("run", steps=200, options=options, flags=["--max_restarts", 1]).start_all()
    assert run.ends(600) == [0, 0], run.said()[-6000:]
    said = "\n".join(line for line in run.said().splitlines() if not line.startswith("accelerate launch "))
    assert not any(word in said for word in ("restart", "watchdog", "slower", "error", "Traceback"))
