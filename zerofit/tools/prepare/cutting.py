"""From a part of the input to documents, and from documents to pieces of the corpora: the work of a worker.

A document is the text under a key of a JSON line, or a piece of a plain text. JSON documents are taken as they are, as
Megatron does; blank pieces of plain text are omitted.
"""

import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zerofit.tools.prepare.encode import InputPart, Setup

SHOWN = 10  # bad lines of a task that are described


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


@dataclass(frozen=True)
class Missing:
    """Stands for the text under a key that a record lacks; `what` is the message."""

    what: str


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
        return _of_records(zip(*task.data), _texts_of_row, task, setup, answer)
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
    if not isinstance(record, dict):
        raise _BadLine(f'not a JSON object but a {type(record).__name__}: expected one like {{"{keys[0]}": "..."}}')
    for key in keys:
        if key not in record:
            raise _BadLine(no_key(key, record).what)
        _check_text(record[key], key)
    texts = [record[key] for key in keys]
    if b"\\u" in line:
        for key, text in zip(keys, texts):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _BadLine(f"{key!r} has half of a surrogate pair, which is not a character") from None
    return texts


def no_key(key: str, record: dict) -> Missing:
    return Missing(f"no key {key!r}; it has {', '.join(list(record)[:8]) or 'none'}")


def _check_text(value: Any, key: str) -> None:
    if isinstance(value, Missing):
        raise _BadLine(value.what)
    if not isinstance(value, str):
        raise _BadLine(f"{key!r} is {'null' if value is None else 'a ' + type(value).__name__}, not a text")


def _texts_of_row(row: tuple[Any, ...], keys: tuple[str, ...]) -> tuple[str, ...]:
    for key, text in zip(keys, row):
        _check_text(text, key)
    return row


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
