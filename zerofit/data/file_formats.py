"""The formats of data files, by their endings, and what is wrong with a file that cannot be read.

Files in another encoding or with a byte-order mark, packed files other than .gz, Excel and .conll files, .csv files
with Excel's first line `sep=;`, and JSON objects with the records under a key are converted for the readers: to UTF-8,
to .csv, to JSON lines, to the records alone. The converted file is cached."""

import csv
import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pandas as pd

from zerofit.data.encodings import PORTION, as_utf8, encoding_of_mark, proposal
from zerofit.data.options import DataOptions
from zerofit.recipe.columns import SEPARATOR_LINE, ending_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import PACKED, atomic_file, open_bytes
from zerofit.recipe.parsing import has_half_pair, parse_json

FORMATS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".xlsx": "xlsx",
    ".parquet": "parquet", ".conll": "conll",
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tokens": "text", ".py": "text", ".tex": "text",
}  # fmt: skip
HALF_PAIR = (
    r"a text has half of a surrogate pair (as \ud83d alone), which is no character. Correct it, or skip such records "
    "with --skip_bad_records"
)
COMMENT = re.compile(r"#\s*(id\s|(newdoc|newpar)\b|[\w.:]+\s*=)")  # of CoNLL-U, MultiCoNER; "# O" is a word
DOCUMENT = "-DOCSTART-"  # the first word of a line between documents of a .conll file
BLANKS = " \t\r"  # no others: a tweet has U+00A0 and U+2028 as words
CSV = {"encoding": "utf-8-sig", "keep_default_na": False}  # "None" and "NA" are words, and Excel writes a BOM
BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "csv": ("csv", CSV),
    "tsv": ("csv", {**CSV, "sep": "\t", "quoting": csv.QUOTE_NONE}),  # unless with_quoting finds quotes
    "xlsx": ("csv", CSV),
    "json": ("json", {"parse_agent_traces": False}),  # records of some columns would need another package
    "conll": ("json", {}),
}


def format_of(files: list[Path]) -> str:
    """The format of files, by their endings. Raises UserError for an unknown ending, or several formats."""
    kinds: dict[str, Path] = {}
    for path in files:
        if (ending := ending_of(path)) not in FORMATS:
            raise UserError(
                f"{path}: unknown file extension; known are {', '.join(FORMATS)}, each also {', '.join(PACKED)}"
            )
        kinds.setdefault(FORMATS[ending], path)
    if len(kinds) > 1:
        raise UserError(f"files of several formats in one option: {', '.join(sorted(kinds))}; use one")
    return next(iter(kinds))


def unreadable(files: list[Path], kind: str, error: Exception) -> UserError:
    """The error for unreadable files: names the first that is not UTF-8 or not of its format."""
    for path in files if kind not in ("parquet", "xlsx") else []:
        with open_bytes(path) as file:
            data = file.read()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as wrong:
            line = data.count(b"\n", 0, wrong.start) + 1
            return UserError(
                f"{path} is not UTF-8: byte 0x{data[wrong.start]:02x} at offset {wrong.start} (line {line}). "
                + proposal(data)
            )
        if kind == "json" and not data.lstrip().startswith(b"["):
            for number, text in enumerate(data.splitlines(), 1):
                try:
                    record = parse_json(text or b"{}")
                except json.JSONDecodeError as wrong:
                    return UserError(f"{path}, line {number}: not valid JSON: {wrong}")
                if b"\\u" in text and has_half_pair(record):
                    return UserError(f"{path}, line {number}: {HALF_PAIR}")
        elif kind == "json":
            try:
                records = parse_json(data)
            except json.JSONDecodeError as wrong:
                return UserError(f"{path}: not valid JSON: {wrong}")
            if place := next((number for number, record in enumerate(records, 1) if has_half_pair(record)), None):
                return UserError(f"{path}, record {place}: {HALF_PAIR}")
    cause = error.__cause__ or error
    return UserError(f"{files[0]} cannot be read as {kind}: {' '.join(str(cause).split())[:400]}")


# ---------------------------------------------------------------------------------------------------------- conversion


def plain_files(paths: list[Path], kind: str, data: DataOptions) -> list[Path]:
    """The files themselves, or converted copies.

    Raises:
        UserError: a file is not in that encoding, is no JSON, or has no such key; the option is not for such files.
    """
    for option, value, kinds in (
        ("encoding", data.encoding, ("json", "csv", "tsv", "text", "conll")),
        ("delimiter", data.delimiter, ("csv", "tsv")),
        ("field", data.field, ("json",)),
    ):
        if value and kind not in kinds:
            raise UserError(f"{option} = {value!r}: no effect on {paths[0]}, a .{kind} file. Remove it")
    return [_converted(path, kind, data) for path in paths]


