"""`zerofit launch`: what it reads of machines and devices, and the line that it makes of them."""

import os
import shlex
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT, refusal

from zerofit.launch import command as start
from zerofit.launch.exit_code import Restarts
from zerofit.launch.machines import read_machines

RECIPE = "recipes/clm/stdlib-gpt2.yaml"
DLC = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "dlc-master-0", "MASTER_PORT": "23456"}
SLURM = {
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
TRAINER = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0.job", "PET_MASTER_PORT": "29400"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_TASK_ID": "sky-2026-11-24-08-00-00-000000_train_1",
}
DSTACK = {
    "DSTACK_NODES_NUM": "4",
    "DSTACK_NODE_RANK": "3",
    "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_RUN_NAME": "a-1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "10.0.0.4",
}


@pytest.fixture
def machine(monkeypatch):
    """Sets the number of devices and the variables of a scheduler."""
    monkeypatch.chdir(ROOT)
    known = {*DLC, "LOCAL_RANK", *TRAINER, *SKYPILOT, *DSTACK, *OPENMPI}
    for name in [name for name in os.environ if name.startswith("SLURM_") or name in known]:
        monkeypatch.delenv(name, raising=False)

    def make(devices: int, **variables: str) -> None:
        monkeypatch.setattr(start, "num_devices", lambda: devices)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


def line(capsys, *words: str) -> tuple[list[str], str]:
    """(the line that would be run, all that is printed)."""
    assert start.main([*words, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    printed = next(line for line in shown.splitlines() if line.startswith("accelerate launch"))
    return shlex.split(printed)[2:], shown


def told(words: list[str]):
    """What accelerate's own parser makes of it."""
    return launch_command_parser().parse_args(words)


@pytest.mark.parametrize(("devices", "strategy", "processes"), [(0, "single", 1), (1, "single", 1), (8, "ddp", 8)])
def test_one_process_a_device(machine, capsys, devices, strategy, processes):
    machine(devices)
    found = told(line(capsys, RECIPE, "--learning_rate", "1e-4")[0])
    assert found.config_file == f"accelerate_configs/{strategy}.yaml"
    assert (found.num_processes, found.num_machines) == (processes, 1)
    assert found.training_script == "train/clm.py"
    assert found.training_script_args == ["--config", RECIPE, "--learning_rate", "1e-4"]


def test_options_stand_before_or_behind_what_is_trained(machine, capsys):
    machine(4)
    program = ["train/cls.py", "--task_name", "mrpc"]
    before, _ = line(capsys, "--strategy", "zero2", "--num_processes=2", *program)
    behind, _ = line(capsys, *program, "--strategy=zero2", "--num_processes", "2")
    assert before == behind
    assert before[-3:] == program
    assert told(before).config_file == "accelerate_configs/zero2.yaml"
    assert told(before).num_processes == 2
    named, _ = line(capsys, "--config", RECIPE)
    assert named[-3:] == ["train/clm.py", "--config", RECIPE]


def test_a_clouds_machines(machine, capsys):
    """PAI-DLC's variables: WORLD_SIZE counts machines. One machine takes any free port."""
    machine(8, **DLC)
    words, shown = line(capsys, "--strategy", "zero3", RECIPE)
    found = told(words)
    assert (found.num_processes, found.num_machines, found.machine_rank) == (16, 2, 1)
    assert (found.main_process_ip, found.main_process_port) == ("dlc-master-0", 23456)
    assert found.rdzv_conf == "timeout=600"
    assert "WORLD_SIZE = 2, RANK = 1, MASTER_ADDR = dlc-master-0, MASTER_PORT = 23456" in shown
    one = told(line(capsys, "--num_machines", "1", RECIPE)[0])
    assert (one.num_processes, one.main_process_port) == (8, 0), "an option goes before the environment"
    words, _ = line(capsys, RECIPE, "--rendezvous_minutes", "2")
    assert told(words).rdzv_conf == "timeout=120"
    assert words[-2:] == ["--config", RECIPE], "it is the launcher's"


@pytest.mark.parametrize(
    ("variables", "machines"),
    [
        (TRAINER, (2, 1, "job-0.job", "29400")),
        (SKYPILOT, (2, 1, "10.0.0.4", "derived")),
        (DSTACK, (4, 3, "10.0.0.4", "derived")),
        (OPENMPI, (2, 1, "10.0.0.4", None)),
        ({**SLURM, "SLURM_JOB_ID": "4711"}, (3, 2, "gpu07", "derived")),
        ({**TRAINER, "WORLD_SIZE": "16", "RANK": "1", "MASTER_ADDR": "other"}, (2, 1, "job-0.job", "29400")),
    ],
)
def test_schedulers(variables, machines):
    """The variables that each documents; the port of a job is its own."""
    found = read_machines(variables)
    port = "derived" if found.port not in (None, "29400") else found.port
    assert (found.count, found.rank, found.address, port) == machines
    assert any(f"{name} = {value}" in found.source for name, value in variables.items())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LOCAL_RANK": "0", "WORLD_SIZE": "8"}, "a launcher has started this command"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "12"}, "SLURM_STEP_NUM_TASKS = 12 on 3 machines"),
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, "srun --ntasks-per-node=1 zerofit launch"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0' in the environment: expected a number, 1 or more"),
        ({**SLURM, **SKYPILOT}, "two schedulers contradict each other: SLURM_STEP_NUM_NODES = 3"),
    ],
)
def test_an_environment_of_something_else_is_refused(variables, said):
    assert said in refusal(read_machines, variables)


def test_mistakes(machine, tmp_path):
    machine(8, **DLC)
    (tmp_path / "mine.yaml").write_text("config_name: gpt2\n")
    for words, said in (
        (("--max_restart", "1", RECIPE), "--max_restart is where a recipe or a program was expected. Did you mean"),
        ((str(tmp_path / "mine.yaml"),), "does not say the task"),
        ((RECIPE, "--strategy", "single"), "--strategy single and 16 processes: use ddp"),
        ((RECIPE, "--num_processes", "15"), "Use --num_processes 14"),
        ((RECIPE, "--num_machines", "2"), "2 machines (--num_machines, RANK = 1): set --main_process_ip as well"),
    ):
        assert said in refusal(start.main, [*words, "--dry_run"])


def test_what_the_launcher_gets(machine, monkeypatch):
    """The numbers of machines do not reach the processes."""
    machine(2, **DLC, **TRAINER, PATH="/usr/bin")
    started = []
    monkeypatch.setattr(start.Supervisor, "run", lambda self, *given: started.append(given) or 0)
    assert start.main([RECIPE]) == 0
    ((words, variables),) = started
    assert "--num_machines" in words
    assert "train/clm.py" in words
    assert not {*DLC, *TRAINER} & variables.keys(), "torchrun's parser takes PET_* for options that are not given"
    assert variables["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


def test_which_failures_are_worth_a_restart(tmp_path):
    restarts = Restarts(tmp_path)
    assert not Restarts(None).record_failure({-9, 143}), "the agent has ended the others"
    assert Restarts(None).record_failure({1, 2}), "the others have lost a process"
    (tmp_path / "metrics.jsonl").write_text('{"update": 7, "loss": 1.0}\n{"eval_loss": 1.0}\n{"upd')
    assert not restarts.record_failure({-9})
    assert "twice after update 7" in restarts.record_failure({1})
    restarts.is_stopped = True
    assert restarts.record_failure({85})
