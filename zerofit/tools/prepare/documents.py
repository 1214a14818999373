"""The input of `zerofit prepare`: which files are read, in which order, and as which parts of about a megabyte."""

import csv
import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from pyarrow import parquet

from zerofit.data.encodings import as_utf8, open_bytes
from zerofit.data.megatron.corpus import INDICES
from zerofit.recipe.columns import find_delimiter, head_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.parsing import parse_json
from zerofit.tools.prepare.cutting import Missing, no_key
from zerofit.tools.prepare.encode import InputPart

PART = 1 << 20  # bytes; a longer line or document is a part by itself
TEXT = (".txt", ".text", ".md", ".rst", ".tokens", ".py", ".tex")  # those of training, zerofit/data/file_formats.py
KINDS = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "json"),
    **dict.fromkeys(TEXT, "text"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
ROWS = 256  # of a .parquet file, read at a time
UNITS = ("line", "paragraph", "file")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputFile:
    """A file, its kind (json, csv, tsv, parquet or text), and its size on disk in bytes."""

    path: Path
    kind: str
    size: int


def find_input(inputs: list[str], omit: Iterable[Path] = ()) -> tuple[list[InputFile], list[str]]:
    """(the files of these paths, folders and globs, notes for the terminal).

    They have the order of `inputs`, and are sorted within a folder or a glob. A file that is named twice is taken
    once, at its first place. In folders and globs, hidden files, empty files and corpora are skipped.

    Args:
        omit: files that are never input, such as those that are about to be written.

    Raises:
        UserError: names without files, and files of unknown kinds, all in one message.
    """
    problems, files, omitted = [], {}, {path.resolve() for path in omit}
    twice = 0
    for name in inputs:
        paths, searched = _named(os.path.expanduser(name))
        if not paths:
            problems.append(f"input = {name!r}: " + ("no file matches" if searched else "there is no such file"))
        for path in paths:
            place = path.resolve()
            if place in omitted or (searched and (not path.stat().st_size or _is_of_a_corpus(path))):
                continue
            twice += place in files
            if place not in files:
                files[place] = _describe(path, problems)
    if not problems and not files:
        problems.append(f"input = {' '.join(inputs)}: all files are empty")
    if problems:
        more = [f"and {len(problems) - 20} more such files"] if len(problems) > 21 else []
        raise UserError(problems[:20] + more if more else problems)
    notes = [f"note: {twice} file{'s were' if twice > 1 else ' was'} named twice, and read once"] if twice else []
    return list(files.values()), notes


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


def _describe(path: Path, problems: list[str]) -> InputFile | None:
    size = path.stat().st_size
    endings = [suffix.lower() for suffix in path.suffixes]
    if packed := endings[-1:] == [".gz"]:
        endings.pop()
    kind = KINDS.get(endings[-1]) if endings else None
    if kind and not (packed and kind == "parquet"):
        if not size:
            problems.append(f"input = {str(path)!r}: the file is empty")
        return InputFile(path, kind, size)
    if not _begins_an_object(path):
        problems.append(
            f"input = {str(path)!r}: the ending is unknown, and the file does not begin with '{{' as JSON lines do. "
            f"Known are {', '.join(KINDS)}, each but .parquet also .gz"
        )
    return InputFile(path, "json", size)


def _begins_an_object(path: Path) -> bool:
    try:
        with open_bytes(path) as file:
            return file.read(4096).removeprefix(BOM).lstrip()[:1] == b"{"
    except (OSError, EOFError, zlib.error):
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
        if file.kind == "parquet":
            yield from _rows(file, keys)
        elif file.kind in ("csv", "tsv"):
            yield from _in_parts(file, _table(file, keys, encoding))
        elif file.kind == "json" and _is_list(file.path, encoding):
            yield from _in_parts(file, _list(file, keys, encoding))
        elif file.kind == "json":
            for data, line, read in _cut(file.path, b"\n", encoding):
                yield InputPart(str(file.path), line, "json", data), read
        else:
            yield from _text(file, separator, mark, encoding)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file.path} cannot be read: {first_line(error)}. Is it cut off?") from None


