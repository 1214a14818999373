"""What .csv and .tsv files have: a delimiter, quotes, columns of texts."""

import csv
import io
import re
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, Value

from zerofit.data.tables import select
from zerofit.recipe.columns import ending_of, find_delimiter, first_rows, head_of
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import open_bytes

QUOTED = r'(?<![^{0}])"(?:[^"]|"")*"(?![^{0}])'  # a field; {0} is what separates fields


def with_delimiter(paths: list[Path], kwargs: dict[str, Any], delimiter: str | None) -> dict[str, Any]:
    """The arguments of the reader of .csv and .tsv files, with the delimiter of these files."""
    if delimiter is None and "names" not in kwargs and (head := head_of(paths[0], [kwargs["encoding"]])):
        delimiter = find_delimiter(head, ending_of(paths[0]))
    return {**kwargs, "sep": delimiter} if delimiter else kwargs


def check_fields(path: Path, kwargs: dict[str, Any]) -> tuple[list[str], bool]:
    """(notes on the lines that pandas reads in another way than they are meant, each kind counted; whether some repeat
    the header, as `cat a.csv b.csv` leaves them). In a table of one column such a line may be a text.

    Raises:
        UserError: there is no record, or the first has more fields than the header: pandas would drop the first.
    """
    csv.field_size_limit(sys.maxsize)
    header, count = list(kwargs.get("names") or []), 0
    short, broken, repeated = list[int](), list[int](), list[int]()
    with open_bytes(path) as file:
        lines = csv.reader(
            io.TextIOWrapper(file, encoding=kwargs["encoding"], newline=""),
            delimiter=kwargs.get("sep", ","),
            quoting=kwargs.get("quoting", csv.QUOTE_MINIMAL),
            skipinitialspace=kwargs.get("skipinitialspace", False),
            strict=True,
        )
        for fields in _rows(lines):
            if fields and not header:
                header = fields
                continue
            count += fields != []
            if fields is None:
                broken.append(lines.line_num)
            elif count == 1 and len(fields) > len(header):
                names = ", ".join(header)
                raise UserError(
                    f"{path}: {len(fields)} fields, {len(header)} columns ({names}). Quote texts, or set delimiter"
                )
            elif fields and len(fields) < len(header):
                short.append(lines.line_num)
            elif len(header) > 1 and [fields[0].lstrip("\ufeff"), *fields[1:]] == header:
                repeated.append(lines.line_num)
    if not count:
        raise UserError(f"{path} has a header ({', '.join(header)}) and no record")
    again = [name for place, name in enumerate(header) if name in header[:place]]
    found = {
        f"fewer than {len(header)} fields, the others are empty": short,
        'text after a closing quote; inside quotes write ""': broken,
        "the header once more, left out": repeated,
    }
    notes = [f"note      {path}: {what} ({_lines(places)})" for what, places in found.items() if places]
    notes += [
        f"note      {path}: of the columns {name} the first is read" for name in dict.fromkeys(filter(None, again))
    ]
    return notes, bool(repeated)


def _rows(lines: Any) -> Iterator[list[str] | None]:
    """The rows of a csv.reader; None for one that it cannot read."""
    while True:
        try:
            yield next(lines)
        except StopIteration:
            return
        except csv.Error:
            yield None


def _lines(places: list[int]) -> str:
    return f"line {places[0]:,}" + (f" and {len(places) - 1:,} more" if len(places) > 1 else "")


def text_features(path: Path, kwargs: dict[str, Any]) -> Features:
    """The columns of a .csv file, all as text, so that values stay as they are written. The datasets library would
    infer types from the first 10,000 rows."""
    columns = pd.read_csv(path, nrows=0, **kwargs).columns
    return Features(dict.fromkeys(columns, Value("string")))


def without_headers(table: Dataset) -> Dataset:
    """The records of a table that are not its column names."""
    texts = pa.table([pc.utf8_ltrim(column, "\ufeff") for column in table.data.columns], names=table.column_names)
    are_names = reduce(pc.and_kleene, map(pc.equal, texts.columns, table.column_names)).fill_null(False)
    return select(table, np.flatnonzero(~are_names.to_numpy()))


