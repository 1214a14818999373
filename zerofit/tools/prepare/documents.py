"""The input of `zerofit prepare`: which files are read, in which order, and as which parts of about a megabyte."""

import glob
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from pyarrow import parquet

from zerofit.data.delimited_files import with_delimiter, with_quoting
from zerofit.data.encodings import as_utf8, encoding_of_mark
from zerofit.data.file_formats import BUILDERS, FORMATS, unreadable
from zerofit.data.megatron.corpus import INDICES
from zerofit.recipe.columns import ending_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import DAMAGED, PACKED, open_bytes, unpacked
from zerofit.recipe.parsing import parse_json
from zerofit.tools.prepare.encode import InputPart

PART = 1 << 20  # bytes; a longer line or document is a part by itself
KINDS = {ending: kind for ending, kind in FORMATS.items() if kind not in ("xlsx", "conll")}
ROWS = 256  # of a table, read at a time
UNITS = ("line", "paragraph", "file")


@dataclass(frozen=True)
class InputFile:
    """A file, its kind (json, csv, tsv, parquet or text), and its size on disk in bytes."""

    path: Path
    kind: str
    size: int


def find_input(inputs: list[str], omit: Iterable[Path] = ()) -> list[InputFile]:
    """The files of these paths, folders and globs.

    They have the order of `inputs`, and are sorted within a folder or a glob. A file that is named twice is taken
    once, at its first place. In folders and globs, hidden files, empty files and corpora are skipped.

    Args:
        omit: files that are never input, such as those that are about to be written.

    Raises:
        UserError: a name without a file, an empty file, a file of an unknown kind.
    """
    files, omitted = {}, {path.resolve() for path in omit}
    for name in inputs:
        paths, searched = _named(os.path.expanduser(name))
        if not paths:
            raise UserError(f"input = {name!r}: " + ("no file matches" if searched else "there is no such file"))
        for path in paths:
            place = path.resolve()
            skipped = searched and (not path.stat().st_size or _is_of_a_corpus(path))
            if not (place in files or place in omitted or skipped):
                files[place] = _describe(path)
    if not files:
        raise UserError(f"input = {' '.join(inputs)}: all files are empty")
    return list(files.values())


def _is_of_a_corpus(path: Path) -> bool:
    """Whether a file belongs to a corpus that was made before; such files may lie among the texts."""
    return path.suffix in (".bin", ".idx", ".json") and path.with_suffix(".idx").exists()


def _named(name: str) -> tuple[list[Path], bool]:
    """(the files of a name, whether they were searched for)."""
    if os.path.isfile(name):
        return [Path(name)], False
    if os.path.isdir(name):
        return _tree(name), True
    if not glob.has_magic(name):
        return [], False
    return [Path(match) for match in sorted(glob.glob(name, recursive=True)) if os.path.isfile(match)], True


def _tree(folder: str) -> list[Path]:
    paths = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != INDICES]
        paths += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(path for path in paths if path.is_file())


def _describe(path: Path) -> InputFile:
    size, kind = path.stat().st_size, KINDS.get(ending_of(path))
    if kind == "parquet" and path.suffix.lower() in PACKED:
        kind = None
    if not size:
        raise UserError(f"input = {str(path)!r}: the file is empty")
    if not kind and not _begins_an_object(path):
        raise UserError(
            f"input = {str(path)!r}: unknown file extension. Known are {', '.join(KINDS)}; also {', '.join(PACKED)}"
        )
    return InputFile(path, kind or "json", size)


def _begins_an_object(path: Path) -> bool:
    try:
        with open_bytes(path) as file:
            return file.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"{"
    except DAMAGED:
        return False


# --------------------------------------------------------------------------------------------------------------- parts


def tasks_of(
    file: InputFile, keys: tuple[str, ...], separator: str | None, mark: str, encoding: str | None = None
) -> Iterator[tuple[InputPart, int]]:
    """The parts of a file, in order, each with the bytes of the file (as it is on disk) that are read by then.

    Args:
        separator: of plain text: line, paragraph, file or a mark. None: at `mark` where the file has it, else the
            whole file is one document.
        encoding: of the file; None: UTF-8.

    Raises:
        UserError: the file cannot be read, is a broken .gz or .parquet, or has no such column.
    """
    try:
        if file.kind in ("csv", "tsv", "parquet"):
            yield from _in_parts(file, _table(file, keys, encoding))
        elif file.kind == "json" and _is_list(file.path, encoding):
            yield from _in_parts(file, _list(file, keys, encoding))
        elif file.kind == "json":
            for data, line, read in _cut(file.path, b"\n", encoding):
                yield InputPart(str(file.path), line, "json", data), read
        else:
            yield from _text(file, separator, mark, encoding)
    except DAMAGED as error:
        raise UserError(f"{file.path} cannot be read: {first_line(error)}. Is it cut off?") from None


