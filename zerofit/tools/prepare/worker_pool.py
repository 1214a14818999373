"""The worker processes of `zerofit prepare`: they get parts of the input, and their answers come in its order.

A thread waits for each worker. concurrent.futures' process pool would not do: where a worker dies while it is sent a
part, Python 3.11 waits forever.
"""

import os
import queue
import signal
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from unittest.mock import patch

from zerofit.recipe.errors import UserError
from zerofit.tools.prepare.cutting import Answer, work
from zerofit.tools.prepare.encode import InputPart, Mismatch, Setup, encoder_of

PARTS_AHEAD = 3  # for each worker, parts sent and answers that wait for an earlier one: this bounds the memory
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def serve(connection: Connection, setup: Setup) -> None:
    """Answer parts of the input, in a worker process, until the other end is closed, also by a killed parent."""
    encoder = encoder_of(setup)
    connection.send(None)  # ready
    try:
        while True:
            part = connection.recv()
            try:
                answer = work(encoder, setup, part)
            except Mismatch as error:
                answer = error
            except Exception:
                answer = RuntimeError(traceback.format_exc())
            connection.send(answer)
    except (EOFError, OSError):
        return


class Worker:
    """A worker process, and the connection to it."""

    def __init__(self, setup: Setup):
        context = get_context("spawn")
        self.connection, end = context.Pipe()
        self.process = context.Process(target=serve, args=(end, setup), daemon=True)
        self.process.start()
        end.close()

    def receive(self) -> Answer | Exception | None:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(timeout=10)
            raise UserError(
                f"a worker ended with exit code {self.process.exitcode}, usually because memory ran out; no corpus "
                "was written. Try fewer --workers"
            ) from None

    def answer(self, part: InputPart) -> Answer | Exception | None:
        with suppress(OSError):  # it has died: `receive` says so
            self.connection.send(part)
        return self.receive()


class WorkerPool:
    """Workers, as a context; they are killed at its end."""

    def __init__(self, workers: int, setup: Setup):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one handles it
        with patch.dict(os.environ, ONE_THREAD):
            self.workers = [Worker(setup) for _ in range(workers)]
        signal.signal(signal.SIGINT, before)
        self.threads = ThreadPoolExecutor(workers)
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.process.kill()
        self.threads.shutdown(cancel_futures=True)

    def start(self) -> None:
        """Wait until all workers are ready."""
        for worker in self.workers:
            worker.receive()
            self.idle.put(worker)

    def work(self, parts: Iterator[tuple[InputPart, int]]) -> Iterator[tuple[InputPart, int, Answer]]:
        """(part, bytes read, answer) in the order of the parts, given (part, bytes read).

        Raises:
            UserError: a worker has died, or the word memo and the tokenizer disagree.
            RuntimeError: an error in a worker, with its traceback.
        """
        waiting: deque = deque()
        while True:
            for part, read in islice(parts, PARTS_AHEAD * len(self.workers) - len(waiting)):
                waiting.append((part, read, self.threads.submit(self._answer, part)))
            if not waiting:
                return
            part, read, future = waiting.popleft()
            answer = future.result()
            if isinstance(answer, Mismatch):
                raise UserError(
                    f"{part.file}: the word memo and the tokenizer have different ids for a document that begins "
                    f"with {str(answer)[:60]!r}. Say --word_memo false, and please report the tokenizer"
                )
            if isinstance(answer, Exception):
                raise answer
            yield part, read, answer

    def _answer(self, part: InputPart) -> Answer | Exception | None:
        worker = self.idle.get()
        try:
            return worker.answer(part)
        finally:
            self.idle.put(worker)
