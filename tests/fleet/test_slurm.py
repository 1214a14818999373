"""A real Slurm with two nodes, and the script that `zerofit submit slurm` writes."""

import signal
import subprocess
import sys

import pytest
from helpers import ROOT, environment, metrics, not_installed, updates
from machines import wait_for
from slurm import PACKAGES, PROGRAMS, Slurm

from zerofit.record.metrics import LineReader

pytestmark = pytest.mark.long


@pytest.fixture
def slurm(tmp_path, machines):
    if reason := not_installed(PROGRAMS, PACKAGES):
        pytest.skip(reason)
    with Slurm(tmp_path / "slurm", machines) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path, llama, material, cache):
    """Writes the script of a job of 40 updates under zero2 on two machines of two processes."""

    def write(name: str, *options: object):
        folder, file = tmp_path / name, tmp_path / f"{name}.sh"
        site = tmp_path / "site.sh"
        site.write_text(f"#SBATCH --output={folder}.log\n#SBATCH --chdir={ROOT}\nexport GLOO_SOCKET_IFNAME=eth0\n")
        command = [
            sys.executable, "-m", "zerofit.cli", "submit", "slurm", "train/clm.py", "--strategy", "zero2",
            "--nodes", 2, "--gpus_per_node", 0, "--num_processes", 4, "--site", site, "--output", file,
            "--rendezvous_minutes", 1, "--output_dir", folder, "--model_name_or_path", llama,
            "--train_file", material / "text" / "train.txt", "--block_size", 64, "--global_batch_size", 8,
            "--per_device_train_batch_size", 1, "--max_train_steps", 40, "--cache_dir", cache,
            "--validation_split_percentage", 0, "--save_steps", 5, *options,
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return folder, file

    return write


def last_update(folder) -> int:
    return max((line["update"] for line in LineReader(folder / "metrics.jsonl").poll()), default=0)


def test_a_disturbed_job_finishes_through_requeues(slurm, script):
    """TERM, then a killed rank, then a lost machine."""
    whole, file = script("whole")
    job = slurm.submit(file)
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", 400, "the undisturbed job")

    folder, file = script("run")
    job = slurm.submit(file)

    def restarts() -> int:
        return int(slurm.job(job)["Restarts"])

    def goes_on_to(update: int, restarted: int) -> None:
        wait_for(lambda: restarts() == restarted and last_update(folder) >= update, 400, f"update {update} of the job")

    goes_on_to(6, 0)
    slurm.run("scancel", "--signal=TERM", job)
    goes_on_to(14, 1)
    slurm.nodes[1].ranks()[3].send_signal(signal.SIGKILL)
    goes_on_to(22, 2)
    slurm.kill_node(slurm.nodes[1])
    slurm.start_node(slurm.nodes[1])
    goes_on_to(30, 3)
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", 400, "the end of the job")

    made = [line["update"] for line in updates(metrics(folder))]
    assert made == list(range(1, 41))
    for line, expected in zip(updates(metrics(folder)), updates(metrics(whole)), strict=True):
        assert line["consumed_samples"] == expected["consumed_samples"]
        assert abs(line["loss"] - expected["loss"]) < 1e-6


def test_a_mistake_is_launched_once_and_stands_in_the_log(slurm, script):
    folder, file = script("run", "--learnin_rate", "1")
    job = slurm.submit(file)
    wait_for(lambda: slurm.job(job)["JobState"] == "FAILED", 120, "the job has failed")
    assert slurm.job(job)["Restarts"] == "0"
    assert slurm.job(job)["ExitCode"] == "2:0"
    log = folder.with_suffix(".log").read_text()
    assert "--learnin_rate is not an option. Did you mean learning_rate?" in log
    assert log.count("accelerate launch ") <= 2, "once on each machine"
