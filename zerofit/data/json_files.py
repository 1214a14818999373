"""JSON files: JSON lines, a list of records, or a table as pandas writes it; with texts as they are written, and one
type of column for the records of all files.

A key that a record lacks is null. Where one record has a text and another a number, both are texts; where objects
have different keys, or one record has a text and another an object, each value stays as it is.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Features, Json, List, Value

from zerofit.data.delimited_files import open_text
from zerofit.data.lengths import report_data_loss
from zerofit.data.options import DataOptions
from zerofit.data.tables import text_of, write_table
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import has_lone_surrogate, parse_json, reject_duplicates

NOT_BLANK_OR_BOM = re.compile(r"[^\s\ufeff]")  # joined files have byte-order marks inside
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
MIN_ROWS = 5  # with fewer rows and columns it is unclear which are which
HALF_PAIR = r"a text has half of a surrogate pair (as \ud83d alone), which is not a character"
MAX_EXACT_INTEGER = 2**53  # integers up to it are exact as floats
# The type of a column: one of these names, {key: type}, [type of the items], or None while all values are null.
STRING = "string"
FLOAT = "float64"
INTEGER = "int64"
BOOLEAN = "bool"
BIG_INTEGER = "integers above 2**53"
JSON_VALUE = "values of JSON"
ColumnType = str | dict[str, Any] | list[Any] | None


def read_json_files(paths: list[Path], data: DataOptions, place: Path) -> list[str]:
    """Write the records of JSON files as a table to `place`. Returns notes. Raises UserError: a file is not JSON, or
    not UTF-8; a text cannot be encoded, and such records may not be skipped."""
    kinds: dict[str, ColumnType] = {}
    total = 0
    bad: list[str] = []
    for path in paths:
        for number, (record, may_be_bad) in enumerate(json_records(path, data), 1):
            total += 1
            if may_be_bad and has_lone_surrogate(record):
                bad.append(f"{path}, record {number}")
                continue
            for key, value in record.items():
                kinds[key] = widen_type(kinds.get(key), value)
    if not kinds and not bad:
        raise UserError(f"{paths[0]} holds no record")
    if bad and not data.skip_bad_records:
        raise UserError(f"{bad[0]}: {HALF_PAIR}. Correct it, or skip such records with --skip_bad_records")
    records = (
        {key: convert_value(record.get(key), kind) for key, kind in kinds.items()}
        for path in paths
        for record, may_be_bad in json_records(path, data)
        if not (may_be_bad and has_lone_surrogate(record))
    )
    stored, shown = (
        Features({key: _feature(kind, mixed) for key, kind in kinds.items()}) for mixed in (Value(STRING), Json())
    )
    write_table(records, stored, place, shown)
    problem = f"records of {paths[0]} are skipped" + (f", such as {bad[0]}: {HALF_PAIR}" if bad else "")
    return report_data_loss(data.recipe.allow_data_loss, len(bad), total, problem)


def json_records(path: Path, data: DataOptions) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield (each record of a file, whether it may have half of a surrogate pair). Raises UserError: the file is not
    JSON, holds no records, or has no records under the key that `field` names."""
    with open_text(path, data.recipe.encoding, newline="\n") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        first = next(lines, (1, ""))
        second = next(lines, (1, ""))
        number = first[0]
        remaining = first[1] + second[1]
        is_json_lines = False
        if not data.recipe.field and second[1]:
            with suppress(json.JSONDecodeError):
                is_json_lines = isinstance(_parse(first[1]), dict)
        if is_json_lines:
            remaining = ""
            for number, line in chain((first, second), lines):
                try:
                    record = _parse(line)
                except json.JSONDecodeError:  # records that are not one a line follow
                    remaining = line
                    break
                yield _object(record, f"{path}, line {number}"), bool(SURROGATE_ESCAPE.search(line))
        text = remaining + file.read()
        may_be_bad = bool(SURROGATE_ESCAPE.search(text))
        for index, record in enumerate(_records_of(text, number, path, data.recipe.field), 1):
            yield _object(record, f"{path}, record {index}"), may_be_bad


def _parse(text: str) -> Any:
    """Parse a value of JSON. NaN becomes None: Python writes missing values of pandas as NaN."""
    return parse_json(text, parse_constant=_constant, object_pairs_hook=reject_duplicates)


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)


def _object(record: Any, where: str) -> dict[str, Any]:
    if isinstance(record, str):
        return {"text": record}
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a record, an object with a value for each column: {str(record)[:60]}")
    return record


