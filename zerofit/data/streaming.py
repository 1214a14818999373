"""Training samples from shards that need not fit the disk (parquet, JSON lines, WebDataset tars, on a disk or at
an address): windows of records, each of which is prepared and shuffled like a data set of its own.

The datasets library reads them. This module makes reading repeatable: a position is (shard, record), a window
ends after a whole batch, and a lost connection is opened again at the next record that has not been read.

A pass reads the shards in an order drawn from (seed, pass), and cuts their records into windows of about the same
number of bytes; a window's samples are permuted by (seed, pass, window). So the order follows from the shards, the
seed and the size of a window alone, and the position is one number. Where a window holds all data, the order is that
of a run without streaming.

The first process of a machine that needs a window reads it, and the others map its files. Where each window begins is
written to the run's folder, so that a resumed run need not read those before its own.
"""

import asyncio
import functools
import glob
import importlib.util
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, load_dataset
from filelock import FileLock

from zerofit.data.pack import Sample, SampleSet
from zerofit.data.tables import set_table_key
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import atomic_file, format_suffix, parse_object
from zerofit.recipe.paths import find_files, is_address, open_address

# {ending: the datasets library's reader}; of packed files by the ending before .gz, .zst and so on
READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".tar": "webdataset"}
RECORDS_PER_BATCH = 64  # a window ends after a whole batch
RETRY_PAUSES_S = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60)  # between attempts to reopen a connection: 7 minutes
CONNECTION_ERRORS = (OSError, asyncio.TimeoutError, EOFError)
FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)
# (a shard by its place in the order of a pass, the records of it that have been read): where the next record is
ShardPlace = tuple[int, int]
MAX_OPEN_WINDOWS = 4  # windows whose files a process keeps mapped
LAG_UPDATES = 16  # ranks and their loaders may be this far apart: files are removed this much later
Prepare = Callable[[Dataset, str, Path], SampleSet]


@dataclass(frozen=True)
class Shards:
    """The shards of the training data."""

    names: tuple[str, ...]  # paths and addresses, in a fixed order
    sizes: tuple[int, ...]  # in bytes
    reader: str  # the datasets library's

    @property
    def key(self) -> str:
        """Return a hash of the shards' file names and sizes; folders may differ on another machine."""
        names_and_sizes = [(name.rpartition("/")[2], size) for name, size in zip(self.names, self.sizes)]
        return sha256(repr(names_and_sizes).encode()).hexdigest()[:16]


@functools.cache
def find_shards(patterns: tuple[str, ...]) -> Shards:
    """Find the shards that paths, addresses and globs name. A process lists them once, since new ones may appear
    during the run. Raises UserError: something is missing, or of another format."""
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
            matches = sorted(system.glob(path)) if any(mark in path for mark in "*?[") else [path]
            sizes += [system.size(name) or 0 for name in matches]
        except Exception as error:  # each store has its own
            raise UserError(f"train_file = {pattern!r} cannot be read: {first_line(error)}") from None
        names += map(system.unstrip_protocol, matches)
    if not names:
        raise UserError(f"train_file = {' '.join(patterns)}: no file matches")
    readers = {name: READERS.get(format_suffix(Path(name))) for name in names}
    for name, reader in readers.items():
        if reader is None or reader != readers[names[0]]:
            raise UserError(f"streaming: {name} is not {' or '.join(READERS)}, or not of one format with {names[0]}")
    if any(name.endswith(".zst") for name in names) and not importlib.util.find_spec("zstandard"):
        raise UserError("streaming: .zst files need a package: pip install zstandard")
    return Shards(tuple(names), tuple(sizes), READERS[format_suffix(Path(names[0]))])


def read_window(shards: Shards, order: list[int], start: ShardPlace, size: int) -> tuple[pa.Table, ShardPlace | None]:
    """Return (about `size` bytes of records from `start` on, the position of the next record); the records of a shard
    stay together. Raises UserError: a shard is missing, cannot be read, or its connection stays lost.

    Args:
        order: numbers of the shards, as they are read.

    Returns:
        None as the second: all shards have been read.
    """
    read: dict[int, list[pa.Table]] = {}
    num_bytes = 0
    following = None
    shard, record = start
    while shard < len(order) and following is None:
        for table in _shard_tables(shards, order[shard], record):
            if num_bytes >= size:  # and there is more
                following = shard, record
                break
            read.setdefault(order[shard], []).append(table)
            num_bytes += sum(pa.ipc.get_record_batch_size(batch) for batch in table.to_batches())
            record += len(table)
        shard = shard + 1
        record = 0
    # In the order of the shards' numbers: one window of all data is the data as a run without windows reads it.
    tables = [table for number in sorted(read) for table in read[number]]
    try:
        return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({}), following
    except pa.ArrowException:
        types: dict[str, set[str]] = {}
        for field in chain.from_iterable(table.schema for table in tables):
            types.setdefault(field.name, set()).add(str(field.type))
        names = f"{shards.names[min(read)]} and the other shards of a window"
        differences = [f"{name} ({' or '.join(sorted(kinds))})" for name, kinds in types.items() if len(kinds) > 1]
        raise UserError(f"streaming: {names} differ in {', '.join(differences)}. Write values of one type") from None