def _converted(path: Path, kind: str, data: DataOptions) -> Path:
    """The converted file in the cache, which is written once; the file itself where the readers can read it."""
    encoding = data.encoding
    if not encoding and kind not in ("xlsx", "parquet"):
        encoding = encoding_of_mark(path)
    is_packed = path.suffix.lower() in PACKED and path.suffix != ".gz"
    has_separator_line = kind in ("csv", "tsv") and _has_separator_line(path, encoding)
    is_converted = encoding or data.field or is_packed or kind in ("xlsx", "conll") or has_separator_line
    if not is_converted and not any(mark in str(path) for mark in "*?[]{}") and "::" not in str(path):
        return path
    file_stat = path.stat()
    what = (str(path), file_stat.st_size, file_stat.st_mtime_ns, encoding, data.field)
    ending = ".csv" if kind == "xlsx" else ".jsonl" if data.field or kind == "conll" else ending_of(path)
    place = data.cache.folder / f"plain-{sha256(repr(what).encode()).hexdigest()[:32]}{ending}"
    if place.exists():
        return place
    if not is_converted:  # the library would take the name for a glob
        place = place.with_name(f"{place.name}{path.suffix if path.suffix in PACKED else ''}")
        place.unlink(missing_ok=True)
        place.symlink_to(path)
        return place
    with atomic_file(place, "wb") as written, open_bytes(path) as file:
        portions = as_utf8(file, encoding, path) if encoding else iter(lambda: file.read(PORTION), b"")
        if kind == "xlsx":
            written.write(_first_sheet(path))
        elif kind == "conll":
            try:
                written.writelines(sentences(b"".join(portions).decode("utf-8-sig"), path))
            except UnicodeDecodeError as error:
                raise unreadable([path], kind, error) from None
        else:
            if has_separator_line:
                written.write(next(portions).partition(b"\n")[2])
            written.writelines(_records(portions, data.field, path) if data.field else portions)
    return place


def _has_separator_line(path: Path, encoding: str | None) -> bool:
    with open_bytes(path) as file:
        head = file.read(64).decode(encoding or "utf-8", "replace")
    return bool(SEPARATOR_LINE.match(head.removeprefix("\ufeff")))


def _first_sheet(path: Path) -> bytes:
    """The first sheet of an Excel file as .csv."""
    try:
        sheet = pd.read_excel(path, dtype=str, keep_default_na=False, engine="openpyxl")
    except ImportError:
        raise UserError(f"{path}: pip install openpyxl, or save it as .csv (UTF-8)") from None
    except (ValueError, KeyError, OSError, BadZipFile) as error:
        raise UserError(f"{path} cannot be read as .xlsx: {first_line(error)}") from None
    return sheet.to_csv(index=False).encode()


def sheets_left_out(path: Path) -> list[str]:
    """A note on the sheets of an Excel file that are not read: all but the first; nothing if it has one."""
    with pd.ExcelFile(path, engine="openpyxl") as book:
        first, *others = book.sheet_names
    names = ", ".join(map(repr, others))
    return [f"note      {path}: sheet {first!r} is read; to read {names}, save it as .csv"] if others else []


def _records(portions: Iterator[bytes], field: str, path: Path) -> Iterator[bytes]:
    """The records under a key of one JSON object, one record per line."""
    try:
        held = parse_json(b"".join(portions))
    except ValueError as error:
        raise UserError(
            f"{path}: not valid JSON: {error}. (field = {field!r} is for files of one JSON object)"
        ) from None
    for key in field.split("."):
        if not isinstance(held, dict) or key not in held:
            keys = f"its keys are {', '.join(held)}" if isinstance(held, dict) else f"it is a {type(held).__name__}"
            raise UserError(f"field = {field!r}: {path} has no key {key!r}; {keys}")
        held = held[key]
    if not isinstance(held, list) or not held:
        raise UserError(f"field = {field!r}: {path} has no list of records there, but a {type(held).__name__}")
    for record in held:
        row = record if isinstance(record, dict) else {"text": record}
        yield json.dumps(row, ensure_ascii=False).encode() + b"\n"


def sentences(text: str, path: Path) -> Iterator[bytes]:
    """The sentences of tagged words as JSON lines: `tokens`, the first column, and `tags`, the last; no tags if there
    is only one.

    As in CoNLL-2003 there is a word a line, and an empty line between sentences. A tab separates columns where a line
    has one, else blanks do. Comments before a sentence, such as `# sent_id = 1`, are left out.

    Raises:
        UserError: a word or a tag is empty; a line has another number of columns than the first one; there is no
            sentence.
    """
    num_columns, words, tags = 0, list[str](), list[str]()
    for number, line in enumerate([*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""], 1):
        if not words and COMMENT.match(line):
            continue
        plain = [field for field in line.strip(BLANKS).split(" ") if field]
        columns = [field.strip(BLANKS) for field in line.split("\t")] if "\t" in line else plain
        if not any(columns) or columns[0] == DOCUMENT:
            if words:
                record = {"tokens": words, "tags": tags} if tags else {"tokens": words}
                yield json.dumps(record, ensure_ascii=False).encode() + b"\n"
            words, tags = [], []
            continue
        num_columns = num_columns or len(columns)
        if not (columns[0] and columns[-1]):
            raise UserError(f"{path}, line {number}: {line.strip()!r} is not a word and, in the last column, its tag")
        if len(columns) != num_columns:
            raise UserError(f"{path}, line {number}: {len(columns)} columns, and {num_columns} in the lines before it")
        words.append(columns[0])
        if num_columns > 1:
            tags.append(columns[-1])
    if not num_columns:
        raise UserError(f"{path} has no sentence")
