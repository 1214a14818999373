"""Machines and ranks that meet, restart and agree on a code: threads or processes with a store, and short limits."""

import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers import ROOT, at_once, environment, refusal
from ranks import free_port
from torch.distributed import HashStore, PrefixStore

from zerofit.launch import agent, rendezvous
from zerofit.launch.agent import MachineGroup
from zerofit.launch.exit_code import code_of_run
from zerofit.launch.rendezvous import RENDEZVOUS_LIMIT_VARIABLE, RankRendezvous, Rendezvous, open_store, serve_store
from zerofit.recipe.files import is_shared
from zerofit.strategy import strategy
from zerofit.strategy.strategy import check_same

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def members(monkeypatch):
    """Runs members of a rendezvous, as threads, each on its own machine: what each has seen at the end."""
    monkeypatch.setattr(rendezvous, "KNOWN_S", 1.0)

    def run(*acts, count: int | None = None, numbers=None, limit_s: float = 30.0) -> list:
        store = HashStore()
        store.set_timeout(timedelta(seconds=5))

        def work(place: int):
            number = place if numbers is None else numbers[place]
            size = count or len(acts)
            return acts[place](Rendezvous(PrefixStore("test", store), "rank", number, size, limit_s=limit_s))

        return at_once(*(partial(work, number) for number in range(len(acts))))

    return run


def comes(member: Rendezvous) -> Rendezvous:
    member.come()
    member.ready()
    while not member.poll():
        time.sleep(0.01)
    return member


def stops(member: Rendezvous) -> None:
    member.come()
    member.stop("error: train_file = 'a.txt': there is no such file", 2)


def falls_silent(member: Rendezvous) -> None:
    member.come()
    member.poll()


@pytest.mark.parametrize("place", [0, 1])
def test_one_that_stops_tells_all_others_why(members, place):
    acts = [comes, comes, comes]
    acts[place] = stops
    ends = members(*acts)
    assert ends.pop(place) is None
    for end in ends:
        assert f"rank {place} of machine {place}" in end.report()
        assert "no such file" in end.report()
        assert (end.code, end.machine) == (2, place)


@pytest.mark.parametrize(
    ("acts", "how", "named"),
    [
        ((comes,), {"count": 2}, "rank 1, which has never come"),
        ((comes, falls_silent), {}, "rank 1 on host"),
        ((falls_silent, comes), {}, "rank 0 on host"),
        ((comes, comes, comes), {"numbers": (0, 1, 1), "limit_s": 30.0}, "rank 1 is there twice"),
    ],
)
def test_who_is_missing_or_there_twice_is_named(members, acts, how, named):
    for act, end in zip(acts, members(*acts, **{"limit_s": 0.3, **how})):
        if act is comes:
            assert named in end.report()
            assert "--machine_rank" in end.report()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_store_of_one_machine_listens_on_the_loopback_interface_only():
    store = serve_store(0, everywhere=False)
    listening = {line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if line.split()[3] == "0A"}
    assert f"0100007F:{store.port:04X}" in listening
    again = open_store("127.0.0.1", store.port, 5.0)
    again.set("a", "1")
    assert store.get("a") == b"1"
    assert "--main_process_port" in refusal(serve_store, store.port, everywhere=False)
    free = free_port()
    assert f"has not reached machine 0 at 127.0.0.1:{free}" in refusal(open_store, "127.0.0.1", int(free), 0.1)


def test_machines_are_named_and_other_code_is_noted():
    rank = RankRendezvous(TORCHRUN)
    rank.rendezvous = Rendezvous(HashStore(), "rank", 0, 2, limit_s=1.0)
    rank.rendezvous.machines = [{"machine": n, "host": f"gpu0{n}", "code": f"{n}"} for n in range(2)]
    assert rank.machines == ["machine 0 (gpu00)", "machine 1 (gpu01)"]
    assert rank.place_of(rank.local_count, "cuda") == "machine 1 (gpu01), GPU 0"
    rank._met.set()
    (note,) = rank.wait()
    assert note.startswith("machine 1 (gpu01) runs other code than machine 0 (gpu00)")


RANK = """
import sys
from zerofit.launch.rendezvous import RankRendezvous
from zerofit.recipe.errors import EXIT, UserError, leave, reports_user_errors
ranks = RankRendezvous()
EXIT.tell = ranks.stop

@reports_user_errors
def main(argv):
    if argv[0] == "early":
        raise UserError("train_file is missing")
    ranks.start()
    ranks.wait()
    print("met")
    return 0

leave(main(sys.argv[1:]))
"""


