"""How a rank ended, told by its watchdog process: of real processes that are killed, hang, or leave in order. And
which rank is said to be slow."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from helpers import ROOT, environment
from torch.distributed.flight_recorder import fr_trace

from zerofit.health import flight
from zerofit.health import watchdog_process as watch
from zerofit.health.out_of_memory import died_elsewhere
from zerofit.health.slow_ranks import RankSeconds, SlowRanks
from zerofit.health.watchdog_process import (
    GIB,
    MemoryReading,
    RankStatus,
    Watch,
    cgroups,
    find_cause,
    headroom,
    read_memory,
)
from zerofit.strategy.layout import ParallelLayout

PRELUDE = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from zerofit.health.watchdog import Watchdog
watchdog = Watchdog(3, {limit})
watchdog.start()
print(os.getpid(), watchdog._child.pid, flush=True)
watchdog.phase("backward", 17)
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="what is known of processes comes from /proc")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="there is no watchdog on Windows")


def run(program: str, limit: float | None = None) -> subprocess.CompletedProcess:
    """Run a rank. This returns when nobody holds its stderr any more: its watchdog is gone too, or almost."""
    program = PRELUDE.format(root=str(ROOT), limit=limit) + program
    return subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60, env=environment()
    )


def watchdog_is_gone(done: subprocess.CompletedProcess) -> bool:
    """Whether the watchdog has ended. Its stderr is closed by now, so it can be no more than a moment behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout.split()[1])).wait(5)
    return True


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("watchdog.leave(); os._exit(7)", 7),
        ("sys.exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),  # of a launcher, while nothing else listens
    ],
)
def test_who_leaves_in_order_is_not_reported(end, code):
    done = run(end)
    assert (done.returncode, done.stderr) == (code, "")
    assert watchdog_is_gone(done)


def test_a_rank_that_hangs_shows_its_stacks_and_is_ended():
    done = run("def waits_for_good():\n    time.sleep(60)\nwaits_for_good()", limit=0.4)
    assert done.returncode == -signal.SIGKILL
    assert "no sign of life for" in done.stderr
    assert "phase backward of update 17" in done.stderr
    assert "in waits_for_good" in done.stderr
    assert watchdog_is_gone(done)


