"""The worker processes of `zerofit prepare`, which encode documents to the bytes of their token ids.

Texts of records are not changed, as in Megatron; blank pieces of plain text are omitted. Neither torch nor
transformers is imported here, so that a worker is small and starts quickly.
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

ARRAY_CODES = {"uint16": "H", "int32": "i"}  # {dtype: type code of array.array}
TEXTS_PER_BATCH = 256  # that are tokenised at a time: an Encoding takes many times the memory of its ids
CHUNKS_PER_WORKER = 3  # that are read ahead; this limits the memory
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_worker_encoders: list["Encoder"] = []  # the encoder of this worker process
Encoded = tuple[list[list[bytes]], list[str]]  # (the documents' ids for each key, the problems of bad records)


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
    """The encoder of chunks to token ids, which is sent to each worker.

    Args:
        tokenizer: one of the tokenizers library, or any other of transformers.
        special: True if special tokens within texts are split like other text (split_special_tokens).
        keys: the keys of records whose texts are encoded, in the order of the corpora.
        dtype: uint16 or int32, the type of the ids.
        end: the id that is appended to each document that is not empty; None: no id.
        skip_bad: bad records are omitted.
    """

    tokenizer: Any
    special: bool
    keys: tuple[str, ...]
    dtype: str
    end: int | None
    skip_bad: bool

    def ids(self, texts: list[str]) -> list[bytes]:
        """Return the token ids of each text, as bytes of `dtype`."""
        if not isinstance(self.tokenizer, Tokenizer):
            return [self._bytes(self.tokenizer(text, verbose=False)["input_ids"]) for text in texts]
        self.tokenizer.encode_special_tokens = self.special  # which pickling forgets
        groups = (texts[start : start + TEXTS_PER_BATCH] for start in range(0, len(texts), TEXTS_PER_BATCH))
        return [self._bytes(row.ids) for group in groups for row in self.tokenizer.encode_batch_fast(group)]

    def _bytes(self, ids: list[int]) -> bytes:
        return array(ARRAY_CODES[self.dtype], ids).tobytes()

    def encode(self, chunk: RecordChunk) -> Encoded:
        """Cut a chunk into documents and encode them. The first bad record ends it, unless they are skipped."""
        columns: list[list[str]] = [[] for _ in self.keys]
        bad: list[str] = []
        for line, record in chunk.records:
            try:
                texts = _read_texts(chunk.kind, record, self.keys)
            except UnicodeDecodeError as error:
                line += record.count(b"\n", 0, error.start)
                bad.append(f"{chunk.file}, line {line}: not UTF-8: byte 0x{record[error.start]:02x}")
            except BadLine as error:
                bad.append(f"{chunk.file}, {'row' if chunk.kind == 'table' else 'line'} {line}: {error}")
            else:
                for column, text in zip(columns, texts):
                    column.append(text)
            if bad and not self.skip_bad:
                return [], bad
        end = b"" if self.end is None else self._bytes([self.end])
        return [[ids and ids + end for ids in self.ids(texts)] for texts in columns], bad


class BadLine(Exception):
    """The error of a record that lacks a text under one of the keys; the message says why."""


def _read_texts(kind: str, record: Any, keys: tuple[str, ...]) -> list[str]:
    """Return the text under each key of a record; an empty list for a blank line. Raises BadLine or
    UnicodeDecodeError."""
    if kind == "table":
        return _text_values(record, keys)
    text = record.decode("utf-8")
    if not text or text.isspace():
        return []
    if kind == "text":
        return [text]
    try:
        return _text_values(json.loads(text), keys)
    except (ValueError, RecursionError) as error:
        hint = ". One JSON object a line is read, or one list of objects" if text.strip() == "{" else ""
        raise BadLine(f"not JSON: {error}{hint}") from None


def _text_values(record: Any, keys: tuple[str, ...]) -> list[str]:
    if not isinstance(record, dict):
        raise BadLine(f'not a JSON object but a {type(record).__name__}: expected one like {{"{keys[0]}": "..."}}')
    for key in keys:
        if key not in record:
            raise BadLine(f"no key {key!r}; it has {', '.join(list(record)[:8]) or 'none'}")
        if not isinstance(record[key], str):
            kind = "null" if record[key] is None else f"a {type(record[key]).__name__}"
            raise BadLine(f"{key!r} is {kind}, not a text")
        if has_lone_surrogate(record[key]):
            raise BadLine(f"{key!r} has half of a surrogate pair, which is not a character")
    return [record[key] for key in keys]


class Workers:
    """The worker processes that encode chunks, as a context manager; they are killed at its end."""

    def __init__(self, count: int, encoder: Encoder):
        self.count = count
        self.pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=_start_worker, initargs=(encoder,))

    def __enter__(self) -> "Workers":
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; this one handles it
        with patch.dict(os.environ, ONE_THREAD):
            for _ in range(self.count):
                self.pool.submit(int)  # starts a worker
        signal.signal(signal.SIGINT, before)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for worker in active_children():
            worker.kill()
        self.pool.shutdown(wait=error is None, cancel_futures=True)  # a signal may have come within one of its locks

    def encode(self, chunks: Iterator[RecordChunk]) -> Iterator[tuple[RecordChunk, Encoded]]:
        """Yield (chunk, the result of `Encoder.encode`) in the order of the chunks. Raises UserError: a worker was
        killed."""
        waiting: deque[tuple[RecordChunk, Future[Encoded]]] = deque()
        while True:
            for chunk in islice(chunks, CHUNKS_PER_WORKER * self.count - len(waiting)):
                waiting.append((chunk, self.pool.submit(_encode_in_worker, chunk)))
            if not waiting:
                return
            chunk, future = waiting.popleft()
            try:
                yield chunk, future.result()
            except BrokenProcessPool:
                raise UserError("a worker was killed, perhaps because memory ran out. Try fewer --workers") from None


def _start_worker(encoder: Encoder) -> None:
    """Initialize a worker process. It ends with its parent, even if the parent is killed."""

    def end_with_the_parent() -> None:
        if parent := parent_process():
            parent.join()
        os._exit(1)

    _worker_encoders.append(encoder)
    threading.Thread(target=end_with_the_parent, daemon=True).start()


def _encode_in_worker(chunk: RecordChunk) -> Encoded:
    return _worker_encoders[0].encode(chunk)
