"""The formats of data files, by their endings, and what is wrong with a file that cannot be read."""

import csv
import io
import json
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as parquet
from datasets import Features, Value

from zerofit.data.encodings import open_bytes, proposal
from zerofit.recipe.columns import HEAD_BYTES, ending_of, find_delimiter, head_of
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import TOO_DEEP, parse_json

LONGEST_LINE = 32 << 20  # bytes
MOST_COLUMNS = 4096
FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".xlsx": "xlsx", ".parquet": "parquet",
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tokens": "text", ".py": "text", ".tex": "text",
}  # fmt: skip
CSV = {"encoding": "utf-8-sig", "keep_default_na": False}  # "None" and "NA" are words, and Excel writes a BOM
BUILDERS = {
    "csv": ("csv", CSV),
    "tsv": ("csv", {**CSV, "sep": "\t", "quoting": 3}),
    "xlsx": ("csv", CSV),
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
    if delimiter is None and "names" not in kwargs and (head := head_of(paths[0])) is not None:
        delimiter = find_delimiter(head, ending_of(paths[0]))
    return {**kwargs, "sep": delimiter} if delimiter else kwargs


def check_size(path: Path, kind: str) -> None:
    """Raises UserError if a file cannot be read in bounded time and memory: too many columns, or a line that is too
    long or nested too deeply. Of lines the beginning of the file is read."""
    if kind == "parquet":
        check_columns(path, parquet.read_schema(path).names)
    if ending_of(path) != ".jsonl":
        return
    with open_bytes(path) as file:
        head = file.read(LONGEST_LINE + 1)
    if len(head) > LONGEST_LINE and b"\n" not in head:
        raise UserError(
            f"{path}: its first line is longer than {LONGEST_LINE >> 20} MiB. A .jsonl has a record in each line: cut "
            "this one into several"
        )
    for number, line in enumerate(head[:HEAD_BYTES].splitlines() or [b""], 1):
        try:
            parse_json(line)
        except json.JSONDecodeError as error:
            if error.msg == TOO_DEEP:
                raise UserError(f"{path}, line {number}: its record is {TOO_DEEP}") from None
        except UnicodeDecodeError:  # which is said where the file is read
            return


def check_columns(path: Path, names: list[str]) -> None:
    """Raises UserError if there are too many."""
    if len(names) > MOST_COLUMNS:
        raise UserError(f"{path} has {len(names):,} columns, and {MOST_COLUMNS:,} can be read. Keep those you need")


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
    check_columns(path, header)
    if record is None:
        raise UserError(f"{path} has a header ({', '.join(header)}) and no record")
    if len(record) > len(header):
        raise UserError(
            f"{path}: its first record has {len(record)} fields and there are {len(header)} columns "
            f"({', '.join(header)}). Put quotes around texts that contain the separator, or name another separator "
            "with --delimiter"
        )


def text_features(path: Path, kwargs: dict) -> Features:
    """The columns of a .csv file, all as text. The datasets library infers types from the first 10,000 rows and fails
    if a column of numbers has a word or an empty value after them."""
    columns = pd.read_csv(path, nrows=0, **kwargs).columns
    return Features(dict.fromkeys(columns, Value("string")))
