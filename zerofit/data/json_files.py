"""JSON files: JSON lines, a list of records, or a table as pandas writes it; with texts as they are written, and one
schema for all records of all files."""

import codecs
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetInfo, Features, load_dataset_builder

from zerofit.compat.datasets import check_blocks
from zerofit.data.encodings import PORTION
from zerofit.data.tables import derived, looked_through, text_of
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file, open_bytes
from zerofit.recipe.parsing import has_half_pair, parse_json

NOT_BLANK = re.compile(r"\S")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
HEAD = 4096  # bytes in which the first character of a file is
FEW = 5  # records and columns: with fewer it is not clear which are which
MEMORY = 12  # bytes of memory for a byte of a file that is read at once
ROUNDS = 20  # times that a schema may grow; then all is read at once


def load_json(paths: list[Path], part: str, cache: Path | None, folder: Path) -> Dataset:
    """The records of JSON files as one table. Keys that a record has not are null.

    The library takes the schema from the first block of the first file; where a later one has more columns or wider
    numbers, all is read again with the wider schema. Where one has texts and another numbers, or objects have other
    keys, all is read as one block, as a small file is.

    Args:
        cache: of the library; None: its own.
        folder: for a file that joins several.

    Raises:
        UserError: all would be read at once, and the memory is too small for it.
    """
    features = None
    for _ in range(ROUNDS):
        differing = list[pa.Schema]()
        try:
            return texts_as_written(_load(paths, part, cache, differing, features=features), paths)
        except Exception:
            if not differing:
                raise
            if len(differing) == 1:
                break
        try:
            merged = pa.unify_schemas([schema.remove_metadata() for schema in differing], promote_options="permissive")
        except pa.ArrowException:  # texts and numbers
            break
        features = Features.from_arrow_schema(merged)
    path = _written(_json_records(paths), paths, folder)
    needed, free = MEMORY * path.stat().st_size, psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{paths[0]}: records differ in the types or the keys of what they hold, and reading all at once needs "
            f"{needed / 2**30:.0f} GiB of memory ({free / 2**30:.0f} free). Write each key with one type"
        )
    table = _load([path], part, cache, [], chunksize=path.stat().st_size + 1)
    return texts_as_written(table, [path])


class _Differs(Exception):
    """A block of records has another schema than those before."""


def _load(paths: list[Path], part: str, cache: Path | None, differing: list[pa.Schema], **options: Any) -> Dataset:
    """The table that the library makes of JSON files.

    Args:
        differing: takes the schema so far and that of the block that does not fit it, if it has one. The library
            would cast some: "007" to 7, and dates among texts to times.
    """
    names, where = [str(path) for path in paths], cache and str(cache)
    builder = load_dataset_builder(
        "json", data_files={part: names}, cache_dir=where, parse_agent_traces=False, **options
    )

    def check(table: pa.Table, json_field_paths: Sequence[Any]) -> None:
        if builder.info.features is not None:
            schema = builder.info.features.arrow_schema
            texts_of_json = len(json_field_paths) > str(schema).count("arrow.json")
            own = {field.name: field.type for field in table.schema}
            known = {field.name: field.type for field in schema}
            if texts_of_json or not all(name in known and _fits(kind, known[name]) for name, kind in own.items()):
                nested = any(
                    pa.types.is_nested(kind) and not _fits(kind, known.get(name, kind)) for name, kind in own.items()
                )
                differing[:] = [schema] if texts_of_json or nested else [schema, table.schema]
                raise _Differs

    check_blocks(builder, check)
    builder.download_and_prepare()
    return builder.as_dataset(split=part)


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of this type are values of the other: integers are floats. Objects must have the same keys, or
    some would be null where they are not written."""
    if pa.types.is_null(kind) or kind == wanted:
        return True
    if pa.types.is_struct(kind) and pa.types.is_struct(wanted):
        known = {wanted.field(place).name: wanted.field(place).type for place in range(len(wanted))}
        fields = [kind.field(place) for place in range(len(kind))]
        return {field.name for field in fields} == known.keys() and all(
            _fits(field.type, known[field.name]) for field in fields
        )
    if pa.types.is_list(kind) and pa.types.is_list(wanted):
        return _fits(kind.value_type, wanted.value_type)
    if isinstance(wanted, pa.JsonType):  # encoded by the library
        return pa.types.is_string(kind)
    if pa.types.is_temporal(wanted):  # is read again as texts
        return pa.types.is_temporal(kind)
    return pa.types.is_floating(wanted) and pa.types.is_integer(kind)


def without_half_pairs(paths: list[Path], folder: Path) -> tuple[Path, list[int], int]:
    """(JSON lines of the records whose texts can be encoded, the numbers of the other records, how many there are)."""
    bad, count = list[int](), 0

    def good() -> Iterator[Any]:
        nonlocal count
        for count, record in enumerate(_json_records(paths), 1):
            if has_half_pair(record):
                bad.append(count)
            else:
                yield record

    for _ in good():
        pass
    numbers, total = list(bad), count
    return _written(good(), paths, folder, "encodable"), numbers, total


def _written(records: Iterable[Any], paths: list[Path], folder: Path, what: str = "records") -> Path:
    """JSON lines of records of these files, in a file of the cache, which is written once."""
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    place = folder / f"{what}-{sha256(repr(stamps).encode()).hexdigest()[:32]}.jsonl"
    if not place.exists():
        with atomic_file(place, "wb") as file:
            for record in records:
                row = {"text": record} if isinstance(record, str) else record
                file.write(json.dumps(row).encode() + b"\n")
    return place


def as_records(path: Path, folder: Path) -> Path:
    """A file of records: the file itself, or JSON lines of the cache, made from a table as pandas' to_json writes it,
    or from records that are not one a line.

    Raises:
        UserError: the table has no names of columns.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_bytes(path) as file:
        start = file.read(HEAD).lstrip()
        if start.startswith(b"[") and start[1:].lstrip().startswith(b"["):
            raise UserError(f"{path} is a list of lists, without names of columns. Write it with orient='records'")
    looked_through(path, folder, partial(check_utf8, path))
    with open_bytes(path) as file:
        if start.startswith(b"[") and SURROGATE.search(file.read()):  # the library lets half of a pair through
            return _written(_json_records([path]), [path], folder)
        file.seek(0)
        lines = (line for line in file if line.strip())
        first, second = next(lines, b""), next(lines, b"")
        if not start.startswith(b"{") or (second and _is_json(first)):
            return path
        file.seek(0)
        try:
            records: Iterable[Any] | None = _records_of_table(parse_json(file.read()))
        except ValueError:  # several records, which are not one a line
            records = _json_records([path])
    try:
        return path if records is None else _written(records, [path], folder)
    except (ValueError, RecursionError):  # the library says what is wrong with it
        return path


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line.decode("utf-8-sig"))
    except ValueError:
        return False
    return True