@LINUX
def test_a_forked_worker_that_is_ended_writes_nowhere(tmp_path):
    """Its copy of the pipe is closed, and the number may be that of another file by then."""
    program = f"""
pipe = watchdog._pipe
child = os.fork()
if child == 0:
    os.dup2(os.open({str(tmp_path / "file")!r}, os.O_CREAT | os.O_WRONLY), pipe)
    os.kill(os.getpid(), signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
"""
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_backlog_blocks_nobody():
    program = """
os.kill(watchdog._child.pid, signal.SIGSTOP)
for update in range(200_000):
    watchdog.phase("forward", update)
os.kill(watchdog._child.pid, signal.SIGCONT)
print("through")
"""
    done = run(program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "through" in done.stdout
    assert watchdog_is_gone(done)


@LINUX
def test_a_forked_worker_does_not_hide_the_end_of_its_rank():
    """The worker stays; a watchdog that waited for it would not end either, nor would `run`."""
    program = """
reader, writer = os.pipe()
worker = os.fork()
if worker == 0:
    watchdog.phase("worker", 99)
    os.close(1), os.close(2), os.write(writer, b"1")
    signal.pause()
os.read(reader, 1)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(program)
    os.kill(int(done.stdout.split()[2]), signal.SIGKILL)
    assert "phase backward of update 17" in done.stderr


QUIET = ((0.5, None),)
ALIVE = ((0.5, "{}\n"),)
SAVES = ((0.5, '{"phase": "save", "patience": 10}\n'),)


@pytest.mark.parametrize(
    ("steps", "signals"),
    [
        (QUIET * 30, [signal.SIGUSR2, signal.SIGKILL]),
        ((QUIET * 15 + ALIVE) * 5, []),
        (SAVES + QUIET * 180, []),  # patience
        (SAVES + QUIET * 220, [signal.SIGUSR2, signal.SIGKILL]),
        (QUIET * 10 + ((3600.0, None),) + QUIET * 3, []),  # a job that was suspended
    ],
)
def test_signs_of_life_and_patience(monkeypatch, steps, signals):
    """A limit of 10 s, of a clock that runs with the steps: (seconds later, what the rank says)."""
    now, sent, left = [0.0], [], [(0.5, '{"phase": "backward", "update": 17, "patience": 1}\n'), *steps]
    reader, writer = os.pipe()

    def poll(milliseconds: float) -> list:
        if not left and not sent:
            raise EOFError  # all was seen, and nobody was ended
        seconds, message = left.pop(0) if left else (milliseconds / 1000, None)
        now[0] += seconds
        os.write(writer, (message or "").encode())
        return []

    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch.select, "poll", lambda: SimpleNamespace(poll=poll, register=lambda *_: None))
    monkeypatch.setattr(watch, "read_memory", lambda *place: MemoryReading())
    monkeypatch.setattr(watch, "send", lambda pid, number: sent.append(number))
    stdin = os.dup(0)
    os.dup2(reader, 0)  # where a watch reads its rank's messages
    try:
        Watch(os.getppid(), 3, 10.0).run()
    except EOFError:
        pass
    finally:
        os.dup2(stdin, 0)
        for each in (stdin, reader, writer):
            os.close(each)
    assert sent == signals


PLENTY = MemoryReading(2 * GIB, 20 * GIB, 32 * GIB, 5)


@pytest.mark.parametrize(
    ("status", "last", "kills", "words", "for_memory"),
    [
        (signal.SIGKILL, PLENTY, 6, "out-of-memory killer", True),
        (signal.SIGKILL, PLENTY, 5, "somebody killed it (SIGKILL)", False),
        (None, PLENTY, 5, "SIGKILL, or a crash in native code", False),
        (signal.SIGKILL, PLENTY._replace(limit=8 * GIB, left=GIB // 8), 5, "very likely because memory ran out", True),
        (signal.SIGABRT | 128, PLENTY, 5, "SIGABRT, a crash in native code", False),  # 128: a core was dumped
    ],
)
def test_the_cause_of_an_end(status, last, kills, words, for_memory):
    text, memory = find_cause(status, [last, last], last._replace(oom_kills=kills), RankStatus(1, 42))
    assert words in text
    assert memory == for_memory


def test_under_nccl_an_abort_points_to_the_other_ranks():
    alone = RankStatus(1, 42, machine="machine 0 (node0)")
    many = alone.after('{"world_size": 16, "backend": "nccl", "machines": ["machine 0 (node0)", "machine 1 (node1)"]}')
    assert "native code" in find_cause(signal.SIGABRT, [PLENTY], PLENTY, alone)[0]
    assert "machine 1 (node1)" in find_cause(signal.SIGABRT, [PLENTY], PLENTY, many)[0]
    assert "native code" in find_cause(signal.SIGSEGV, [PLENTY], PLENTY, many)[0]


def test_cgroups_of_version_2(tmp_path):
    job = tmp_path / "slurm" / "job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (job / "memory.current").write_text("100\n")
    (job / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    (job.parent / "memory.max").write_text(f"{8 * GIB}\n")
    (job.parent / "memory.current").write_text(f"{7 * GIB}\n")
    (job.parent / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file 1\n")
    groups = cgroups("0::/slurm/job\n", root=str(tmp_path))
    assert groups == [str(job), str(job.parent), str(tmp_path)]
    assert [headroom(group) for group in groups] == [None, (8 * GIB, 2 * GIB), None]
    assert read_memory(os.getpid(), groups).oom_kills == 2


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (RuntimeError("NCCL error: remote process exited or there was a network error, NCCL version 2.29"), True),
        (RuntimeError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"), True),
        (RuntimeError("NCCL error: unhandled system error: No space left on device"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_errors_that_tell_of_another_process(error, elsewhere):
    """Those of gloo, as a rank dies: launch/test_resume.py."""
    assert died_elsewhere(error) == elsewhere
    wrapped = KeyError("in a library")
    wrapped.__context__ = error
    assert died_elsewhere(wrapped) == elsewhere


HANGING = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
import torch
import torch.distributed as d
from zerofit.health.watchdog import Watchdog

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
d.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + str(folder / "meeting"))
pair = d.new_group([0, 1], group_desc="pair")
d.all_reduce(torch.ones(3))
d.all_reduce(torch.ones(5), group=pair)
watchdog = Watchdog(rank, 5.0)  # started once the ranks have met: on a busy machine that takes seconds
watchdog.start()
watchdog.record_collectives(folder, 2, "gloo", ["machine 0 (a)", "machine 1 (b)"])
watchdog.phase("backward", 17)
if rank == 0:
    d.all_reduce(torch.ones(7), group=pair)
time.sleep(60)
"""


def test_a_hang_is_told_with_the_collective_and_the_ranks_that_did_not_come(tmp_path, capsys, caplog):
    (tmp_path / "files.json").write_text("{}")
    program = HANGING.format(root=str(ROOT))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(tmp_path)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    expected = (
        "gloo:all_reduce of [[7]], number 2 in group pair: rank 0 on machine 0 (a) waits, rank 1 on "
        "machine 1 (b) has not come to it"
    )
    assert any(expected in text for text in said), said
    if torch.__version__ < "2.13":
        pytest.skip("torch's own reader refuses the records of gloo before 2.13")
    fr_trace.main([str(tmp_path / "flight"), "-p", "rank_"])
    assert "missing ranks: {1}" in capsys.readouterr().out + caplog.text, "torch reads it as well: docs/trouble.md"


def of_nccl(*states: str) -> list[dict]:
    """Entries as FlightRecorderDetail.hpp (torch 2.13, version 2.10) writes them."""
    return [
        {"record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number + 1,
         "p2p_seq_id": 0, "op_id": number + 1, "profiling_name": "nccl:_reduce_scatter_base", "input_sizes": [[16]],
         "state": state, "retired": state != "started", "is_p2p": False}
        for number, state in enumerate(states)
    ]  # fmt: skip


def test_records_of_nccl_are_read(tmp_path):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    states = {0: ("completed", "started"), 1: ("completed", "scheduled"), 2: ("completed",)}  # 1 was given up
    for rank, of_rank in states.items():
        record = {"version": "2.10", "pg_config": config, "entries": of_nccl(*of_rank)}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(record))
    (tmp_path / "rank_3").write_bytes(pickle.dumps(subprocess.run))
    (line,) = flight.describe_waits(flight.read_flight_records(str(tmp_path)))
    assert line == (
        "nccl:_reduce_scatter_base of [[16]], number 2 in group default_pg: rank 0, 1 waits, rank 2 has "
        "not come to it, rank 3 has left no record"
    ), "a record runs no code"
    assert flight.read_flight_records(str(tmp_path), since=time.time() + 60) == {}, "of a launch before"
    assert flight.describe_waits({2: {"pg_config": config, "entries": of_nccl("completed")}}) == []