def _shard_tables(shards: Shards, number: int, record: int) -> Iterator[pa.Table]:
    """Yield the records of a shard from number `record` on. A lost connection is opened again at the next record."""
    name = shards.names[number]
    pauses = iter(RETRY_PAUSES_S)
    file = name if is_address(name) else glob.escape(name)  # the library searches for names of files
    while True:
        try:
            stream = load_dataset(shards.reader, data_files={"train": [file]}, split="train", streaming=True)
            if shards.reader != "webdataset":  # whose tables differ in their columns
                stream = stream.with_format("arrow")
            for batch in stream.skip(record).iter(batch_size=RECORDS_PER_BATCH):
                table = pa.table(batch)
                table.validate(full=True)  # the library lets bytes through that are not UTF-8
                yield table
                record = record + len(table)
                pauses = iter(RETRY_PAUSES_S)
            return
        except FINAL_ERRORS as error:
            raise UserError(f"train_file: {name} cannot be read: {first_line(error)}") from None
        except Exception as error:  # the library raises a dozen types
            of_aiohttp = type(error).__module__.partition(".")[0] == "aiohttp"  # it opens addresses
            if not (of_aiohttp or isinstance(error, CONNECTION_ERRORS)):
                raise UserError(f"{name}, after record {record}: {first_line(error.__cause__ or error)}") from None
            pause = next(pauses, None)
            if pause is None:
                raise UserError(f"train_file: {name} cannot be read, tried for minutes: {first_line(error)}") from None
            time.sleep(pause)


@dataclass(frozen=True)
class Window:
    """Records that are shuffled together. `shard, record`: where the window begins: the position of the shard in the
    order of the pass, and the number of its earlier records."""

    number: int = 0  # in the run
    turn: int = 0  # number of earlier passes over the shards
    index: int = 0  # number of the window in the pass
    shard: int = 0
    record: int = 0
    first: int = 0  # number of samples in earlier windows
    samples: int = 0  # number of its samples; 0: it has not been read

    @property
    def end(self) -> int:
        return self.first + self.samples


