"""A run on several machines: what happens to it when one is late, lost, slow, or started wrongly."""

import signal

import pytest


@pytest.fixture(scope="module")
def undisturbed():
    """{strategy: losses} of runs that nobody has disturbed."""
    return {}


def test_a_killed_rank_restarts_the_run_on_all_machines(job):
    """Only the launcher of its machine sees it end; the others meet it again, and the losses stay the same."""
    whole = job("whole").start_all()
    assert whole.ends() == [0, 0], whole.said()[-6000:]
    run = job("run", flags=["--max_restarts", 2]).start_all()
    run.reaches(12)
    run.machines[1].ranks()[3].kill()
    assert run.ends() == [0, 0], run.said()[-6000:]
    assert run.said().count("restart 1 of 2") >= 1
    assert "rank 3 was killed by SIGKILL" in run.said()
    assert run.losses() == whole.losses()
    assert len(run.losses()) == 30


def test_a_mistake_ends_all_machines_with_its_code_once(job):
    run = job("run", options=["--train_file", "none.txt"], flags=["--max_restarts", 3]).start_all()
    assert run.ends(120) == [2, 2]
    assert "restart 1" not in run.said()
    assert "none.txt" in run.said()


def test_a_signal_to_one_machine_ends_all_with_85_and_the_same_command_resumes(job):
    run = job("run", flags=["--max_restarts", 1]).start_all()
    run.reaches(5)
    run.running[1].send_signal(signal.SIGTERM)
    assert run.ends(120) == [85, 85], run.said()[-6000:]
    before = run.last_update()
    run.start_all()
    assert run.ends() == [0, 0], run.said()[-6000:]
    assert 5 <= before < 30
    assert sorted(run.losses()) == list(range(1, 31))
