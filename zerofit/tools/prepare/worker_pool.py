"""The worker processes of `zerofit prepare`: they get tasks, and their answers come in the order of the tasks.

concurrent.futures.ProcessPoolExecutor would not do (Python 3.11): its workers outlive a killed parent, its shutdown
waits for the queued tasks, and it does not say how a worker died.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import zerofit
from zerofit.recipe.errors import UserError
from zerofit.tools.prepare.encode import Mismatch, Setup

TASKS_OF_A_WORKER = 2  # one in work, and the next, so that no worker waits
TASKS_AHEAD = 3  # for each worker, tasks sent and answers that wait for an earlier one: this bounds the memory
START = "import sys; sys.path[:] = {path!r}; from zerofit.tools.prepare.worker import serve; serve({descriptor})"


class Worker:
    """A worker process at one end of a socket. It ends when the other end is closed, also by a killed parent."""

    def __init__(self, setup: Setup):
        self.tasks: deque[int] = deque()  # numbers of the tasks that it has, in the order in which they were sent
        self.connection, end = Pipe()
        code = START.format(path=[str(Path(zerofit.__file__).parents[1]), *sys.path], descriptor=end.fileno())
        quiet = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[end.fileno()],
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
        )
        end.close()
        self.setup = setup

    def start(self) -> None:
        self._send(self.setup)

    def send_task(self, number: int, task: Any) -> None:
        self.tasks.append(number)
        self._send(task)

    def receive_answer(self) -> tuple[int, Any]:
        """(number, answer) of its oldest task."""
        answer = self.receive()
        return self.tasks.popleft(), answer

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None

    def _send(self, what: Any) -> None:
        try:
            self.connection.send(what)
        except OSError:
            raise self._death() from None

    def _death(self) -> UserError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        code = self.process.returncode
        how = "closed its connection" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        remedy = " The system does that when memory runs out: try fewer --workers" if code == -signal.SIGKILL else ""
        return UserError(f"a worker (process {self.process.pid}) {how}, and no corpus was written.{remedy}")


class WorkerPool:
    """Workers, as a context; they are killed at its end."""

    def __init__(self, workers: int, setup: Setup):
        before = signal.getsignal(signal.SIGINT)
        in_main = _in_main_thread()
        if in_main:
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # Ctrl-C reaches all processes, and only the parent handles it
        try:
            self.workers = [Worker(setup) for _ in range(workers)]
        finally:
            if in_main:
                signal.signal(signal.SIGINT, before)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self.workers:
            worker.process.wait()

    def start(self) -> None:
        """Send the set-up to all workers, and wait until they are ready."""
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            answer = worker.receive()
            if isinstance(answer, Exception):
                raise answer

    def work(self, tasks: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any, Any]]:
        """(task, its note, answer) in the order of the tasks.

        Args:
            tasks: (task, note) each; the note stays in this process.

        Raises:
            UserError: a worker has died, or the word memo and the tokenizer disagree.
            RuntimeError: an error in a worker, with its traceback.
        """
        source, out, back = enumerate(tasks), deque(), {}
        more = True
        while more or out:
            while more and len(out) < TASKS_AHEAD * len(self.workers):
                worker = min(self.workers, key=lambda one: len(one.tasks))
                if len(worker.tasks) >= TASKS_OF_A_WORKER:
                    break
                number, (task, note) = next(source, (None, (None, None)))
                more = number is not None
                if more:
                    worker.send_task(number, task)
                    out.append((number, task, note))
            while out and out[0][0] in back:
                number, task, note = out.popleft()
                yield task, note, _checked(back.pop(number), task)
            if out and out[0][0] not in back:
                busy = {worker.connection: worker for worker in self.workers if worker.tasks}
                for connection in wait(list(busy)):
                    number, answer = busy[connection].receive_answer()
                    back[number] = answer


def _checked(answer: Any, task: Any) -> Any:
    if isinstance(answer, Mismatch):
        raise UserError(
            f"{task.file}: the word memo and the tokenizer have different ids for a document that begins with "
            f"{str(answer)[:60]!r}. Nothing was written. Say --word_memo false, and please report the tokenizer"
        )
    if isinstance(answer, Exception):
        raise answer
    return answer


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
