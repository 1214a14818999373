"""The checkpoints of a run: complete or absent, never half; `latest` and `best` point to one each.

checkpoints/update_00000100/
  manifest.json   the number of the format, why it was written, and size and checksum (XXH3, 128 bits) of every other
                  file; a checkpoint without it, or that fails it, is never used
  model/          what transformers (an adapter: peft) loads
  state/          what the run resumes from; absent where only the model was to be kept
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from zerofit import __version__
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import TEMPORARY_NAME, atomic_file, parse_json, read_record, remove, sync, temporary_path
from zerofit.record.run_folder import MANIFEST, UPDATE, files_below, is_inside, remove_empty, sealed_files

# The number of the format of a checkpoint's files. This version reads each number up to it, and refuses a greater one.
# It rises where an earlier version could not read, or would misread, what this one writes: not where a field is added
# that an earlier one does not need. tests/material/checkpoints/ holds checkpoints of each number. In all of them the
# manifest has `format` and the checksum of itself.
FORMAT = 1
STATE = "state"
PROGRESS = "progress.json"
# Why a checkpoint is written. Those that were asked for stay as long as the recipe says; the others are there to
# resume from, and the last two of them are enough.
ASKED = "asked"
CLOCK = "clock"
LEAVING = "leaving"
START = "start"
BEST = "best"
MIN_CHECKPOINTS = 2  # if the newest has come to harm there is one before it


class CheckpointDirectory:
    """checkpoints/update_NNNNNNNN/ of a run's folder. One process writes here, but for the files within state/."""

    def __init__(self, path: Path, limit: int | None = None):
        self.path = path
        self.limit = limit  # of those that were asked for so many are kept, the last ones; None: all
        # links; absent where no such checkpoint was kept
        self.best = path / "best"
        self.latest = path / "latest"
        self._read: list[str] = []  # names of checkpoints that stay while other threads read them
        self._lock = threading.Lock()
        self._newest = 0  # the update of the checkpoint that was written last
        self.finished: list[Callable[[Path], None]] = []  # called with each complete checkpoint

    def folder(self, update: int) -> Path:
        """The path of this update's checkpoint, whether it is there or not."""
        return self.path / f"update_{update:08}"

    def partial(self, update: int) -> Path:
        """The path under which this update's checkpoint is written."""
        return self.folder(update).with_suffix(".partial")

    def finish(self, update: int, why: str, is_best: bool, checked: dict[str, dict[str, Any]]) -> None:
        """Seal what was written, give it its name, point the links there, and drop what is too old. `checked`: {file:
        its entry of the manifest}, of those files that are on the disk already."""
        folder = self.folder(update)
        partial = self.partial(update)
        seal(partial, why, checked)
        with self._lock:
            _remove(folder)  # of a run that was resumed from before it
            partial.rename(folder)
            sync(self.path)
            self.point(self.latest, folder)
            if is_best:
                self.point(self.best, folder)
            self._newest = update
            self._drop_old()
        for call in self.finished:
            call(folder)

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """Keep a checkpoint while this thread reads it, and others are written."""
        self._read.append(folder.name)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(OSError):
                self._read.remove(folder.name)
                self._drop_old()

    def take_in(self, partial: Path, name: str) -> None:
        """Give a whole checkpoint, brought from elsewhere, its name, and let `latest` point to the newest."""
        for path in (*(path for path in partial.rglob("*")), partial):
            sync(path)
        _remove(self.path / name)
        partial.rename(self.path / name)
        sync(self.path)
        self.point(self.latest, next(self.resumable()))

    def folders(self) -> list[Path]:
        """The checkpoints, the newest first. Whether they are whole is not looked at."""
        folders = (path for path in self.path.glob("update_????????") if UPDATE.fullmatch(path.name))
        parts = (MANIFEST, STATE, "model")
        return sorted((path for path in folders if any((path / part).exists() for part in parts)), reverse=True)

    def resumable(self) -> Iterator[Path]:
        """Checkpoints that hold a state, the newest first. Whether they are whole is not looked at."""
        return (folder for folder in self.folders() if (folder / STATE).is_dir())

    def newest_after(self, update: int) -> Path | None:
        """The newest checkpoint, if it is of a later update than this one."""
        return next((folder for folder in self.folders() if _update(folder) > update), None)

    def drop(self, is_dropped: Callable[[int], bool]) -> None:
        """Remove the checkpoints of some updates, as the caller says, and what a killed run has left half."""
        for path in self.path.glob("*.partial"):
            if UPDATE.fullmatch(path.stem) or TEMPORARY_NAME.fullmatch(path.name):
                remove(path)
        for folder in self.folders():
            if is_dropped(_update(folder)):
                _remove(folder)
        for link in (self.best, self.latest):
            if link.is_symlink() and not link.exists():
                link.unlink()
        if not os.path.lexists(self.latest) and (newest := next(self.resumable(), None)):
            self.point(self.latest, newest)

    def _drop_old(self) -> None:
        """Remove what is too old. Models of later updates than the newest are of a launch that left no state: they
        stay until their updates come again, and do not count."""
        folders = [folder for folder in self.folders() if _update(folder) <= self._newest]
        # Where nobody knows why it was saved, it counts, and stays as long as any.
        asked = [folder for folder in folders if read_record(folder / MANIFEST).get("why", ASKED) == ASKED]
        states = [folder for folder in folders if (folder / STATE).is_dir()][: self.limit or MIN_CHECKPOINTS]
        keep = {*asked[: self.limit], *states}
        for state in states:  # with the best checkpoint as of then: a run that resumes from it needs both
            best = read_record(state / STATE / PROGRESS).get("best")
            update = best.get("update") if isinstance(best, dict) else None
            if isinstance(update, int):
                keep.add(self.folder(update))
        keep |= {link.resolve() for link in (self.best, self.latest) if link.is_symlink()}
        kept = {*self._read, *(folder.name for folder in keep)}
        for folder in folders:
            if folder.name not in kept:
                _remove(folder)

    @staticmethod
    def point(link: Path, folder: Path) -> None:
        """Let `best` or `latest` point to a checkpoint."""
        new = temporary_path(link)
        new.symlink_to(folder.name)
        new.replace(link)