class StreamedSamples:
    """The samples of a stream, numbered by their place in the run, and the order of the run. Windows are prepared when
    they are needed: the first process makes their tables, and the others map them. Raises UserError: the file of
    windows belongs to other shards."""

    lengths = sort_key = None

    def __init__(
        self,
        shards: Shards,
        folder: Path,  # for the files of windows, on this machine
        size: int,  # bytes of records in a window
        seed: int,
        prepare: Prepare,  # (records, their name in messages, folder for tables) -> their samples
        *,
        total: int,  # samples of the run
        lag: int,  # updates after which no process reads a sample any more
        table: Path,  # the file of the windows that are known
        resumes: bool = True,  # True: the run may continue the earlier run in the table
        earlier: Path | None = None,  # the table of the run whose checkpoint is resumed, if this run has none yet
    ):
        self.shards = shards
        self.folder = folder
        self.size = size
        self.seed = seed
        self.prepare = prepare
        self.table = table
        self.total = total
        self.lag = lag
        self.made_of = {"shards": shards.key, "seed": seed, "window": size}  # the order follows from these
        self.known = self._read_table(resumes, earlier)  # the windows that have been read, from the first one on
        self._written = len(self.known)
        self._opened: dict[int, tuple[SampleSet, np.ndarray]] = {}
        self._adding = threading.Lock()
        self.stats = self.open(self.known[-1] if self.known else Window())[0].stats  # statistics of one window only
        self._ahead: threading.Thread | None = None

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        window = self.at(index)
        samples, drawn = self.open(window)
        return samples[int(drawn[index - window.first])]

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the places themselves. Their windows are read now, and the next window is read ahead."""
        last = self.at(stop - 1)
        for window in self.known[self.at(start).number : last.number + 1]:
            self.open(window)
        for window in reversed(self.known):
            if window.end <= start - self.lag * (stop - start):
                if not self._folder(window).exists():  # earlier windows are removed, too
                    break
                shutil.rmtree(self._folder(window), ignore_errors=True)
        if self._ahead is None or not self._ahead.is_alive():
            self._ahead = threading.Thread(target=self._read_ahead, args=(last,), daemon=True)
            self._ahead.start()
        if os.environ.get("RANK", "0") == "0" and len(known := list(self.known)) > self._written:
            with atomic_file(self.table) as file:
                file.writelines(json.dumps(line) + "\n" for line in (self.made_of, *map(asdict, known)))
            self._written = len(known)
        return np.arange(start, stop)

    def _read_ahead(self, window: Window) -> None:
        with suppress(Exception):  # it is raised again where the window is needed
            self.open(self.after(window))

    def at(self, position: int) -> Window:
        """Return the window of a sample. Earlier windows that are not known yet are read."""
        while not self.known or self.known[-1].end <= position:
            self.open(self.after(self.known[-1]) if self.known else Window())
        place = np.searchsorted([window.first for window in self.known], position, side="right")
        return self.known[int(place) - 1]

    def after(self, window: Window) -> Window:
        """Return the window that follows `window`."""
        marker = self._folder(window) / "next.json"
        if not marker.exists():
            self._opened.pop(window.number, None)
            self.open(window)
        following = json.loads(marker.read_text())
        if following is None:
            return Window(window.number + 1, window.turn + 1, first=window.end)
        return Window(window.number + 1, window.turn, window.index + 1, **following, first=window.end)

    def open(self, window: Window) -> tuple[SampleSet, np.ndarray]:
        """Return (the samples of a window, the order in which they come)."""
        opened = self._opened.get(window.number)
        if opened is not None:
            return opened
        folder = self._folder(window)
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            folder.mkdir(exist_ok=True)
            records = folder / "records.arrow"
            count = len(self.shards.names)
            order = np.random.default_rng([self.seed, window.turn, count, 1]).permutation(count).tolist()
            if not records.exists():
                table, following = read_window(self.shards, order, (window.shard, window.record), self.size)
                if not len(table):
                    raise UserError(f"streaming: {self.shards.names[0]} and the other shards hold no record")
                with atomic_file(folder / "next.json") as file:
                    json.dump(following and {"shard": following[0], "record": following[1]}, file)
                with atomic_file(records, "wb") as file, pa.ipc.new_stream(file, table.schema) as written:
                    written.write_table(table)
            shard = self.shards.names[order[window.shard]]
            name = f"the window of the stream from record {window.record + 1} of {shard} on"
            table = set_table_key(Dataset.from_file(str(records)), *self.made_of.values(), window.number)
            samples = self.prepare(table, name, folder)
        drawn = np.random.default_rng([self.seed, window.turn, window.index]).permutation(len(samples))
        opened = self._opened[window.number] = samples, drawn
        for number in list(self._opened)[:-MAX_OPEN_WINDOWS]:  # the windows that were opened first
            self._opened.pop(number, None)
        with self._adding:
            if window.number == len(self.known):
                self.known.append(replace(window, samples=len(samples)))
        return opened

    def _folder(self, window: Window) -> Path:
        return self.folder / f"window-{window.number:06d}"

    def _read_table(self, resumes: bool, earlier: Path | None) -> list[Window]:
        """Read the list of known windows, up to the first damaged line: later windows are read again."""
        tables = (table for table in (self.table, earlier) if table is not None and table.is_file())
        table = next(tables, self.table)
        lines = table.read_bytes().split(b"\n") if table.is_file() else []
        made_of = (lines and parse_object(lines[0])) or {}
        if made_of.get("shards", self.made_of["shards"]) != self.made_of["shards"] and resumes:
            raise UserError(
                f"train_file: the shards are others (names, sizes) than those of {table}. Restore them, or begin "
                "again with --resume never"
            )
        if made_of != self.made_of:  # the table is of a run that this one replaces
            return []
        windows: list[Window] = []
        for line in (parse_object(text) or {} for text in lines[1:]):
            counts = line.keys() == asdict(Window()).keys() and all(type(count) is int for count in line.values())
            if not counts or line["number"] != len(windows) or line["first"] != (windows[-1].end if windows else 0):
                break
            windows.append(Window(**line))
        return windows
