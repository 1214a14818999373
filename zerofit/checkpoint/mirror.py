"""Copies a run's checkpoints and results to an object store, in a thread of the main process.

Training never waits for it. What the store does not take is tried again; what is lost of that is said. A checkpoint in
the store that this run did not put there is another run's: then nothing more is written.

s3://bucket/run/
  recipe.yaml, metrics.jsonl, ..., model/   as in the run's folder
  checkpoints/update_00000100/              as there; the manifest is written last, and is removed first
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from zerofit.checkpoint.directory import AT_LEAST, MANIFEST, NAME, CheckpointDirectory
from zerofit.recipe.addresses import open_address
from zerofit.recipe.errors import first_line
from zerofit.recipe.parsing import counted, parse_json
from zerofit.record.written_files import CHECKPOINTS, MODEL, RECORD, files_below

RETRY_S = 30.0  # between two attempts while the store fails
FINISH_S = 600.0  # at the end of a run
PAUSES_S = (1.0, 4.0)  # before a call that failed is tried again
# What every run writes, in the order in which it is copied.
RESULTS = (
    "recipe.yaml", "strategy.yaml", RECORD, "metrics.jsonl", "samples.jsonl", "stream.jsonl", "anomalies.jsonl",
    "environment.json", "loss.png",
)  # fmt: skip
T = TypeVar("T")


class MirrorLost(Exception):
    """Another run writes to the same address."""


class MirrorStore:
    """The files at one address, such as s3://bucket/run. A call that fails is tried again: stores ask for that.

    Raises:
        UserError: nothing is known of such addresses, or a package is missing.
    """

    def __init__(self, address: str):
        self.address = address
        self._files, self._root = open_address("mirror", address)

    def put(self, source: Path | bytes, name: str) -> None:
        """Write a file. Raises whatever the store raises; OSError where it has not arrived whole."""
        place = f"{self._root}/{name}"

        def write() -> None:
            if isinstance(source, bytes):
                self._files.pipe_file(place, source)
            else:
                self._files.put_file(str(source), place)
            size = len(source) if isinstance(source, bytes) else source.stat().st_size
            self._files.invalidate_cache()
            if (there := self._files.size(place)) != size:
                raise OSError(f"{name} has {size:,} bytes, and {there:,} have arrived")

        self._persistently(write)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        with contextlib.suppress(FileNotFoundError):
            content: bytes = self._persistently(lambda: self._files.cat_file(f"{self._root}/{name}"))
            return content
        return None

    def get(self, name: str, path: Path) -> None:
        """Download a file; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._persistently(lambda: self._files.get_file(f"{self._root}/{name}", str(path)))

    def remove(self, name: str) -> None:
        """Remove a folder; of a checkpoint the manifest first, so that what a kill leaves is no checkpoint."""
        place = f"{self._root}/{name}"
        for path in (f"{place}/{MANIFEST}", place):
            self._files.invalidate_cache()
            if self._persistently(lambda path=path: self._files.exists(path)):  # type: ignore[misc]
                self._persistently(lambda path=path: self._files.rm(path, recursive=True))  # type: ignore[misc]

    def checkpoints(self) -> list[str]:
        """The names of checkpoints, the newest first, half ones included."""
        self._files.invalidate_cache()
        try:
            places = self._persistently(lambda: self._files.ls(f"{self._root}/{CHECKPOINTS}", detail=False))
        except FileNotFoundError:
            return []
        names = (place.rstrip("/").rsplit("/", 1)[-1] for place in places)
        return sorted(filter(NAME.fullmatch, names), reverse=True)

    def manifest(self, name: str) -> bytes | None:
        """The manifest of a checkpoint; None: it is none, or not complete."""
        return self.read(f"{CHECKPOINTS}/{name}/{MANIFEST}")

    def complete(self) -> Iterator[tuple[str, list[str]]]:
        """(name, files) of checkpoints with a manifest, the newest first."""
        for name in self.checkpoints():
            if files := files_of(self.manifest(name)):
                yield name, files

    def _persistently(self, call: Callable[[], T]) -> T:
        for pause_s in PAUSES_S:
            try:
                return call()
            except (FileNotFoundError, PermissionError):
                raise
            except Exception:  # each store has its own
                time.sleep(pause_s)
        return call()


def files_of(manifest: bytes | None) -> list[str]:
    """The files that a manifest names; none where it cannot be read."""
    try:
        files = list(parse_json(manifest or b"")["files"].keys())
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [] if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files) else files


def reason(error: Exception) -> str:
    """The reason of a store's error, for a message."""
    return f"{type(error).__name__}: {first_line(error)}"