def _blocks(path: Path, encoding: str | None) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file, unpacked and as UTF-8, in blocks, each with the bytes on disk that are read by then."""
    encoding = encoding or encoding_of_mark(path)
    with path.open("rb") as raw:
        file = unpacked(raw, path)
        blocks = as_utf8(file, encoding, path) if encoding else iter(lambda: file.read(PART), b"")
        for block in blocks:
            yield block, raw.tell()


def _is_list(path: Path, encoding: str | None) -> bool:
    """Whether a .json file is one list, and not an object a line."""
    return next(_blocks(path, encoding), (b"", 0))[0].lstrip()[:1] == b"["


def _list(file: InputFile, keys: tuple[str, ...], encoding: str | None) -> Iterator[Any]:
    """The records of a JSON list; one that is a text is that of the keys."""
    try:
        records = parse_json(b"".join(block for block, _ in _blocks(file.path, encoding)))
    except ValueError as error:
        raise UserError(f"{file.path} begins as a JSON list and is not one: {error}") from None
    return (dict.fromkeys(keys, record) if isinstance(record, str) else record for record in records)


def _table(file: InputFile, keys: tuple[str, ...], encoding: str | None) -> Iterator[dict[str, Any]]:
    """The records of a .csv, .tsv or .parquet file, read as in training."""
    try:
        if file.kind == "parquet":
            table = parquet.ParquetFile(file.path)
            _check_columns(file.path, keys, table.schema_arrow.names)
            for batch in table.iter_batches(ROWS, columns=list(keys)):
                yield from batch.to_pylist()
            return
        marked = encoding_of_mark(file.path)
        kwargs = {
            **BUILDERS[file.kind][1],
            "encoding": encoding or ("utf-8-sig" if marked in (None, "utf-8") else marked),
        }
        kwargs, _ = with_quoting(file.path, with_delimiter([file.path], kwargs, None))
        with open_bytes(file.path) as opened:
            _check_columns(file.path, keys, list(pd.read_csv(opened, nrows=0, **kwargs)))
        rules = {"dtype": str, "usecols": list(keys), "index_col": False, "chunksize": ROWS}
        with open_bytes(file.path) as opened:
            for chunk in pd.read_csv(opened, **rules, **kwargs):
                yield from chunk.to_dict("records")
    except (pyarrow.ArrowException, UnicodeError, ValueError) as error:
        raise unreadable([file.path], file.kind, error) from None


def _check_columns(path: Path, keys: tuple[str, ...], names: list[str]) -> None:
    missing = [key for key in keys if key not in names]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}. See --json_keys")


def _in_parts(file: InputFile, records: Iterator[Any]) -> Iterator[tuple[InputPart, int]]:
    """Parts of about PART characters each. The bytes read so far are only known at the end."""
    held, size, line = [], 0, 1
    for record in records:
        held.append(record)
        size += sum(len(text) for text in record.values() if isinstance(text, str)) if isinstance(record, dict) else 0
        if size >= PART:
            yield InputPart(str(file.path), line, "rows", held), 0
            held, size, line = [], 0, line + len(held)
    if held:
        yield InputPart(str(file.path), line, "rows", held), file.size


def _text(file: InputFile, separator: str | None, mark: str, encoding: str | None) -> Iterator[tuple[InputPart, int]]:
    unit = separator if separator in UNITS else "mark"
    mark = mark if separator is None or unit != "mark" else separator
    between = {"line": b"\n", "file": None, "mark": mark.encode()}.get(unit)
    if unit == "paragraph":
        first, _ = next(_blocks(file.path, encoding), (b"", 0))
        between = b"\n\r\n" if b"\r\n" in first else b"\n\n"
    for data, line, read in _cut(file.path, between, encoding):
        kind = unit
        if separator is None and line == 1 and mark.encode() not in data:
            kind = "file"  # the first part is the full file
        yield InputPart(str(file.path), line, kind, data, mark), read


def _cut(path: Path, between: bytes | None, encoding: str | None) -> Iterator[tuple[bytes, int, int]]:
    """(bytes, number of their first line, bytes of the file read by then) of parts that end with `between`."""
    held, line, read = bytearray(), 1, 0
    for block, read in _blocks(path, encoding):
        searched = max(0, len(held) - len(between or b""))
        held += block
        stop = held.rfind(between, searched) if between else -1
        if stop >= 0:
            stop += len(between)
            data = bytes(held[:stop])
            del held[:stop]
            yield data, line, read
            line += data.count(b"\n")
    if held:
        yield bytes(held), line, read