def seconds(data: float = 0.01, own: float = 0.5, positions: float = 512, total: float = 1.0) -> RankSeconds:
    return RankSeconds(total, data, own / 3, 2 * own / 3, total - data - own, own, positions)


def said(layout: ParallelLayout, updates: list[list[RankSeconds]]) -> list[str]:
    slow = SlowRanks(layout, 1, lambda rank: f"machine {rank // 2} (node), GPU {rank % 2}", "forward")
    for update, ranks in enumerate(updates, 1):
        slow.add(update, ranks)
    return slow.messages()


def test_a_slow_rank_is_told_once_and_once_more_when_it_is_no_longer():
    place = "slow      rank 3 on machine 1 (node), GPU 1: since update"
    healthy, late = [seconds()] * 4, [seconds()] * 3 + [seconds(own=0.7)]
    updates = [healthy] * 20 + [late] * 100 + [healthy] * 50 + [late] * 20  # the last do not suffice
    first, second = said(ParallelLayout(4), updates)
    assert first == (
        f"{place} 20 computing (forward) takes 1.40 times as long as on other ranks, which wait 0.2 s an update for it"
    )
    assert second == f"{place} 120 computing (forward) is as fast as on other ranks"
    assert said(ParallelLayout(4), [healthy] * 20 + [late] * 29) == []


def test_a_rank_that_waits_for_its_data():
    updates = [[seconds(data=0.3), *[seconds()] * 7]] * 40
    (line,) = said(ParallelLayout(8), updates)
    assert "rank 0 on machine 0" in line
    assert "an update waits 0.3 s for its data, 0.01 s on other ranks" in line
    assert said(ParallelLayout(8), [[seconds(data=0.1), *[seconds()] * 7]] * 40) == [], "a tenth of the update"


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_other_lengths_are_no_slowness(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(6, 0.6, (400, 8))
    updates = [[seconds(own=each / 1000, positions=each) for each in row] for row in lengths]
    assert said(ParallelLayout(8), updates) == []


def test_stages_of_a_pipeline_do_other_work():
    layout = ParallelLayout(4, pipeline=2)
    assert said(layout, [[seconds(), seconds(), seconds(own=0.9), seconds(own=0.9)]] * 40) == []
    (line,) = said(layout, [[seconds(), seconds(own=0.8), seconds(own=0.9), seconds(own=0.9)]] * 40)
    assert "rank 1 on" in line