def check_utf8(path: Path) -> None:
    """Raises UnicodeDecodeError if a file is not UTF-8, of which the library might read other texts."""
    with open_bytes(path) as file:
        for _ in codecs.iterdecode(iter(lambda: file.read(PORTION), b""), "utf-8"):
            pass


def _records_of_table(held: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The records of what pandas writes with orient split, table, index or columns (the default); None: it is
    something else, such as one record."""
    names, rows, schema = held.get("columns"), held.get("data"), held.get("schema")
    if isinstance(names, list) and isinstance(rows, list) and all(isinstance(row, list) for row in rows):
        return [dict(zip(map(str, names), row)) for row in rows]
    if isinstance(schema, dict) and isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        of_index = schema.get("primaryKey", [])
        return [{name: value for name, value in row.items() if name not in of_index} for row in rows]
    values = list(held.values())
    if not values or not all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
        return None
    inner = values[0]
    if _are_rows(held) or len(held) > max(len(inner), FEW):
        return values
    if (inner and _are_rows(inner)) or (len(held) > 1 and len(inner) > max(len(held), FEW)):
        return [{name: column[row] for name, column in held.items()} for row in inner]
    return None


def _are_rows(keys: dict[str, Any]) -> bool:
    """Whether keys are numbers of rows."""
    return all(key.isdecimal() for key in keys)


# ---------------------------------------------------------------------------------------------------- texts as written


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
    for name, column in _read_again(paths, changed).items():
        if len(column) == len(table):
            arrow = arrow.set_column(arrow.schema.get_field_index(name), name, column)
            features[name] = Features.from_arrow_schema(pa.schema([(name, column.type)]))[name]
    if arrow is table.data.table:
        return table
    read_again = Dataset(arrow.replace_schema_metadata(None), DatasetInfo(features=features))
    return derived(read_again, table, "as written")


def _read_again(paths: list[Path], types: dict[str, pa.DataType]) -> dict[str, pa.Array]:
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
    """A value of this type; NaN, as Python writes pandas' missing values, is none.

    Raises:
        TypeError: it is an object or a list where a text is expected.
    """
    if value is None or value != value:
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
    """The records of JSON files: a list of them, or one a line; or over several lines, or several in one."""
    for path in paths:
        with open_bytes(path) as file:
            start = file.read(HEAD).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
            file.seek(0)
            if start == b"[":
                yield from json.loads(file.read())
                continue
            for line in filter(bytes.strip, file):
                try:
                    record = json.loads(line.decode("utf-8-sig"))
                except json.JSONDecodeError:  # not one record a line: the file's end
                    yield from _one_after_another((line + file.read()).decode("utf-8-sig"))
                else:
                    yield record


def _one_after_another(text: str) -> Iterator[dict[str, Any]]:
    decoder, place = json.JSONDecoder(), 0
    while found := NOT_BLANK.search(text, place):
        record, place = decoder.raw_decode(text, found.start())
        yield record