# -------------------------------------------------------------------------------------------------------------- quotes


def with_quoting(path: Path, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(the arguments of the reader of a .csv or .tsv file, with the quoting of this file; a note about it, if any)."""
    if kwargs.get("quoting") != csv.QUOTE_NONE:
        if not _has_blanks_before_quotes(path, kwargs):
            return kwargs, ""
        return {**kwargs, "skipinitialspace": True}, f'note      {path}: blanks before a field are left out: a, "b"'
    is_quoted = has_quoted_fields(path, kwargs)
    if is_quoted is None:
        return kwargs, ""
    if is_quoted:
        note = f"note      {path}: double quotes enclose fields, as pandas writes them"
        return {**kwargs, "quoting": csv.QUOTE_MINIMAL}, note
    return kwargs, f"note      {path}: double quotes are parts of the texts, they enclose no fields"


def _has_blanks_before_quotes(path: Path, kwargs: dict[str, Any]) -> bool:
    """Whether fields are written as in `a, "b"`, where the quotes enclose the field: no program writes a text so that
    begins with a blank and a quote, and none goes on behind the quote that ends it."""
    head = head_of(path, [kwargs["encoding"]]) or ""
    if not re.search(rf'{re.escape(kwargs.get("sep", ","))} +"(?!")', head):
        return False
    rows = first_rows(head, kwargs.get("sep", ","), len(head))
    begun = [field.strip() for row in rows for field in row if re.match(' +"', field)]
    return bool(begun) and all(field[1:].endswith('"') or '"' not in field[1:] for field in begun)


def has_quoted_fields(path: Path, kwargs: dict[str, Any]) -> bool | None:
    """Whether the fields of a .tsv file are quoted as pandas and Excel quote them; False: they are texts with quotes
    in them, as GLUE's. None: there is no quote.

    All quotes must pair up: a field that begins with one ends with one, has those inside doubled, and no other field
    has any. There must also be a reason for them: a doubled quote, a line break, or what separates fields; a quoted
    header; a column of which all fields are quoted; or commas, which Excel quotes too, in all of these fields and in
    no other. Where every line has as many fields as the first, line breaks are none of the fields'.
    """
    delimiter, width, lines_fit = kwargs["sep"], 0, True
    field, lines, num_quotes = re.compile(QUOTED.format(re.escape(delimiter))), list[str](), 0
    line_width, seen, is_broken, is_doubled = None, False, False, False
    of_header, always, num_records, commas, other_commas = False, None, 0, True, False
    with open_bytes(path) as file:
        for line in io.TextIOWrapper(file, encoding=kwargs["encoding"]):
            line_width = line.count(delimiter) if line_width is None else line_width
            lines_fit = lines_fit and (line == "\n" or line.count(delimiter) == line_width)
            lines.append(line)
            num_quotes += line.count('"')
            if num_quotes % 2:  # a field goes on in the next line
                continue
            record, lines = "".join(lines).removesuffix("\n"), []
            if not record:
                continue
            quoted = field.findall(record) if '"' in record else []
            others = field.sub("\0", record) if quoted else record
            fields = others.split(delimiter)
            width = width or len(fields)
            if '"' in others or (quoted and len(fields) != width):
                return False
            places = {place for place, text in enumerate(fields) if text == "\0"}
            if num_records or kwargs.get("names"):
                always = places if always is None else always & places
            else:
                of_header = bool(quoted)
            num_records += 1
            seen = seen or bool(quoted)
            is_doubled = is_doubled or any('""' in text[1:-1] for text in quoted)
            is_broken = is_broken or any(delimiter in text or "\n" in text for text in quoted)
            commas = commas and all("," in text for text in quoted)
            other_commas = other_commas or "," in others
    if lines:
        return False
    if not seen:
        return None
    if is_broken and lines_fit and line_width:
        return False
    return is_doubled or is_broken or of_header or bool(always) or (commas and not other_commas)
