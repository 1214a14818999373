"""A real Slurm with two nodes, and the script that `zerofit submit slurm` writes."""

import signal

import pytest
from helpers import ROOT, metrics, not_installed, updates
from machines import wait_for
from slurm import PACKAGES, PROGRAMS, Slurm

pytestmark = pytest.mark.long


@pytest.fixture
def slurm(tmp_path, machines):
    if reason := not_installed(PROGRAMS, PACKAGES):
        pytest.skip(reason)
    with Slurm(tmp_path / "slurm", machines) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path, job):
    """Writes the script of a run of 40 updates."""

    def write(name: str, *options: object):
        run = job(name, steps=40, options=["--save_steps", 5, *options])
        file, site = tmp_path / f"{name}.sh", tmp_path / "site.sh"
        site.write_text(f"#SBATCH --output={run.folder}.log\n#SBATCH --chdir={ROOT}\nexport GLOO_SOCKET_IFNAME=eth0\n")
        file.write_text(run.file_of("slurm", "--site", site))
        return run, file

    return write


def test_a_disturbed_job_finishes_through_requeues(slurm, script):
    """TERM, then a killed rank, then a lost machine."""
    whole, file = script("whole")
    job = slurm.submit(file)
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", 400, "the undisturbed job")

    run, file = script("run")
    job = slurm.submit(file)

    def restarts() -> int:
        return int(slurm.job(job)["Restarts"])

    def goes_on_to(update: int, restarted: int) -> None:
        wait_for(lambda: restarts() == restarted and run.last_update() >= update, 400, f"update {update} of the job")

    goes_on_to(6, 0)
    slurm.run("scancel", "--signal=TERM", job)
    goes_on_to(14, 1)
    slurm.nodes[1].ranks()[3].send_signal(signal.SIGKILL)
    goes_on_to(22, 2)
    slurm.kill_node(slurm.nodes[1])
    slurm.start_node(slurm.nodes[1])
    goes_on_to(30, 3)
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", 400, "the end of the job")

    made = [line["update"] for line in updates(metrics(run.folder))]
    assert made == list(range(1, 41))
    for line, expected in zip(updates(metrics(run.folder)), updates(metrics(whole.folder)), strict=True):
        assert line["consumed_samples"] == expected["consumed_samples"]
        assert abs(line["loss"] - expected["loss"]) < 1e-6


def test_a_mistake_is_launched_once_and_stands_in_the_log(slurm, script):
    run, file = script("run", "--learnin_rate", "1")
    job = slurm.submit(file)
    wait_for(lambda: slurm.job(job)["JobState"] == "FAILED", 120, "the job has failed")
    assert slurm.job(job)["Restarts"] == "0"
    assert slurm.job(job)["ExitCode"] == "2:0"
    log = run.folder.with_suffix(".log").read_text()
    assert "--learnin_rate is not an option. Did you mean learning_rate?" in log
    assert log.count("accelerate launch ") <= 2, "once on each machine"
