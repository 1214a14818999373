"""Ranks that are forked from a process which has imported the libraries and zerofit.

Imports take most of the time of a rank that trains a tiny model for some updates. What torchrun would start is started
here: the same program, in processes of its own, with torchrun's variables and --strategy. What the launchers do
themselves is tested where `launched` of helpers.py is told to launch for real.
"""

import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

LIBRARIES = (
    "torch._dynamo", "torch.nn.parallel", "accelerate", "deepspeed", "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer", "transformers.modeling_utils", "peft", "datasets", "evaluate",
    "matplotlib.figure", "matplotlib.backends.backend_agg",
)  # fmt: skip
SCRIPTS = Path(__file__).resolve().parents[1] / "train"  # whose modules of zerofit are imported, too
LEFT_TO_END_S = 30.0  # for the other ranks, when one has failed


class RankServer:
    """The process from which ranks are forked, and the way to ask it."""

    def __init__(self, environment: dict[str, str]):
        # The first two as zerofit.strategy.launch sets them before it imports anything.
        variables = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "DS_ACCELERATOR": "cpu",
            **environment,
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def run(
        self, words: list[str], ranks: list[dict[str, str]], cwd: Path, timeout: float
    ) -> subprocess.CompletedProcess:
        """Run a program in as many processes as there are environments.

        Args:
            words: the program and its arguments.
            ranks: the environment of each rank.
            timeout: in seconds; after them all are killed.

        Returns: what came of it; its `group_timeouts` are those of all process groups that the ranks have made.
        """
        with tempfile.TemporaryDirectory() as logs:
            request = {"words": words, "ranks": ranks, "cwd": str(cwd), "logs": logs, "timeout": timeout}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            codes = json.loads(self._server.stdout.readline())
            out, err, groups = (
                "\n".join(file.read_text(errors="replace") for file in sorted(Path(logs).glob(f"*.{name}")))
                for name in ("out", "err", "groups")
            )
        done = subprocess.CompletedProcess(words, next(filter(None, codes), 0), out, err)
        done.group_timeouts = [float(seconds) for seconds in groups.split()]
        return done


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def rank_environments(environment: dict[str, str], processes: int | None, machines: int = 1) -> list[dict[str, str]]:
    """The environment and what torchrun adds to it on so many machines, for each rank; None: as without a launcher."""
    if processes is None:
        return [environment]
    local = processes // machines
    world = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    return [{**environment, **world, "RANK": str(rank), "LOCAL_RANK": str(rank % local)} for rank in range(processes)]


def serve() -> None:
    """Answer requests until there are no more: a launcher is forked for each, and it forks the ranks."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    modules = re.findall(r"from (zerofit[\w.]+) import", "".join(map(Path.read_text, SCRIPTS.glob("*.py"))))
    for name in (*LIBRARIES, *sorted({*modules})):
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    for line in sys.stdin:
        reading, writing = os.pipe()
        if not (launcher := os.fork()):
            with os.fdopen(writing, "w") as pipe:
                json.dump(fork_ranks(json.loads(line)), pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            codes = pipe.read()
        os.waitpid(launcher, 0)
        print(codes, file=answers, flush=True)


def fork_ranks(request: dict, prepare: Callable[[int], None] = lambda rank: None) -> list[int]:
    """Fork ranks and wait for their end: their exit codes. `request`: as RankServer.run writes it. `prepare`: called
    in each rank before the program."""
    running, parent = {}, os.getppid()
    for rank, environment in enumerate(request["ranks"]):
        if not (pid := os.fork()):
            _become_rank(request, rank, environment, prepare)
        running[pid] = rank
    codes, deadline = [-signal.SIGKILL] * len(running), time.monotonic() + request["timeout"]
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            codes[running.pop(pid)] = code
            if code:
                deadline = min(deadline, time.monotonic() + LEFT_TO_END_S)
            if code == 2:  # as torchrun does
                for other in running:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > deadline or os.getppid() != parent:  # the server has been killed
            for pid in running:
                os.killpg(pid, signal.SIGKILL)
        else:
            time.sleep(0.02)
    return codes


def _record_groups(file: Path) -> None:
    """Write down the timeout of every process group that this rank makes, in seconds."""
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_process_group_helper

    def recorded(*args, timeout, **kwargs):
        with file.open("a") as lines:
            print(timeout.total_seconds(), file=lines)
        return make(*args, timeout=timeout, **kwargs)

    distributed_c10d._new_process_group_helper = recorded


def _become_rank(request: dict, rank: int, environment: dict[str, str], prepare: Callable[[int], None]) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{request['logs']}/rank{rank}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        _record_groups(Path(request["logs"], f"rank{rank}.groups"))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(request["cwd"])
        sys.argv = request["words"]
        sys.path[:1] = [str(Path(sys.argv[0]).parent), *filter(None, environment.get("PYTHONPATH", "").split(":"))]
        prepare(rank)
        runpy.run_path(request["words"][0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
