"""Read the input of `zerofit prepare`: which files, in which order, and their records in parts of about a megabyte.

JSON lines and plain text are read a block at a time; tables, and files that are one JSON list, as training reads
them (zerofit/data/sources.py).
"""

import glob
import io
import os
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from zerofit.data.delimited_files import as_utf8, encoding_of_mark
from zerofit.data.megatron import INDICES
from zerofit.data.options import DataOptions
from zerofit.data.records import records_of
from zerofit.data.sources import FORMATS, read_source
from zerofit.data.tables import one_process_at_a_time
from zerofit.model.tokenizer import END_OF_TEXT
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import DAMAGED, PACKED, ending_of, open_bytes, unpacked
from zerofit.recipe.paths import find_files
from zerofit.tools.prepare.corpus_writer import PARTIAL
from zerofit.tools.prepare.encode import RecordChunk

PART = 1 << 20  # bytes or characters; a longer record is a part by itself
KINDS = {ending: kind for ending, kind in FORMATS.items() if kind != "conll"}
ROWS = 256  # of a table, read at a time
UNITS = {"line": b"\n", "paragraph": b"\n\n", "file": None}  # of plain text, and what stands between two


def find_input(inputs: list[str]) -> dict[Path, str]:
    """{file: its kind, a value of FORMATS} of these paths, folders and globs, in the order of `inputs` and sorted
    within a folder or a glob, where hidden files, empty files and corpora are skipped. Raises UserError: a name
    without a file, an empty file, a file of an unknown kind."""
    files: dict[Path, str] = {}
    for name in map(os.path.expanduser, inputs):
        for path in find_files("input", [f"{glob.escape(name)}/**/*" if os.path.isdir(name) else name]):
            # a corpus, or what a killed job has left of one, may lie among the texts
            unfinished = path.with_suffix(f".idx{PARTIAL}").exists()
            is_corpus = path.suffix in (".bin", ".idx", ".json") and (unfinished or path.with_suffix(".idx").exists())
            is_named = str(path) == os.path.abspath(name)
            is_skipped = is_corpus or path.suffix == PARTIAL or INDICES in path.parts
            if path in files or (is_skipped and not is_named):
                continue
            kind = KINDS.get(ending_of(path))
            if kind is None:
                with open_bytes(path) as file:
                    kind = "json" if file.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"{" else None
            if kind is None or (kind == "parquet" and path.suffix.lower() in PACKED):
                known = f"{', '.join(KINDS)}; also {', '.join(PACKED)}"
                raise UserError(f"input = {str(path)!r}: unknown file extension. Known are {known}")
            files[path] = kind
    if not files:
        raise UserError(f"input = {' '.join(inputs)}: there is no file of text")
    return files


# --------------------------------------------------------------------------------------------------------------- parts


def parts_of(
    file: Path, kind: str, options: DataOptions, keys: tuple[str, ...], separator: str | None
) -> Iterator[RecordChunk]:
    """The parts of a file, in order.

    Args:
        options: how tables are read, and the encoding of the file.
        separator: of plain text: line, paragraph, file or a mark. None: at <|endoftext|> where the file has it, else
            the whole file is one document.

    Raises:
        UserError: the file cannot be read, is a broken .gz or .parquet, or has no such column.
    """
    try:
        records: Iterator[tuple[int, bytes | dict[str, Any]]]
        if kind == "text":
            records = _documents(file, separator, options.recipe.encoding)
        elif kind == "json" and next(_blocks(file, options.recipe.encoding), b"").lstrip()[:1] != b"[":
            records = _split(_blocks(file, options.recipe.encoding), b"\n")
        else:  # a table, or one list of objects
            kind, records = "table", _rows(file, options, keys)
        held, size = [], 0
        for line, record in records:
            held.append((line, record))
            size += sum(len(str(value)) for value in record.values()) if isinstance(record, dict) else len(record)
            if size >= PART:
                yield RecordChunk(str(file), kind, held)
                held, size = [], 0
        if held:
            yield RecordChunk(str(file), kind, held)
    except DAMAGED as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}. Is it cut off?") from None


def _blocks(path: Path, encoding: str | None) -> Iterator[bytes]:
    """The bytes of a file, unpacked and as UTF-8, in blocks."""
    encoding = encoding or encoding_of_mark(path)
    with path.open("rb") as raw:
        file = unpacked(raw, path)
        yield from as_utf8(file, encoding, path) if encoding else iter(lambda: file.read(PART), b"")


def _split(blocks: Iterator[bytes], mark: bytes | None) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, piece) of what stands between marks."""
    held, line = bytearray(), 1
    for block in blocks:
        begin = max(0, len(held) - len(mark or b""))
        held += block
        while mark and (stop := held.find(mark, begin)) >= 0:
            piece = bytes(held[:stop])
            yield line, piece
            line += piece.count(b"\n") + mark.count(b"\n")
            del held[: stop + len(mark)]
            begin = 0
    if held:
        yield line, bytes(held)


def _documents(path: Path, separator: str | None, encoding: str | None) -> Iterator[tuple[int, bytes]]:
    """The documents of a plain text; those between paragraphs and marks have no newlines around them."""
    mark = UNITS.get(separator, separator.encode()) if separator else END_OF_TEXT.encode()
    pieces = _split(_plain_newlines(_blocks(path, encoding)), mark)
    is_stripped = separator not in ("line", "file")
    if separator is None:
        begin = [*islice(pieces, 2)]
        is_stripped = len(begin) == 2
        pieces = chain(begin, pieces)
    for line, piece in pieces:
        yield line, piece.strip(b"\n") if is_stripped else piece


def _plain_newlines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Line breaks of any system become newlines, as in training; bytes that are not UTF-8 stay as they are."""
    decoder = io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("surrogateescape"), translate=True)
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def _rows(file: Path, options: DataOptions, keys: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of a table or a JSON list."""
    with one_process_at_a_time(options.cache):
        own = replace(options, patterns={"train": [str(file)]}, lowercases=False)
        read = read_source(own).first
    if missing := [key for key in keys if key not in read.column_names]:
        has = ", ".join(read.column_names)
        raise UserError(f"{file} has no column {', '.join(missing)}; it has {has}. See --json_keys")
    yield from enumerate(chain.from_iterable(map(records_of, read.select_columns(list(keys)).iter(ROWS))), 1)