def test_a_rank_that_fails_before_the_process_group_ends_the_other_machine():
    """The first has the store, and fails before it has imported torch."""
    port, processes = free_port(), []
    for rank, act in enumerate(("early", "meets")):
        variables = {
            **TORCHRUN,
            "RANK": str(rank),
            "MASTER_PORT": port,
            "PYTHONPATH": str(ROOT),
            RENDEZVOUS_LIMIT_VARIABLE: "30",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, act],
                env=environment(**variables),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    (_, first), (out, other) = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert out == ""
    assert first == "error: train_file is missing\n"
    (line,) = [line for line in other.splitlines() if line.startswith("error:")]
    assert "rank 0 of machine 0" in line
    assert "train_file is missing" in line


@pytest.fixture
def port(monkeypatch) -> int:
    for name, seconds in (("SILENT_S", 3.0), ("GRACE_S", 0.1), ("BEAT_S", 0.1)):
        monkeypatch.setattr(agent, name, seconds)
    monkeypatch.setattr(rendezvous, "KNOWN_S", 2.0)
    return int(free_port())


def groups(port: int, count: int = 2) -> list[MachineGroup]:
    """Launchers that have met once."""
    made = [MachineGroup("127.0.0.1", port, number, count, 5.0) for number in range(count)]
    assert {store.port for store in at_once(*(group.meet for group in made))} == {port}
    return made


def waits(group: MachineGroup) -> int:
    while not (waiting := group.num_waiting()):
        pass
    return waiting


def test_each_round_has_a_store_of_its_own_in_which_all_ranks_meet(port):
    both = groups(port)
    assert [group.num_waiting() for group in both] == [0, 0]
    assert both[1].count_failures(True) == 1
    other, (waiting, first) = at_once(both[1].meet, lambda: (waits(both[0]), both[0].meet()))
    assert waiting == 1
    assert first.port == other.port != port
    assert [group.round for group in both] == [2, 2]
    assert [group.count_failures(False) for group in both] == [1, 1]


def test_a_machine_that_has_died_is_replaced_and_one_that_lives_is_not(port):
    both = groups(port)
    assert "machine 1 takes part in this run already" in refusal(MachineGroup, "127.0.0.1", port, 1, 2, 5.0)
    assert both[0].num_waiting() == 0, "the run is not disturbed"
    both[1].stop_beats()
    new = MachineGroup("127.0.0.1", port, 1, 2, 5.0)
    assert new.round == 1
    stores = at_once(new.meet, both[0].meet)
    assert stores[0].port == stores[1].port != port


def test_a_launcher_ends_with_its_own_code_while_it_gives_signs_of_life(port):
    """Without a pause between them."""
    code = f"""
from zerofit.launch import agent
agent.BEAT_S = 0.0
group = agent.MachineGroup("127.0.0.1", {port}, 0, 1, 5.0)
raise SystemExit(85)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 85, done.stderr


def test_who_does_not_restart_tells_why_and_all_end_with_one_code(port):
    both = groups(port)
    both[1].end("rank 1 ended with exit code 2 after update 7", 2)
    end = at_once(lambda: waits(both[0]))[0]
    assert end.code == 2
    assert "machine 1" in end.report()
    assert "rank 1 ended with exit code 2" in end.report()
    assert at_once(lambda: both[0].settle(143, None), lambda: both[1].settle(2, None)) == [2, 2]


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([143, 85], 85), ([143, 1], 1), ([137, 2], 2), ([85, 137], 137)]
)
def test_the_code_of_a_run(codes, code):
    assert code_of_run(codes) == code == code_of_run(codes[::-1])


def test_the_machine_that_differs_is_named(monkeypatch):
    """A checkpoint that one rank finds damaged is left by all: launch/test_resume.py."""
    alike, other = {"data": "10 files", "seed": 1}, {"data": "9 files", "seed": 1}
    for facts, said in (([alike, alike, other], True), ([alike] * 3, False)):
        gathered = [(f"machine{rank}", each) for rank, each in enumerate(facts)]
        monkeypatch.setattr(strategy, "all_gather_objects", lambda mine, gathered=gathered: gathered)
        if said:
            assert refusal(check_same, alike, "Copy it") == (
                "error: rank 2, on machine machine2, has another data than rank 0, on machine machine0: 9 files, and "
                "there 10 files. Copy it"
            )
        else:
            check_same(alike, "Copy it")


@pytest.mark.parametrize(("kind", "shared"), [("nfs4", True), ("lustre", True), ("ext4", False), ("overlay", False)])
def test_file_systems_that_machines_share(monkeypatch, tmp_path, kind, shared):
    disks = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype=kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: disks)
    assert is_shared(tmp_path / "cache") is shared