def seal(folder: Path, why: str, checked: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of all files in a folder, and see that everything is on the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = checked.get(name) or manifest_entry(path)
    with atomic_file(folder / MANIFEST) as file:
        file.write(_manifest({"format": FORMAT, "why": why, "files": files}))
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def manifest_entry(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest, once it is on the disk."""
    sync(path)
    return {"bytes": path.stat().st_size, "xxh3_128": checksum(path)}


def find_damage(folder: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """The first thing that is wrong with a checkpoint's files; None if they are what was written. Raises UserError: a
    later version has written it, in a format that this one does not know. Ranks share the reading: each looks at every
    `num_ranks`-th file, from that of its number on."""
    try:
        text = (folder / MANIFEST).read_text()
        content = parse_json(text)
        del content["checksum"]
        number = content.get("format", 1)  # the first checkpoints had no number
        if text == _manifest(content) and number > FORMAT:
            raise UserError(
                f"{folder} has checkpoint format {number}, and zerofit {__version__} reads formats up to {FORMAT}. "
                "Install the version that wrote it, or choose another --output_dir"
            )
        files = content["files"]
        expected = {name: (about["bytes"], about["xxh3_128"]) for name, about in files.items()}
        outside = next((name for name in files if not is_inside(name)), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({first_line(error)})"
    if text != _manifest(content):
        return f"{MANIFEST} is not what was written"
    if outside:
        return f"{MANIFEST} names a file of another folder, {outside!r}"
    for name, (size, digest) in list(expected.items())[rank::num_ranks]:
        path = folder / name
        try:
            if path.stat().st_size != size or checksum(path) != digest:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None if expected else f"{MANIFEST} names no file"


def _manifest(content: dict[str, Any]) -> str:
    """The text of a manifest, which bears a checksum of its own."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    return json.dumps({**content, "checksum": digest}, indent=1) + "\n"


def checksum(path: Path) -> str:
    """XXH3 of a file, 128 bits: as fast as the disk, and meant for damage, not for malice."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _update(folder: Path) -> int:
    return int(folder.name.removeprefix("update_"))


def _remove(folder: Path) -> None:
    """Remove a checkpoint. Files that its manifest does not name stay."""
    sealed = None if folder.is_symlink() else sealed_files(folder)
    files = set(files_below(folder, folder)) if sealed else set()
    if sealed is None or files <= sealed:
        gone = temporary_path(folder)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(gone)  # a kill leaves no half of a checkpoint under its name
        remove(gone)
        return
    for name in files & sealed:
        (folder / name).unlink()
    remove_empty(folder)
