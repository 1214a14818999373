"""The formats of data files, by their endings, and what is wrong with a file that cannot be read.

Files in another encoding, Excel and .conll files, and JSON objects with the records under a key are converted for the
readers: to UTF-8, to .csv, to JSON lines, to the records alone. The converted file is cached."""

import contextlib
import csv
import io
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as json_reader
from datasets import Dataset, DatasetInfo, Features, Value

from zerofit.data.conll import sentences
from zerofit.data.encodings import as_utf8, open_bytes, proposal
from zerofit.data.options import DataOptions
from zerofit.data.tables import set_fingerprint, text_of
from zerofit.recipe.columns import ending_of, find_delimiter, head_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import atomic_file
from zerofit.recipe.parsing import parse_json

FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".xlsx": "xlsx", ".parquet": "parquet",
    ".conll": "conll",
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tokens": "text", ".py": "text", ".tex": "text",
}  # fmt: skip
JSON_BLOCK = 1 << 26  # bytes that pyarrow parses at a time: more than a line has
HEAD = 4096  # bytes in which the first character of a file is
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
    """The columns of a .csv file, all as text, so that values stay as they are written. The datasets library would
    infer types from the first 10,000 rows."""
    columns = pd.read_csv(path, nrows=0, **kwargs).columns
    return Features(dict.fromkeys(columns, Value("string")))


def texts_as_written(table: Dataset, paths: list[Path]) -> Dataset:
    """The table of JSON files in which texts are the texts of the files.

    The reader makes dates of texts such as "2024-01-01", numbers of "0" where another record has 1, and rounds
    integers of more than 64 bits. Such columns are read again; a number or a boolean beside texts becomes a text.
    Columns of objects with different keys stay as they are.
    """
    changed = {}
    for field in table.data.schema:
        text_type = _with_texts(field.type)
        if pa.types.is_floating(field.type) and (pc.max(pc.abs(table.data[field.name])).as_py() or 0) >= 2**53:
            text_type = pa.string()
        if text_type != field.type:
            changed[field.name] = text_type
    if not changed:
        return table
    arrow, features = table.data.table, table.features.copy()
    dates = {name: kind for name, kind in changed.items() if _holds_dates(arrow.schema.field(name).type)}
    found = _read_with_types(paths, dates) if dates else {}
    others = {name: kind for name, kind in changed.items() if name not in found}
    found |= _read_one_by_one(paths, others) if others else {}
    for name, column in found.items():
        if len(column) == len(table):
            arrow = arrow.set_column(arrow.schema.get_field_index(name), name, column)
            features[name] = Features.from_arrow_schema(pa.schema([(name, column.type)]))[name]
    if arrow is table.data.table:
        return table
    read_again = Dataset(arrow.replace_schema_metadata(None), DatasetInfo(features=features))
    return set_fingerprint(read_again, table._fingerprint, "as written")


def _holds_dates(kind: pa.DataType) -> bool:
    """Whether dates are all that is to become text in a column of this type."""
    return not pa.types.is_floating(kind) and "json" not in str(kind)


def _read_with_types(paths: list[Path], types: dict[str, pa.DataType]) -> dict[str, pa.ChunkedArray]:
    """Columns of JSON lines, by pyarrow, which is fast; none where it cannot."""
    how = json_reader.ParseOptions(explicit_schema=pa.schema(types.items()), unexpected_field_behavior="ignore")
    blocks, tables = json_reader.ReadOptions(block_size=JSON_BLOCK), []
    try:
        for path in paths:
            with open_bytes(path) as file:
                tables.append(json_reader.read_json(file, read_options=blocks, parse_options=how))
    except pa.ArrowException:
        return {}
    table = pa.concat_tables(tables)
    return {name: table.column(name) for name in types}


def _read_one_by_one(paths: list[Path], types: dict[str, pa.DataType]) -> dict[str, pa.Array]:
    """Columns of JSON files, without those of objects, and of numbers without integers."""
    columns: dict[str, list[Any]] = {name: [] for name in types}
    try:
        for record in _json_records(paths):
            for name, values in columns.items():
                values.append(record.get(name))
    except (ValueError, AttributeError):  # a file of another form
        return {}
    found = {}
    for name, values in columns.items():
        with contextlib.suppress(TypeError):
            if not all(isinstance(value, float | None) for value in values):
                found[name] = pa.array([_as_text(value, types[name]) for value in values], types[name])
    return found


def _with_texts(kind: pa.DataType) -> pa.DataType:
    """The type with texts in place of dates and of values of several types."""
    if pa.types.is_temporal(kind) or isinstance(kind, pa.JsonType):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_with_texts(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(kind.field(place).name, _with_texts(kind.field(place).type)) for place in range(len(kind))])
    return kind


def _as_text(value: Any, kind: pa.DataType) -> Any:
    """A value of this type. Raises TypeError: it is an object or a list where a text is expected."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {
            kind.field(place).name: _as_text(value.get(kind.field(place).name), kind.field(place).type)
            for place in range(len(kind))
        }
    if pa.types.is_list(kind):
        return [_as_text(item, kind.value_type) for item in value]
    if isinstance(value, (dict, list)):
        raise TypeError("no text")
    return text_of(value) if pa.types.is_string(kind) else value


def _json_records(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """The records of JSON files: a list of them, or one a line."""
    for path in paths:
        with open_bytes(path) as file:
            start = file.read(HEAD).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
            file.seek(0)
            if start == b"[":
                yield from json.loads(file.read())
            else:
                yield from (json.loads(line.decode("utf-8-sig")) for line in file if line.strip())


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
