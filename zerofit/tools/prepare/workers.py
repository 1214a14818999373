"""The workers of `zerofit prepare`: each gets parts of the input, cuts them into documents and encodes these.

A document is the text under a key of a record, or a piece of a plain text. Documents of records are taken as they are,
as Megatron does; blank pieces of plain text are omitted. Answers come in the order of the input.

A thread waits for each worker: where a worker of concurrent.futures' process pool dies while it is sent a part, Python
3.11 waits forever.
"""

import json
import os
import queue
import signal
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import numpy as np

from zerofit.recipe.errors import UserError
from zerofit.tools.prepare.encode import InputPart, Mismatch, Setup, encoder_of

SHOWN = 10  # bad lines of a task that are described
PARTS_AHEAD = 3  # for each worker, parts sent and answers that wait for an earlier one: this bounds the memory
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass
class CorpusPiece:
    """A piece of one corpus: the bytes of the ids, (documents,) int32 lengths, and the largest id."""

    ids: bytes
    lengths: bytes
    largest: int


@dataclass
class Answer:
    """A CorpusPiece for each key, the number of bad lines, and messages for the first of them."""

    pieces: list[CorpusPiece]
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)


def work(encoder, setup: Setup, task: InputPart) -> Answer:
    """Cut a part of the input into documents and encode them. The first bad line ends it, unless they are skipped."""
    answer = Answer([])
    columns = _columns(task, setup, answer)
    if answer.num_bad and not setup.skip_bad:
        return answer
    end = b"" if setup.end is None else np.array(setup.end, setup.dtype).tobytes()
    answer.pieces = [_piece(encoder.encode(texts), end, np.dtype(setup.dtype)) for texts in columns]
    return answer


def _piece(rows: list[bytes], end: bytes, dtype: np.dtype) -> CorpusPiece:
    if end:
        rows = [row + end if row else row for row in rows]
    ids = b"".join(rows)
    lengths = array("i", [len(row) // dtype.itemsize for row in rows]).tobytes()
    return CorpusPiece(ids, lengths, int(np.frombuffer(ids, dtype).max()) if ids else -1)


def _columns(task: InputPart, setup: Setup, answer: Answer) -> list[list[str]]:
    """The texts of each key, without lines that are bad for any key."""
    if task.kind == "json":
        return _of_records(task.data.split(b"\n"), _texts_of_line, task, setup, answer)
    if task.kind == "rows":
        return _of_records(task.data, _texts_of_record, task, setup, answer)
    return [_of_text(task, setup, answer)]


class _BadLine(Exception):
    """A line is bad; the message says why."""


def _note(answer: Answer, task: InputPart, what: str, line: int) -> None:
    answer.num_bad += 1
    if len(answer.bad) < SHOWN:
        answer.bad.append(f"{task.file}, {'row' if task.kind == 'rows' else 'line'} {line}: {what}")


def _of_records(
    records: Iterable[Any], read: Callable, task: InputPart, setup: Setup, answer: Answer
) -> list[list[str]]:
    """The texts of each key, read record by record; bad records are noted."""
    columns: list[list[str]] = [[] for _ in setup.keys]
    for number, record in enumerate(records, task.line):
        try:
            texts = read(record, setup.keys)
        except _BadLine as bad:
            _note(answer, task, str(bad), number)
            if not setup.skip_bad:
                break
            continue
        for column, text in zip(columns, texts):
            column.append(text)
    return columns


def _texts_of_line(line: bytes, keys: tuple[str, ...]) -> list[str]:
    """The texts under the keys of a JSON object; none of a blank line."""
    if not line or line.isspace():
        return []
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8: byte 0x{line[error.start]:02x}, {error.start} bytes into the line") from None
    except (ValueError, RecursionError) as error:
        hint = ". One JSON object a line is read, or one list of objects" if line.strip() == b"{" else ""
        raise _BadLine(f"not JSON: {error}{hint}") from None
    texts = _texts_of_record(record, keys)
    if b"\\u" in line:
        for key, text in zip(keys, texts):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _BadLine(f"{key!r} has half of a surrogate pair, which is not a character") from None
    return texts


def _texts_of_record(record: Any, keys: tuple[str, ...]) -> list[str]:
    if not isinstance(record, dict):
        raise _BadLine(f'not a JSON object but a {type(record).__name__}: expected one like {{"{keys[0]}": "..."}}')
    for key in keys:
        if key not in record:
            raise _BadLine(f"no key {key!r}; it has {', '.join(list(record)[:8]) or 'none'}")
        if not isinstance(record[key], str):
            what = "null" if record[key] is None else f"a {type(record[key]).__name__}"
            raise _BadLine(f"{key!r} is {what}, not a text")
    return [record[key] for key in keys]


def _of_text(task: InputPart, setup: Setup, answer: Answer) -> list[str]:
    """The documents of a plain text. Line breaks of any system become newlines, as in training."""
    try:
        texts = cut_text(task.data.decode("utf-8"), task.kind, task.mark)
    except UnicodeDecodeError:
        texts, line = [], task.line
        between = {"line": b"\n", "paragraph": b"\n\n", "mark": task.mark.encode()}.get(task.kind)
        for piece in task.data.split(between) if between else [task.data]:
            try:
                texts += cut_text(piece.decode("utf-8"), task.kind, task.mark)
            except UnicodeDecodeError as error:
                where = line + piece.count(b"\n", 0, error.start)
                _note(answer, task, f"not UTF-8: byte 0x{piece[error.start]:02x}", where)
            line += piece.count(b"\n") + (between or b"").count(b"\n")
    return texts


def cut_text(text: str, unit: str, mark: str) -> list[str]:
    """The documents of a text, without blank ones; those cut at paragraphs and marks have no newlines around them."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if unit == "file":
        pieces = [text]
    elif unit == "line":
        pieces = text.split("\n")
    else:
        pieces = [piece.strip("\n") for piece in text.split("\n\n" if unit == "paragraph" else mark)]
    return [piece for piece in pieces if piece and not piece.isspace()]


# ------------------------------------------------------------------------------------------------------- the processes


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
            raise UserError(f"a worker ended with exit code {self.process.exitcode}. Try fewer --workers") from None

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
                raise UserError(f"{part.file}: wrong ids for {str(answer)[:60]!r}. Say --word_memo false")
            if isinstance(answer, Exception):
                raise answer
            yield part, read, answer

    def _answer(self, part: InputPart) -> Answer | Exception | None:
        worker = self.idle.get()
        try:
            return worker.answer(part)
        finally:
            self.idle.put(worker)
