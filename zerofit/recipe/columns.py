"""Finds the delimiter and the column names of a data file from its beginning."""

import codecs
import csv
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from zerofit.recipe.files import PACKED, marked_encoding, open_bytes

HEAD_BYTES = 1 << 20  # of a file, read to find its columns
DELIMITERS = {".csv": ",", ".tsv": "\t"}  # by the ending of a file
OTHERS = (",", ";", "\t", "|")  # that files of these endings have too
SENTENCE_MARKS = "。、\uff01\uff1f"  # the last two are the full-width ! and ?
NO_HEADER = " (is the first line a record? A line of names must be before it)"
SEPARATOR_LINE = re.compile('"?sep=.?"?\r?\n')  # Excel's first line of a .csv file, which is no header
WRITTEN = {"tab": "\t", r"\t": "\t"}  # as it is typed


def head_of(path: Path, encodings: Iterable[str | None] = (None,)) -> str | None:
    """The beginning of a file as text; None if it is in none of these encodings.

    Args:
        encodings: to try, in this order; None means UTF-8, or what a byte-order mark stands for.
    """
    with open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    for encoding in encodings:
        try:
            decoder = codecs.getincrementaldecoder(encoding or marked_encoding(head) or "utf-8")()
            text = decoder.decode(head, final=len(head) < HEAD_BYTES)
        except (UnicodeError, LookupError):  # there is no such encoding, which another check says
            continue
        if "\0" not in text:
            text = text.removeprefix("\ufeff")
            return text[separators.end() :] if (separators := SEPARATOR_LINE.match(text)) else text
    return None


def find_delimiter(head: str, ending: str) -> str:
    """Find the delimiter of a .csv or .tsv file: what its ending says; another one where that leaves a header
    of one column, and the other as many columns in the header as in the first record."""
    usual = DELIMITERS[ending]
    if len(first_rows(head, usual, 1)[0]) > 1:
        return usual
    for delimiter in OTHERS:
        header, *record = first_rows(head, delimiter, 2)
        if len(header) > 1 and all(len(fields) == len(header) for fields in record):
            return delimiter
    return usual


def first_rows(head: str, delimiter: str, count: int) -> list[list[str]]:
    """The first rows of a .csv file that are not empty; [[]] of an empty one."""
    csv.field_size_limit(sys.maxsize)  # a text may be longer than csv's limit
    rows = (row for row in csv.reader(head.splitlines(keepends=True), delimiter=delimiter) if row)
    return [row for row, _ in zip(rows, range(count))] or [[]]


def is_value(name: str) -> bool:
    """Return whether the name of a column is rather a value: a sentence or a number."""
    text = name.strip()
    is_sentence = (
        len(text) > 60
        or text.count(" ") > 4
        or text.endswith((".", "!", "?"))
        or any(mark in text for mark in SENTENCE_MARKS)
    )
    return is_sentence or text.replace(".", "", 1).isdigit()


def ending_of(path: Path) -> str:
    """The ending of a file's name that says its format: .csv of a.csv and of A.CSV.gz."""
    return (path.with_suffix("") if path.suffix.lower() in PACKED else path).suffix.lower()
