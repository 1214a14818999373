"""The formats of data files, by their endings, and what is wrong with a file that cannot be read.

Files in another encoding, Excel and .conll files, and JSON objects with the records under a key are converted for the
readers: to UTF-8, to .csv, to JSON lines, to the records alone. The converted file is cached."""

import csv
import io
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile

import pandas as pd
from datasets import Features, Value

from zerofit.data.conll import sentences
from zerofit.data.encodings import as_utf8, open_bytes, proposal
from zerofit.data.options import DataOptions
from zerofit.recipe.columns import ending_of, find_delimiter, head_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import atomic_file
from zerofit.recipe.parsing import parse_json

FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".xlsx": "xlsx", ".parquet": "parquet",
    ".conll": "conll",
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tokens": "text", ".py": "text", ".tex": "text",
}  # fmt: skip
CSV = {"encoding": "utf-8-sig", "keep_default_na": False}  # "None" and "NA" are words, and Excel writes a BOM
BUILDERS = {
    "csv": ("csv", CSV),
    "tsv": ("csv", {**CSV, "sep": "\t", "quoting": 3}),
    "xlsx": ("csv", CSV),
    "conll": ("json", {}),
}  # .tsv files have no quoting


def format_of(files: list[Path]) -> str:
    """The format of files, by their endings. Raises UserError for an unknown ending, or several formats."""
    kinds = {}
    for path in files:
        suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
        kinds.setdefault(FORMATS.get(suffixes[-1].lower() if suffixes else ""), path)
    if None in kinds:
        raise UserError(f"{kinds[None]}: unknown file extension; known are {', '.join(FORMATS)}, each also .gz")
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
            for number, line in enumerate(data.splitlines(), 1):
                try:
                    parse_json(line or b"{}")
                except json.JSONDecodeError as wrong:
                    return UserError(f"{path}, line {number}: not valid JSON: {wrong}")
    cause = error.__cause__ or error
    return UserError(f"{files[0]} cannot be read as {kind}: {' '.join(str(cause).split())[:400]}")


def with_delimiter(paths: list[Path], kwargs: dict, delimiter: str | None) -> dict:
    """The arguments of the reader of .csv and .tsv files, with the delimiter of these files."""
    if delimiter is None and "names" not in kwargs and (head := head_of(paths[0], [kwargs["encoding"]])):
        delimiter = find_delimiter(head, ending_of(paths[0]))
    return {**kwargs, "sep": delimiter} if delimiter else kwargs


def check_fields(path: Path, kwargs: dict) -> None:
    """Raises UserError if there is no record, or the first has more fields than the header: pandas would drop the
    first of them."""
    csv.field_size_limit(sys.maxsize)
    with open_bytes(path) as file:
        lines = csv.reader(
            io.TextIOWrapper(file, encoding=kwargs["encoding"], newline=""),
            delimiter=kwargs.get("sep", ","),
            quoting=kwargs.get("quoting", csv.QUOTE_MINIMAL),
        )
        rows = filter(None, lines)
        header = kwargs.get("names") or next(rows, [])
        record = next(rows, None)
    if record is None:
        raise UserError(f"{path} has a header ({', '.join(header)}) and no record")
    if len(record) > len(header):
        raise UserError(
            f"{path}: {len(record)} fields, {len(header)} columns ({', '.join(header)}). Quote texts, or set delimiter"
        )


def text_features(path: Path, kwargs: dict) -> Features:
    """The columns of a .csv file, all as text. The datasets library infers types from the first 10,000 rows and fails
    if a column of numbers has a word or an empty value after them."""
    columns = pd.read_csv(path, nrows=0, **kwargs).columns
    return Features(dict.fromkeys(columns, Value("string")))


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
    converts = kind in ("xlsx", "conll") or data.encoding or data.field
    return [_converted(path, kind, data) for path in paths] if converts else paths


def _converted(path: Path, kind: str, data: DataOptions) -> Path:
    """The converted file in the cache, which is written once."""
    file_stat = path.stat()
    what = (str(path), file_stat.st_size, file_stat.st_mtime_ns, data.encoding, data.field)
    ending = ".csv" if kind == "xlsx" else ".jsonl" if data.field or kind == "conll" else ending_of(path)
    place = data.cache.folder / f"plain-{sha256(repr(what).encode()).hexdigest()[:32]}{ending}"
    if place.exists():
        return place
    with atomic_file(place, "wb") as written, open_bytes(path) as file:
        portions = as_utf8(file, data.encoding, path) if data.encoding else file
        if kind == "xlsx":
            written.write(_first_sheet(path))
        elif kind == "conll":
            try:
                written.writelines(sentences(b"".join(portions).decode("utf-8-sig"), path))
            except UnicodeDecodeError as error:
                raise unreadable([path], kind, error) from None
        else:
            written.writelines(_records(portions, data.field, path) if data.field else portions)
    return place


def _first_sheet(path: Path) -> bytes:
    """The first sheet of an Excel file as .csv."""
    try:
        sheet = pd.read_excel(path, dtype=str, keep_default_na=False, engine="openpyxl")
    except ImportError:
        raise UserError(f"{path}: pip install openpyxl, or save it as .csv (UTF-8)") from None
    except (ValueError, KeyError, OSError, BadZipFile) as error:
        raise UserError(f"{path} cannot be read as .xlsx: {first_line(error)}") from None
    return sheet.to_csv(index=False).encode()


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
