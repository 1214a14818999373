"""Convert files for the readers: to UTF-8, Excel files to .csv, and JSON objects to their records alone. The converted
file is cached."""

import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pandas as pd

from zerofit.data.encodings import as_utf8, is_utf8, open_bytes
from zerofit.data.options import DataFiles
from zerofit.recipe.columns import ending_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import atomic_file
from zerofit.recipe.parsing import parse_json


def plain_files(paths: list[Path], kind: str, data: DataFiles, of_another_source: bool = False) -> list[Path]:
    """The files themselves, or converted copies if there is an `encoding` or a `field`.

    Args:
        of_another_source: the `encoding` may be that of the training data only: a UTF-8 file is read as UTF-8.

    Raises:
        UserError: a file is not in that encoding, is no JSON, or has no such key; the option is not for such files.
    """
    if data.encoding and kind in ("parquet", "xlsx"):
        raise UserError(f"encoding = {data.encoding!r} has no effect on .{kind} files, which state theirs. Remove it")
    if data.delimiter and kind not in ("csv", "tsv"):
        raise UserError(f"delimiter = {data.delimiter!r}: it is for .csv files, and {paths[0]} is {kind}. Remove it")
    if data.field and kind != "json":
        raise UserError(f"field = {data.field!r}: it is for .json files, and {paths[0]} is {kind}. Remove it")
    if kind == "xlsx":
        return [_cached(path, data, ".csv", lambda path=path: [_first_sheet(path)]) for path in paths]
    if not (data.encoding or data.field):
        return paths
    encodings = [None if of_another_source and is_utf8(path) else data.encoding for path in paths]
    return [_plain(*both, data) if both[1] or data.field else both[0] for both in zip(paths, encodings)]


def _plain(path: Path, encoding: str | None, data: DataFiles) -> Path:
    def portions() -> Iterator[bytes]:
        with open_bytes(path) as file:
            portions = as_utf8(file, encoding, path) if encoding else file
            yield from _records(portions, data.field, path) if data.field else portions

    return _cached(path, data, ".jsonl" if data.field else ending_of(path), portions, encoding)


def _cached(
    path: Path,
    data: DataFiles,
    ending: str,
    portions: Callable[[], Iterable[bytes]],
    encoding: str | None = None,
) -> Path:
    """The file in the cache that these portions are written to, once."""
    file_stat = path.stat()
    what = (str(path), file_stat.st_size, file_stat.st_mtime_ns, encoding, data.field)
    place = data.cache.folder / f"plain-{sha256(repr(what).encode()).hexdigest()[:32]}{ending}"
    if not place.exists():
        with atomic_file(place, "wb") as written:
            for portion in portions():
                written.write(portion)
    return place


def _first_sheet(path: Path) -> bytes:
    """The first sheet of an Excel file as .csv."""
    try:
        sheet = pd.read_excel(path, dtype=str, keep_default_na=False, engine="openpyxl")
    except ImportError:
        raise UserError(
            f"{path}: pandas reads .xlsx files with openpyxl, which is not installed. Type pip install openpyxl, or "
            "save it as .csv (UTF-8)"
        ) from None
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
        for row in _questions(record) if isinstance(record, dict) and "paragraphs" in record else [record]:
            yield json.dumps(row if isinstance(row, dict) else {"text": row}, ensure_ascii=False).encode() + b"\n"


def _questions(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The questions of an article in SQuAD's files, as records of the hub (Rajpurkar et al. 2016)."""
    for paragraph in article["paragraphs"]:
        for question in paragraph.get("qas", []):
            answers = [answer["text"] for answer in question.get("answers", [])]
            yield {"context": paragraph["context"], "question": question["question"], "answers": {"text": answers}}
