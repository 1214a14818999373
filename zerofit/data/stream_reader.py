"""Records from shards that need not fit the disk: parquet, JSON lines, WebDataset tars, on a disk or behind an
address.

The datasets library reads them. Here is what makes a read repeatable: a place is (shard, record), a window ends
after a whole batch, and a connection that is lost is opened again at the next record that has not been read.
"""

import asyncio
import functools
import glob
import importlib.util
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset, load_dataset

from zerofit.data.json_files import column_of
from zerofit.recipe.addresses import open_address
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.paths import find_files, is_address

# {ending: the datasets library's reader}; of files without .gz or .zst
READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".tar": "webdataset"}
RECORDS = 64  # of a batch; a window ends after one
PAUSES_S = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60)  # before a lost connection is tried again: about 7 minutes
LOST = (OSError, asyncio.TimeoutError, EOFError)
NOT_LOST = (FileNotFoundError, PermissionError, IsADirectoryError)


@dataclass(frozen=True)
class Shards:
    """The shards of the training data."""

    names: tuple[str, ...]  # paths and addresses, in a fixed order
    sizes: tuple[int, ...]  # in bytes
    reader: str  # the datasets library's

    @property
    def key(self) -> str:
        """Changes with what the shards are; folders may be others on another machine."""
        named = [(name.rpartition("/")[2], size) for name, size in zip(self.names, self.sizes)]
        return sha256(repr(named).encode()).hexdigest()[:16]


# (a shard by its place in the order of a pass, the records of it that have been read): where the next record is
Place = tuple[int, int]


@functools.cache
def find_shards(patterns: tuple[str, ...]) -> Shards:
    """The shards that paths, addresses and globs name. A process lists them once: new ones may come meanwhile. Raises
    UserError: something is missing, or of another format."""
    names: list[str] = []
    sizes: list[int] = []
    for pattern in patterns:
        if not is_address(pattern):
            files = find_files("train_file", [pattern])
            names += map(str, files)
            sizes += [file.stat().st_size for file in files]
            continue
        system, path = open_address("train_file", pattern)
        try:
            found = sorted(system.glob(path)) if any(mark in path for mark in "*?[") else [path]
            sizes += [system.size(name) or 0 for name in found]
        except Exception as error:  # each store has its own
            raise UserError(f"train_file = {pattern!r} cannot be read: {first_line(error)}") from None
        names += map(system.unstrip_protocol, found)
    if not names:
        raise UserError(f"train_file = {' '.join(patterns)}: no file matches")
    readers = {name: READERS.get(_ending(name)) for name in names}
    for name, reader in readers.items():
        if reader is None or reader != readers[names[0]]:
            raise UserError(f"streaming: {name} is not {' or '.join(READERS)}, or not of one format with {names[0]}")
    if any(name.endswith(".zst") for name in names) and not importlib.util.find_spec("zstandard"):
        raise UserError("streaming: .zst files need a package: pip install zstandard")
    return Shards(tuple(names), tuple(sizes), READERS[_ending(names[0])])


def _ending(name: str) -> str:
    return next((suffix for suffix in reversed(Path(name).suffixes) if suffix not in (".gz", ".zst")), "").lower()


def read_window(shards: Shards, order: list[int], start: Place, size: int) -> tuple[pa.Table, Place | None]:
    """Return (records from a place on, where the next ones are), about `size` bytes of them, those of a shard
    together. Raises UserError: a shard is gone, cannot be read, or its connection stays lost.

    Args:
        order: numbers of the shards, as they are read.

    Returns:
        None as the second: all shards have been read.
    """
    read, taken, (shard, record) = dict[int, list[pa.Table]](), 0, start
    while shard < len(order):
        for table in _batches(shards, order[shard], record):
            if taken >= size:  # and there is more
                return _joined(shards, read), (shard, record)
            read.setdefault(order[shard], []).append(table)
            taken += sum(pa.ipc.get_record_batch_size(batch) for batch in table.to_batches())
            record += len(table)
        shard, record = shard + 1, 0
    return _joined(shards, read), None


def _joined(shards: Shards, read: dict[int, list[pa.Table]]) -> pa.Table:
    """Join records in the order of the shards' numbers, so that one window of all data is the data as a run without
    windows reads it."""
    tables = [table for number in sorted(read) for table in read[number]]
    if not tables:
        return pa.table({})
    with suppress(pa.ArrowException):
        return pa.concat_tables(tables, promote_options="permissive")
    types: dict[str, set[pa.DataType]] = {}  # a table of JSON has those of its first megabytes
    for field in chain.from_iterable(table.schema for table in tables):
        types.setdefault(field.name, set()).add(field.type)
    different = {name: kinds for name, kinds in types.items() if len(kinds) > 1}
    if shards.reader != "json" or any(map(_has_dates_within, chain.from_iterable(different.values()))):
        names = f"{shards.names[min(read)]} and the other shards of a window"
        found = ", ".join(f"{name} ({' or '.join(sorted(map(str, kinds)))})" for name, kinds in different.items())
        raise UserError(f"streaming: {names} differ in {found}. Write values of one type")
    alike = [table.drop_columns([name for name in different if name in table.column_names]) for table in tables]
    same = pa.concat_tables(alike, promote_options="permissive")
    return pa.table({name: column_of(_values(tables, name)) if name in different else same[name] for name in types})


def _has_dates_within(kind: pa.DataType) -> bool:
    return "timestamp" in str(kind) and not pa.types.is_timestamp(kind)


def _values(tables: list[pa.Table], name: str) -> Iterator[Any]:
    """The values of a column, null where a table has none, or dates, of which the reader does not keep the text."""
    for table in tables:
        has_some = name in table.column_names and not pa.types.is_timestamp(table.schema.field(name).type)
        yield from Dataset(table.select([name]))[name] if has_some else [None] * len(table)


def _batches(shards: Shards, number: int, record: int) -> Iterator[pa.Table]:
    """The records of a shard from one on. A lost connection is opened again at the record that would come next."""
    name, pauses = shards.names[number], iter(PAUSES_S)
    while True:
        try:
            for batch in _open(shards.reader, name).skip(record).iter(batch_size=RECORDS):
                table = pa.table(batch)
                table.validate(full=True)  # the library lets bytes through that are not UTF-8
                yield table
                record, pauses = record + len(table), iter(PAUSES_S)
            return
        except NOT_LOST as error:
            raise UserError(f"train_file: {name} cannot be read: {first_line(error)}") from None
        except Exception as error:  # the library raises a dozen types
            of_aiohttp = type(error).__module__.partition(".")[0] == "aiohttp"  # which opens addresses
            if not (of_aiohttp or isinstance(error, LOST)):
                raise UserError(f"{name}, after record {record}: {first_line(error.__cause__ or error)}") from None
            pause = next(pauses, None)
            if pause is None:
                raise UserError(f"train_file: {name} cannot be read, tried for minutes: {first_line(error)}") from None
            time.sleep(pause)


def _open(reader: str, name: str) -> IterableDataset:
    name = name if is_address(name) else glob.escape(name)  # the library searches for names of files
    stream = load_dataset(reader, data_files={"train": [name]}, split="train", streaming=True)
    return stream if reader == "webdataset" else stream.with_format("arrow")  # whose tables differ in their columns
