"""Training samples from a stream of records: windows, each of which is prepared and shuffled like a data set of its
own.

A pass reads the shards in an order drawn from (seed, pass), and cuts their records into windows of about the same
number of bytes; a window's samples are permuted by (seed, pass, window). So the order follows from the shards, the
seed and the size of a window alone, and the position is one number. Where a window holds all data, the order is that
of a run without streaming.

The first process of a machine that needs a window reads it, and the others map its files. Where each window begins is
written to the run's folder, so that a resumed run need not read those before its own.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset
from filelock import FileLock

from zerofit.data.pack import Sample, SampleSet
from zerofit.data.stream_reader import Shards, read_window
from zerofit.data.tables import keyed
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.recipe.parsing import object_of

OPENED = 4  # windows of which a process keeps the files mapped
LAG_UPDATES = 16  # that ranks and their loaders may be apart: files are removed so much later
Prepare = Callable[[Dataset, str, Path], SampleSet]


@dataclass(frozen=True)
class Window:
    """Records that are shuffled together. `shard, record`: where it begins: the shard by its place in the
    order of its pass, and the records of it before."""

    number: int = 0  # in the run
    turn: int = 0  # passes over the shards before it
    index: int = 0  # in its pass
    shard: int = 0
    record: int = 0
    first: int = 0  # samples before it
    samples: int = 0  # its own; 0: it has not been read

    @property
    def end(self) -> int:
        return self.first + self.samples


class StreamedSamples:
    """The samples of a stream, numbered by their place in the run; their order at the same time. Windows are made as
    they are needed. Each process has them, and finds the tables that the first one has made. Raises UserError: the
    file of windows is of other shards.

    Args:
        prepare: (records, what they are called in messages, folder for tables) -> their samples.
        earlier: the file of windows of the run whose checkpoint is named to resume from, for where this run has none
            yet.

    Attributes:
        made_of: shards, seed and size of a window: what the order follows from, whatever the length of the run.
        known: the windows that have been read, from the first one on.
        reads_ahead: whether the next window is prepared in a thread. Not where that takes code which may only run
            under the limits of the main thread (zerofit/model/chat.py).
    """

    lengths = None
    sort_key = None

    def __init__(
        self,
        shards: Shards,
        folder: Path,  # for the files of windows, on this machine
        size: int,  # of a window, in bytes of its records
        seed: int,
        prepare: Prepare,
        *,
        total: int,  # samples of the run
        lag: int,  # updates after which no process reads a sample any more
        table: Path,  # the file of the windows that are known
        resumes: bool = True,  # whether the run may continue that of the table
        earlier: Path | None = None,
    ):
        self.shards, self.folder, self.size, self.seed = shards, folder, size, seed
        self.prepare, self.table, self.total, self.lag = prepare, table, total, lag
        self.made_of = {"shards": shards.key, "seed": seed, "window": size}
        self.known = self._read_table(resumes, earlier)
        self._written = len(self.known)
        self._opened: dict[int, tuple[SampleSet, np.ndarray]] = {}
        self._adding = threading.Lock()
        self.stats = self.open(self.known[-1] if self.known else Window())[0].stats  # those of all are not known
        self.reads_ahead = True
        self._ahead: threading.Thread | None = None

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        window = self.at(index)
        samples, drawn = self.open(window)
        return samples[int(drawn[index - window.first])]

    def indices(self, start: int, stop: int) -> np.ndarray:
        """The places themselves. The windows that hold them are there from now on, and the next one is read ahead."""
        last = self.at(stop - 1)
        for window in self.known[self.at(start).number : last.number + 1]:
            self.open(window)
        for window in reversed(self.known):
            if window.end <= start - self.lag * (stop - start):
                if not self._folder(window).exists():  # nor have those before it
                    break
                shutil.rmtree(self._folder(window), ignore_errors=True)
        if self.reads_ahead and (self._ahead is None or not self._ahead.is_alive()):
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
        """The window that has a sample. Windows before it that are not known are read."""
        while not self.known or self.known[-1].end <= position:
            self.open(self.after(self.known[-1]) if self.known else Window())
        place = np.searchsorted([window.first for window in self.known], position, side="right")
        return self.known[int(place) - 1]

    def after(self, window: Window) -> Window:
        """The window that follows another one."""
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
        found = self._opened.get(window.number)
        if found is None:
            samples = self._samples(window)
            drawn = np.random.default_rng([self.seed, window.turn, window.index]).permutation(len(samples))
            found = self._opened[window.number] = samples, drawn
            for number in list(self._opened)[:-OPENED]:  # those opened first
                self._opened.pop(number, None)
            with self._adding:
                if window.number == len(self.known):
                    self.known.append(replace(window, samples=len(samples)))
        return found

    def _folder(self, window: Window) -> Path:
        return self.folder / f"window-{window.number:06d}"

    def _samples(self, window: Window) -> SampleSet:
        folder = self._folder(window)
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            folder.mkdir(exist_ok=True)
            records = folder / "records.arrow"
            if not records.exists():
                self._read(window, records)
            shard = self.shards.names[self._order(window.turn)[window.shard]]
            name = f"the window of the stream from record {window.record + 1} of {shard} on"
            table = keyed(Dataset.from_file(str(records)), *self.made_of.values(), window.number)
            return self.prepare(table, name, folder)

    def _read(self, window: Window, file: Path) -> None:
        place = window.shard, window.record
        table, following = read_window(self.shards, self._order(window.turn), place, self.size)
        if not len(table):
            raise UserError(f"streaming: {self.shards.names[0]} and the other shards hold no record")
        with atomic_file(file.with_name("next.json")) as written:
            json.dump(following and {"shard": following[0], "record": following[1]}, written)
        with atomic_file(file, "wb") as written, pa.ipc.new_stream(written, table.schema) as stream:
            stream.write_table(table)

    def _order(self, turn: int) -> list[int]:
        """The numbers of the shards as a pass reads them."""
        draw = np.random.default_rng([self.seed, turn, len(self.shards.names), 1])
        return draw.permutation(len(self.shards.names)).tolist()

    def _read_table(self, resumes: bool, earlier: Path | None) -> list[Window]:
        """The windows that were written down, up to the first line that is damaged: those after it are read again."""
        tables = (table for table in (self.table, earlier) if table is not None and table.is_file())
        table = next(tables, self.table)
        lines = table.read_bytes().split(b"\n") if table.is_file() else []
        made_of = (lines and object_of(lines[0])) or {}
        if made_of.get("shards", self.made_of["shards"]) != self.made_of["shards"] and resumes:
            raise UserError(
                f"train_file: the shards are others (names, sizes) than those of {table}. Restore them, or begin "
                "again with --resume never"
            )
        if made_of != self.made_of:  # of a run that this one replaces
            return []
        windows: list[Window] = []
        for line in (object_of(text) or {} for text in lines[1:]):
            counts = line.keys() == asdict(Window()).keys() and all(type(count) is int for count in line.values())
            if not counts or line["number"] != len(windows) or line["first"] != (windows[-1].end if windows else 0):
                break
            windows.append(Window(**line))
        return windows
