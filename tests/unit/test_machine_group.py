"""Launchers that meet, restart and agree on a code: as threads, each with its own connection to a real store."""

import socket

import pytest
from helpers import at_once, refusal

from zerofit.launch import machine_group, rendezvous
from zerofit.launch.machine_group import MachineGroup
from zerofit.launch.restart_rule import code_of_run


@pytest.fixture
def port(monkeypatch) -> int:
    for name, seconds in (("SILENT_S", 3.0), ("GRACE_S", 0.1), ("BEAT_S", 0.1)):
        monkeypatch.setattr(machine_group, name, seconds)
    monkeypatch.setattr(rendezvous, "KNOWN_S", 2.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def groups(port: int, count: int = 2) -> list[MachineGroup]:
    first = MachineGroup("127.0.0.1", port, 0, count, 5.0)
    return [first, *(MachineGroup("127.0.0.1", port, number, count, 5.0) for number in range(1, count))]


def waits(group: MachineGroup) -> int:
    while not (waiting := group.num_waiting()):
        pass
    return waiting


def dies(group: MachineGroup) -> None:
    group._beat_ends.set()
    group._beats.join()


def test_each_round_has_a_store_of_its_own_in_which_all_ranks_meet(port):
    both = groups(port)
    first = at_once(*(group.meet for group in both))
    assert {store.port for store in first} == {port}
    assert [group.num_waiting() for group in both] == [0, 0]
    assert both[1].failures(True) == 1
    _, waiting = at_once(both[1].meet, lambda: (waits(both[0]), both[0].meet())[0])
    assert waiting == 1
    assert [group.round for group in both] == [2, 2]
    assert [group.failures() for group in both] == [1, 1]


def test_a_machine_that_has_died_is_replaced_and_one_that_lives_is_not(port):
    both = groups(port)
    at_once(*(group.meet for group in both))
    words = refusal(MachineGroup, "127.0.0.1", port, 1, 2, 5.0)
    assert "machine 1 takes part in this run already" in words
    assert both[0].num_waiting() == 0, "the run is not disturbed"
    dies(both[1])
    new = MachineGroup("127.0.0.1", port, 1, 2, 5.0)
    assert new.round == 1
    stores = at_once(new.meet, both[0].meet)
    assert stores[0].port == stores[1].port != port


def test_who_does_not_restart_tells_why_and_all_end_with_one_code(port):
    both = groups(port)
    at_once(*(group.meet for group in both))
    both[1].end("rank 1 ended with exit code 2 after update 7", 2)
    end = at_once(lambda: waits(both[0]))[0]
    assert end.code == 2
    assert "machine 1" in end.report()
    assert "rank 1 ended with exit code 2" in end.report()
    assert at_once(lambda: both[0].settle(143, None), lambda: both[1].settle(2, None)) == [2, 2]


def test_a_machine_that_is_gone_is_not_waited_for_at_the_end(port):
    three = groups(port, 3)
    at_once(*(group.meet for group in three))
    dies(three[2])
    assert at_once(lambda: three[0].settle(1, None), lambda: three[1].settle(85, None)) == [1, 1]


def test_what_the_run_has_recorded_counts(port):
    both = groups(port)
    at_once(*(group.meet for group in both))
    assert at_once(lambda: both[0].settle(143, 86), lambda: both[1].settle(1, 2)) == [86, 86]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([143, 85], 85),
        ([143, 1], 1),
        ([137, 2], 2),
        ([85, 137], 137),
    ],
)
def test_the_code_of_a_run(codes, code):
    assert code_of_run(codes) == code == code_of_run(codes[::-1])
