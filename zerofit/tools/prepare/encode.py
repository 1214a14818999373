"""Documents of the input as the bytes of their token ids: what the worker processes of `zerofit prepare` do.

Texts of records are taken as they are, as Megatron does; blank pieces of plain text are omitted. Neither torch nor
transformers is imported here, so that a worker is small and there at once.
"""

import json
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import active_children, get_context, parent_process
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import has_lone_surrogate

CODES = {"uint16": "H", "int32": "i"}  # of array.array
TOGETHER = 256  # texts that are tokenised at a time: an Encoding takes many times the memory of its ids
PARTS_AHEAD = 3  # for each worker: this bounds the memory
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_of_this_process: list["Encoder"] = []  # of a worker
Encoded = tuple[list[list[bytes]], list[str]]  # ids of the documents of each key; what is wrong with each bad record


@dataclass(frozen=True)
class RecordChunk:
    """Some records of a file, in order.

    Args:
        kind: json (objects as bytes), text (documents as bytes) or table (rows as dicts).
        records: each with the number of its first line, or its row, in the file.
    """

    file: str
    kind: str
    records: list[tuple[int, Any]]


@dataclass(frozen=True)
class Encoder:
    """Makes token ids of the parts of the input; sent to each worker.

    Args:
        tokenizer: a native one of the tokenizers library, or any other of transformers.
        special: whether special tokens within texts are split like others (split_special_tokens).
        keys: of records, in the order of the corpora.
        dtype: uint16 or int32.
        end: the id after each document that has any; None: none.
        skip_bad: bad records are left out.
    """

    tokenizer: Any
    special: bool
    keys: tuple[str, ...]
    dtype: str
    end: int | None
    skip_bad: bool

    def ids(self, texts: list[str]) -> list[bytes]:
        """The token ids of each text, as bytes of `dtype`."""
        if not isinstance(self.tokenizer, Tokenizer):
            return [self._bytes(self.tokenizer(text, verbose=False)["input_ids"]) for text in texts]
        self.tokenizer.encode_special_tokens = self.special  # which pickling forgets
        groups = (texts[start : start + TOGETHER] for start in range(0, len(texts), TOGETHER))
        return [self._bytes(row.ids) for group in groups for row in self.tokenizer.encode_batch_fast(group)]

    def _bytes(self, ids: list[int]) -> bytes:
        return array(CODES[self.dtype], ids).tobytes()

    def encode(self, part: RecordChunk) -> Encoded:
        """Cut a part into documents and encode them. The first bad record ends it, unless they are skipped."""
        columns: list[list[str]] = [[] for _ in self.keys]
        bad: list[str] = []
        for line, record in part.records:
            try:
                texts = _texts(part.kind, record, self.keys)
            except UnicodeDecodeError as error:
                line += record.count(b"\n", 0, error.start)
                bad.append(f"{part.file}, line {line}: not UTF-8: byte 0x{record[error.start]:02x}")
            except BadLine as error:
                bad.append(f"{part.file}, {'row' if part.kind == 'table' else 'line'} {line}: {error}")
            else:
                for column, text in zip(columns, texts):
                    column.append(text)
            if bad and not self.skip_bad:
                return [], bad
        end = b"" if self.end is None else self._bytes([self.end])
        return [[ids and ids + end for ids in self.ids(texts)] for texts in columns], bad


# ----------------------------------------------------------------------------------------------------------- documents


class BadLine(Exception):
    """A record that has no text under each key; the message says why."""


def _texts(kind: str, record: Any, keys: tuple[str, ...]) -> list[str]:
    """The text under each key of a record; none of a blank one. Raises BadLine or UnicodeDecodeError."""
    if kind == "table":
        return _checked(record, keys)
    text = record.decode("utf-8")
    if not text or text.isspace():
        return []
    if kind == "text":
        return [text]
    try:
        return _checked(json.loads(text), keys)
    except (ValueError, RecursionError) as error:
        hint = ". One JSON object a line is read, or one list of objects" if text.strip() == "{" else ""
        raise BadLine(f"not JSON: {error}{hint}") from None


def _checked(record: Any, keys: tuple[str, ...]) -> list[str]:
    if not isinstance(record, dict):
        raise BadLine(f'not a JSON object but a {type(record).__name__}: expected one like {{"{keys[0]}": "..."}}')
    for key in keys:
        if key not in record:
            raise BadLine(f"no key {key!r}; it has {', '.join(list(record)[:8]) or 'none'}")
        if not isinstance(record[key], str):
            what = "null" if record[key] is None else f"a {type(record[key]).__name__}"
            raise BadLine(f"{key!r} is {what}, not a text")
        if has_lone_surrogate(record[key]):
            raise BadLine(f"{key!r} has half of a surrogate pair, which is not a character")
    return [record[key] for key in keys]


# ------------------------------------------------------------------------------------------------------- the processes


class Workers:
    """Worker processes that encode parts of the input, as a context; they are killed at its end."""

    def __init__(self, count: int, encoder: Encoder):
        self.count = count
        self.pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=_begin, initargs=(encoder,))

    def __enter__(self) -> "Workers":
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one handles it
        with patch.dict(os.environ, ONE_THREAD):
            for _ in range(self.count):
                self.pool.submit(int)  # which starts it
        signal.signal(signal.SIGINT, before)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for worker in active_children():
            worker.kill()
        self.pool.shutdown(wait=error is None, cancel_futures=True)  # a signal may have come within one of its locks

    def encode(self, parts: Iterator[RecordChunk]) -> Iterator[tuple[RecordChunk, Encoded]]:
        """Yield (part, what `Encoder.encode` makes of it) in the order of the parts. Raises UserError: a worker has
        died."""
        waiting: deque[tuple[RecordChunk, Future[Encoded]]] = deque()
        while True:
            for part in islice(parts, PARTS_AHEAD * self.count - len(waiting)):
                waiting.append((part, self.pool.submit(_encode, part)))
            if not waiting:
                return
            part, future = waiting.popleft()
            try:
                yield part, future.result()
            except BrokenProcessPool:
                raise UserError("a worker was killed, perhaps for want of memory. Try fewer --workers") from None


def _begin(encoder: Encoder) -> None:
    """Begin the work of a process, which ends with its parent, also where that is killed."""

    def end_with_the_parent() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    _of_this_process.append(encoder)
    threading.Thread(target=end_with_the_parent, daemon=True).start()


def _encode(part: RecordChunk) -> Encoded:
    return _of_this_process[0].encode(part)
