"""Machines and ranks that meet before they have a process group: processes with a store, and short limits."""

import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT, at_once, environment, refusal
from torch.distributed import DistStoreError, HashStore, PrefixStore
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.utils.store import barrier

from zerofit.launch import ranks, rendezvous
from zerofit.launch.ranks import RankRendezvous
from zerofit.launch.rendezvous import Meeting, open_store, serve_store

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip


@pytest.fixture
def members(monkeypatch):
    """Runs members of a meeting, as threads, each on its own machine: what each has seen at the end."""
    monkeypatch.setattr(rendezvous, "KNOWN_S", 5.0)

    def run(*acts, count: int | None = None, numbers=None, limit_s: float = 30.0) -> list:
        store = HashStore()
        store.set_timeout(timedelta(seconds=5))

        def work(place: int):
            number = place if numbers is None else numbers[place]
            meeting = Meeting(PrefixStore("test", store), "rank", number, count or len(acts), 1, number, limit_s)
            return acts[place](meeting)

        return at_once(*(partial(work, place) for place in range(len(acts))))

    return run


def comes(meeting: Meeting) -> Meeting:
    meeting.come()
    meeting.ready()
    while not meeting.poll():
        time.sleep(0.01)
    return meeting


def stops(meeting: Meeting) -> None:
    meeting.come()
    meeting.stop("error: train_file = 'a.txt': there is no such file")


def test_all_meet_and_know_each_others_machines(members, monkeypatch):
    codes = iter(["aaaa", "bbbb", "bbbb"])
    monkeypatch.setattr(rendezvous, "digest_of_code", lambda: next(codes))
    met = members(comes, comes, comes)
    for meeting in met:
        assert sorted(meeting.machines) == ["0", "1", "2"]
        assert 1 <= len(meeting.notes) <= 2, "another code is said"
        assert "aaaa" in meeting.notes[0]
        assert "commit" in meeting.notes[0]
        assert meeting.machine_at("127.0.0.1") is None, "each machine has that address"
        meeting.machines["1"]["addresses"].append("192.0.2.9")
        meeting.machines["1"]["host"] = "gpu01"
        assert meeting.machine_at("192.0.2.9") == "machine 1 (gpu01)"


@pytest.mark.parametrize("place", [0, 1])
def test_one_that_stops_tells_all_others_why(members, place):
    acts = [comes, comes, comes]
    acts[place] = stops
    said = members(*acts)
    assert said.pop(place) is None
    for end in said:
        assert f"rank {place} of machine {place}" in end.report()
        assert "no such file" in end.report()
        assert (end.code, end.machine) == (2, place)


def test_one_that_never_comes_or_falls_silent_is_named(members):
    def falls_silent(meeting: Meeting) -> None:
        meeting.come()
        meeting.poll()

    never, silent = members(comes, count=2, limit_s=0.3), members(comes, falls_silent, limit_s=0.3)
    assert "rank 1, which has never come" in never[0].report()
    assert "rank 1 on host" in silent[0].report()
    assert "--rendezvous_minutes" in silent[0].report()
    assert "rank 0 on host" in members(falls_silent, comes, limit_s=0.3)[1].report()


def test_a_number_that_is_given_twice_ends_all(members):
    said = members(comes, comes, comes, count=3, numbers=(0, 1, 1))
    for end in said:
        assert "rank 1 is there twice" in end.report()
        assert "--machine_rank" in end.report()


# -------------------------------------------------------------------------------------------------------------- stores


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_store_of_one_machine_listens_on_the_loopback_interface_only():
    store = serve_store(0, everywhere=False)
    listening = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"}
    assert f"0100007F:{store.port:04X}" in listening
    again = open_store("127.0.0.1", store.port)
    again.set("a", "1")
    assert store.get("a") == b"1"
    assert "--main_process_port" in refusal(serve_store, store.port, everywhere=False)


# --------------------------------------------------------------------------------------------------------------- ranks


def test_a_rank_whose_launcher_was_killed_ends_the_wait_of_the_other_launcher(monkeypatch):
    """torchrun's launchers wait for each other at the end, for 5 minutes."""
    store = serve_store(0, everywhere=False)
    theirs = PrefixStore("none", open_store("127.0.0.1", store.port))
    rank = RankRendezvous({**TORCHRUN, "MASTER_PORT": str(store.port)})
    rank.is_open, rank.store = False, open_store("127.0.0.1", store.port)
    rank.stop("exit code 0", 0)
    with pytest.raises(DistStoreError):  # the launcher is alive, and has not come
        barrier(theirs, 2, _TERMINAL_STATE_SYNC_ID, barrier_timeout=0.1)
    theirs.delete_key(f"{_TERMINAL_STATE_SYNC_ID}/num_members")
    monkeypatch.setattr(ranks, "LAUNCHER", -1)
    rank.stop("exit code 0", 0)
    barrier(theirs, 2, _TERMINAL_STATE_SYNC_ID, barrier_timeout=10)


def test_a_lost_peer_is_named_by_its_machine():
    rank = RankRendezvous(TORCHRUN)
    said = "[pair.cc:552] Connection closed by peer [10.0.0.2]:38716"
    assert rank.named(said) == said, "they have not met"
    rank.meeting = Meeting(HashStore(), "rank", 0, 2, 1, 0, 1.0)
    rank.meeting.machines = {"0": {"machine": 0, "host": "gpu00", "addresses": ["127.0.0.1", "10.0.0.1"]},
                             "1": {"machine": 1, "host": "gpu01", "addresses": ["127.0.0.1", "10.0.0.2"]}}  # fmt: skip
    assert rank.named(said) == "[pair.cc:552] Connection closed by peer machine 1 (gpu01)"
    assert rank.named("remote=[::ffff:10.0.0.1]:29500") == "remote=machine 0 (gpu00)"
    assert rank.named("[127.0.0.1]:1") == "[127.0.0.1]:1"
    assert rank.machines == ["machine 0 (gpu00)", "machine 1 (gpu01)"]
    assert rank.place_of(rank.here, "cuda") == "machine 1 (gpu01), GPU 0"


RANK = """
import sys, time
from zerofit.recipe.errors import UserError, leave, reports_user_errors, tell_others_with
from zerofit.launch.ranks import RANKS
tell_others_with(RANKS.stop)

@reports_user_errors
def main(argv):
    if argv[0] == "early":
        raise UserError("train_file is missing")
    RANKS.start(float(argv[1]))
    RANKS.wait()
    print("met")
    return 0

leave(main(sys.argv[1:]))
"""


def test_a_rank_that_fails_before_the_process_group_ends_the_other_machine():
    """The first has the store, and fails before it has imported torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank, act in enumerate(("early", "meets")):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}  # fmt: skip
        processes.append(subprocess.Popen(
            [sys.executable, "-c", RANK, act, "30"], env=environment(**variables), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ))  # fmt: skip
    (_, failing), (out, other) = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert failing == "error: train_file is missing\n"
    assert out == ""
    (said,) = [line for line in other.splitlines() if line.startswith("error:")]
    assert "rank 0 of machine 0" in said
    assert "train_file is missing" in said