def _manifest(folder: Path) -> bytes | None:
    """The manifest of a checkpoint on the disk; None: it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / MANIFEST).read_bytes()
    return None


class Mirror:
    """The mirror of one run, on its main process."""

    def __init__(self, store: MirrorStore):
        self.store = store
        self._wanted, self._ending = threading.Event(), threading.Event()
        self._messages: list[str] = []
        self._is_reported = False
        self._made: set[str] = set()  # names of checkpoints
        self._mirrored: dict[str, bytes] = {}  # {name: its manifest} of those that are in the store
        self._found: dict[str, bytes | None] | None = None  # of those that were there before; None: not looked yet
        self._sent: dict[tuple[str, bytes], set[str]] = {}  # {(name, manifest): files that are in the store}
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, directory: CheckpointDirectory, updates: int) -> None:
        """Copy the checkpoints of this folder from now on.

        Args:
            updates: those in the store that are of a later one are removed, as in the folder; -1: all are.
        """
        self._folder, self._directory, self._updates = folder, directory, updates
        directory.finished.append(self.wake)
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()
        self._wanted.set()

    def wake(self, folder: Path) -> None:
        """Copy a checkpoint, which is complete."""
        self._made.add(folder.name)
        self._wanted.set()

    def messages(self) -> list[str]:
        """Lines for the log since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def finish(self, limit_s: float | None = None) -> list[str]:
        """Copy what is left, for a limited time. Returns lines for the log. Never fails."""
        limit_s = FINISH_S if limit_s is None else limit_s
        self._ending.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                self._report(f"it was not ready {limit_s / 60:g} minutes after training")
        missing = len(self._made - self._mirrored.keys())
        number = counted(len(self._made & self._mirrored.keys()), "checkpoint")
        return [*self.messages(), f"mirror      {number} mirrored, {missing} not: {self.store.address}"]

    def _work(self) -> None:
        pause_s: float | None = None
        while True:
            self._wanted.wait(pause_s)
            self._wanted.clear()
            is_last = self._ending.is_set()
            try:
                self.copy(is_last)
            except MirrorLost:
                self._messages.append(
                    f"warning   {self.store.address}: another run writes there, and this one no more"
                )
                return
            except Exception as error:  # each store has its own, and none may end the training
                self._report(reason(error))
                pause_s = RETRY_S
                continue
            if self._is_reported:
                self._messages.append(f"note      {self.store.address} can be written again")
            self._is_reported, pause_s = False, None
            if is_last:
                return

    def _report(self, why: str) -> None:
        """Report once that the store fails, until it works again."""
        if not self._is_reported:
            self._messages.append(
                f"warning   {self.store.address} cannot be written ({why}): training continues, and it is tried again"
            )
        self._is_reported = True

    def copy(self, is_last: bool) -> None:
        """Copy all that is not in the store, and remove there what is no longer in the folder.

        Raises:
            MirrorLost: another run writes there.
            Exception: of the store.
        """
        self._check_owner()
        for name in RESULTS:
            with contextlib.suppress(FileNotFoundError):
                self.store.put((self._folder / name).read_bytes(), name)
        folders = self._directory.folders()
        for folder in folders:
            with self._directory.reading(folder):  # it stays in the folder meanwhile
                self._copy_checkpoint(folder)
        kept, whole = {folder.name for folder in self._directory.folders()}, 0
        for name in self.store.checkpoints():  # of those that are no longer in the folder the newest whole ones stay
            is_whole = name in self._mirrored or bool(files_of((self._found or {}).get(name)))
            whole += is_whole
            if name not in kept and not (is_whole and whole <= AT_LEAST):
                self.store.remove(f"{CHECKPOINTS}/{name}")
        for name in files_below(self._folder / MODEL, self._folder) if is_last else ():
            self.store.put(self._folder / name, name)

    def _check_owner(self) -> None:
        """Remove what of an earlier run comes again, once; from then on see that nobody else adds a checkpoint: one
        of a name that was not there and is not ours, or another manifest of the newest."""
        names = self.store.checkpoints()
        if self._found is None:
            for name in names:
                if self._updates < 0 or name > self._directory.folder(self._updates).name:
                    self.store.remove(f"{CHECKPOINTS}/{name}")
            self.store.remove(MODEL)
            self._found = {name: self.store.manifest(name) for name in self.store.checkpoints()}
            return
        ours = {name for name, _ in self._sent}
        if not ours.union(self._found).issuperset(names):
            raise MirrorLost
        newest = self.store.manifest(names[0]) if names else None
        if newest and newest != self._found.get(names[0]) and (names[0], newest) not in self._sent:
            raise MirrorLost

    def _copy_checkpoint(self, folder: Path) -> None:
        """Copy a checkpoint, unless it is in the store. The manifest is last."""
        name, place = folder.name, f"{CHECKPOINTS}/{folder.name}"
        manifest = _manifest(folder)
        if manifest is None or self._mirrored.get(name) == manifest:
            return  # it is gone, or there
        self._made.add(name)
        self._mirrored.pop(name, None)
        if self.store.manifest(name) != manifest:
            if (name, manifest) not in self._sent:
                self.store.remove(place)  # what a killed run has left
            sent = self._sent.setdefault((name, manifest), set())
            for each in files_of(manifest):
                if each not in sent:
                    self.store.put(folder / each, f"{place}/{each}")
                    sent.add(each)
            if _manifest(folder) != manifest:
                return  # it was written again meanwhile, and this wakes the thread
            self.store.put(manifest, f"{place}/{MANIFEST}")
        self._mirrored[name] = manifest