def _records_of(text: str, line: int, path: Path, field: str | None) -> Iterable[Any]:
    """Return the records of a text that is a list, a table, one record or several, or an object that has them under
    `field`. `line`: the number of its first line in the file."""
    try:
        value = _parse(text) if text.strip() else []
    except json.JSONDecodeError as error:
        if field:
            hint = f"(field = {field!r} is for files of one JSON object)"
            raise UserError(f"{path}: not valid JSON: {error}. {hint}") from None
        return _parse_sequence(text, line, path)
    for key in field.split(".") if field else ():
        if not isinstance(value, dict) or key not in value:
            keys = f"its keys are {', '.join(value)}" if isinstance(value, dict) else f"it is a {type(value).__name__}"
            raise UserError(f"field = {field!r}: {path} has no key {key!r}; {keys}")
        value = value[key]
    if field and not (isinstance(value, list) and value):
        raise UserError(f"field = {field!r}: {path} has no list of records there, but a {type(value).__name__}")
    if field:
        return value
    if isinstance(value, list) and value and isinstance(value[0], list):
        raise UserError(f"{path} is a list of lists, without names of columns. Write it with orient='records'")
    if isinstance(value, dict):
        return _records_of_table(value) or [value]
    return value if isinstance(value, list) else [value]


def _parse_sequence(text: str, line: int, path: Path) -> Iterator[Any]:
    decoder = json.JSONDecoder(parse_constant=_constant, object_pairs_hook=reject_duplicates)
    place = 0
    while match := NOT_BLANK_OR_BOM.search(text, place):
        try:
            record, place = decoder.raw_decode(text, match.start())
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {line + text.count(chr(10), 0, match.start())}: not valid JSON: {error}"
            ) from None
        yield record
        place += isinstance(record, dict) and text.startswith(",", place)  # a list without its brackets


def _records_of_table(table: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the records of what pandas writes with orient split, table, index or columns (the default), of a list for
    each column, or of Topical-Chat's conversations by their ids (https://github.com/alexa/Topical-Chat); None: it is
    something else, such as one record."""
    names = table.get("columns")
    rows = table.get("data")
    schema = table.get("schema")
    if isinstance(names, list) and isinstance(rows, list) and all(isinstance(row, list) for row in rows):
        return [dict(zip(map(str, names), row)) for row in rows]
    if isinstance(schema, dict) and isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        index_names = schema.get("primaryKey", [])
        return [{name: value for name, value in row.items() if name not in index_names} for row in rows]
    values = list(table.values())
    if values and all(isinstance(value, list) for value in values):  # Dataset.to_dict(), or the lists of one record
        is_table = len({*map(len, values)}) == 1 and len(values[0]) >= MIN_ROWS and not isinstance(values[0][0], dict)
        return [dict(zip(table, row)) for row in zip(*values)] if is_table else None
    if not values or not all(isinstance(value, dict) for value in values):
        return None
    inner = values[0]
    if all(isinstance(value.get("content"), list) and "role" not in value for value in values):
        return values
    if any(value.keys() != inner.keys() for value in values):
        return None
    if all(map(str.isdecimal, table)) or len(table) > max(len(inner), MIN_ROWS):  # the keys are numbers of rows
        return values
    if (inner and all(map(str.isdecimal, inner))) or (len(table) > 1 and len(inner) > max(len(table), MIN_ROWS)):
        return [{name: column[row] for name, column in table.items()} for row in inner]
    return None


def widen_type(kind: ColumnType, value: Any) -> ColumnType:
    """Return the type of a column that holds values of type `kind` and this value."""
    if value is None:
        return kind
    if isinstance(value, dict) and value and isinstance(kind, dict | None):
        kind = dict.fromkeys(value) if kind is None else kind
        if kind.keys() == value.keys():
            return {key: widen_type(child, value[key]) for key, child in kind.items()}  # in the order of the first
    if isinstance(value, list) and isinstance(kind, list | None):
        of_items = kind[0] if kind else None
        for item in value:
            of_items = widen_type(of_items, item)
        return [of_items]
    if isinstance(value, (dict, list)) or isinstance(kind, (dict, list)) or kind == JSON_VALUE:
        return JSON_VALUE
    if isinstance(value, bool):
        own_type = BOOLEAN
    elif isinstance(value, float):
        own_type = FLOAT
    elif isinstance(value, int) and abs(value) < 2**63:
        own_type = INTEGER if abs(value) <= MAX_EXACT_INTEGER else BIG_INTEGER
    else:
        own_type = STRING
    if kind in (None, own_type):
        return own_type
    types = {kind, own_type}
    return BIG_INTEGER if types == {INTEGER, BIG_INTEGER} else FLOAT if types == {INTEGER, FLOAT} else STRING


def convert_value(value: Any, kind: ColumnType) -> Any:
    """Convert a value to the type of its column."""
    if value is None:
        return None
    if isinstance(kind, dict):
        return {key: convert_value(value[key], inner) for key, inner in kind.items()}
    if isinstance(kind, list):
        return [convert_value(item, kind[0]) for item in value]
    if kind == JSON_VALUE:
        return json.dumps(value)
    if kind == STRING:
        return text_of(value)
    return float(value) if kind == FLOAT else value


def _feature(kind: ColumnType, mixed: Any) -> Any:
    """Return the feature of a column. `mixed`: the feature for values of several types."""
    if isinstance(kind, dict):  # a cast of pyarrow cuts what has its null type in lists of objects
        return {key: _feature(inner or STRING, mixed) for key, inner in kind.items()}
    if isinstance(kind, list):
        return List(_feature(kind[0], mixed))
    if kind == JSON_VALUE:
        return mixed
    return Value("null" if kind is None else INTEGER if kind == BIG_INTEGER else kind)