def _blocks(path: Path, encoding: str | None) -> Iterator[tuple[bytes, int]]:
    """The bytes of a file, unpacked and as UTF-8, in blocks, each with the bytes on disk that are read by then."""
    with path.open("rb") as raw:
        file = gzip.GzipFile(fileobj=raw, mode="rb") if path.suffix == ".gz" else raw
        blocks = as_utf8(file, encoding, path) if encoding else iter(lambda: file.read(PART), b"")
        for number, block in enumerate(blocks):
            yield block if number else block.removeprefix(BOM), raw.tell()


def _is_list(path: Path, encoding: str | None) -> bool:
    """Whether a .json file is one list, and not an object a line."""
    return next(_blocks(path, encoding), (b"", 0))[0].lstrip()[:1] == b"["


def _list(file: InputFile, keys: tuple[str, ...], encoding: str | None) -> Iterator[list]:
    """The texts of each record of a JSON list; a record that is a text is that of the only key."""
    try:
        records = parse_json(b"".join(block for block, _ in _blocks(file.path, encoding)))
    except ValueError as error:
        raise UserError(f"{file.path} begins as a JSON list and is not one: {error}") from None
    for record in records:
        if isinstance(record, dict):
            yield [record[key] if key in record else no_key(key, record) for key in keys]
        else:
            yield [record] * len(keys)


def _table(file: InputFile, keys: tuple[str, ...], encoding: str | None) -> Iterator[list]:
    """The texts of each record of a .csv or .tsv; in .tsv, quotes are text, as in training."""
    csv.field_size_limit(sys.maxsize)
    rules = {"quoting": csv.QUOTE_NONE} if file.kind == "tsv" else {}
    if (head := head_of(file.path, [encoding])) is not None:
        rules["delimiter"] = find_delimiter(head, f".{file.kind}")
    with open_bytes(file.path) as packed:
        text = io.TextIOWrapper(packed, encoding=encoding or "utf-8-sig", newline="")
        try:
            records = csv.reader(text, **rules)
            header = [name.removeprefix("\ufeff") for name in next(records, [])]
            _check_columns(file.path, keys, header)
            places = [header.index(key) for key in keys]
            for record in records:
                short = Missing(f"the record has {len(record)} fields, and the header {len(header)}")
                if record:
                    yield [record[place] if place < len(record) else short for place in places]
        except (csv.Error, UnicodeDecodeError) as error:
            problem = (
                f"is not {encoding or 'UTF-8'} (see --encoding)" if isinstance(error, UnicodeError) else "is broken"
            )
            raise UserError(f"{file.path} {problem}, after line {records.line_num}: {first_line(error)}") from None


def _check_columns(path: Path, keys: tuple[str, ...], names: list[str]) -> None:
    missing = [key for key in keys if key not in names]
    if missing:
        raise UserError(f"{path} has no column {', '.join(missing)}; it has {', '.join(names)}. See --json_keys")


def _in_parts(file: InputFile, records: Iterator[list]) -> Iterator[tuple[InputPart, int]]:
    """Parts of about PART characters each. The bytes read so far are only known at the end."""
    held, size, line = [], 0, 1
    for record in records:
        held.append(record)
        size += sum(len(text) for text in record if isinstance(text, str))
        if size >= PART:
            yield InputPart(str(file.path), line, "rows", list(zip(*held))), 0
            held, size, line = [], 0, line + len(held)
    if held:
        yield InputPart(str(file.path), line, "rows", list(zip(*held))), file.size


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


def _rows(file: InputFile, keys: tuple[str, ...]) -> Iterator[tuple[InputPart, int]]:
    try:
        table = parquet.ParquetFile(file.path)
        names = table.schema_arrow.names
        _check_columns(file.path, keys, names)
        total, columns, line, held, row = table.metadata.num_rows, [[] for _ in keys], 1, 0, 0
        for batch in table.iter_batches(ROWS, columns=list(keys)):
            for column, key in zip(columns, keys):
                column += batch.column(batch.schema.names.index(key)).to_pylist()
            row += batch.num_rows
            held += batch.nbytes
            if held >= PART or row == total:
                yield InputPart(str(file.path), line, "rows", columns), file.size * row // max(1, total)
                columns, line, held = [[] for _ in keys], row + 1, 0
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} cannot be read as .parquet: {first_line(error)}") from None
