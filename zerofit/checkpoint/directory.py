"""The checkpoints of a run. Each is complete or absent; the links `latest` and `best` point to one each.

checkpoints/update_00000100/
  manifest.json   the format's number, why the checkpoint was written, and size and checksum (XXH3, 128 bits) of every
                  other file; a checkpoint without a manifest, or with a file that differs from it, is never used
  model/          the model for transformers, or the adapter for peft
  state/          the state that the run resumes from; absent if only the model was kept
"""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash

from zerofit import __version__
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import TEMPORARY_NAME, atomic_file, parse_json, read_record, remove, sync, temporary_path
from zerofit.record.run_folder import MANIFEST, UPDATE, files_below, is_inside, remove_empty, sealed_files

# The number of the format of a checkpoint's files. This version reads all numbers up to it, and refuses greater ones.
# Raise it if earlier versions cannot read, or misread, the new files, but not for a field that they do not need.
# tests/material/checkpoints/ has checkpoints of each number. Each manifest has `format` and a checksum of itself.
CHECKPOINT_FORMAT = 1
STATE_FOLDER = "state"
PROGRESS_FILE = "progress.json"
MIN_CHECKPOINTS = 2  # if the newest is damaged, there is one before it


class SaveReason(StrEnum):
    """The reason for which a checkpoint is written. Requested ones stay as long as the recipe says; of the others,
    which are only for resuming, the last two stay."""

    REQUESTED = "asked"
    BY_CLOCK = "clock"
    BEFORE_EXIT = "leaving"
    AT_START = "start"
    BEST = "best"


class CheckpointDirectory:
    """The folder of a run's checkpoints. One process writes here; in state/ each rank writes its own files.

    Args:
        path: the folder checkpoints/ of the run.
        limit: how many of the requested checkpoints are kept, the last ones; None: all.
    """

    def __init__(self, path: Path, limit: int | None = None):
        self.path = path
        self.limit = limit
        self.best = path / "best"  # a link; absent if no such checkpoint was kept
        self.latest = path / "latest"  # a link, too
        self._names_in_use: list[str] = []  # checkpoints that other threads are reading
        self._lock = threading.Lock()
        self._last_written = 0  # the update of the checkpoint that was written last
        self.finished: list[Callable[[Path], None]] = []  # called with each complete checkpoint

    def folder(self, update: int) -> Path:
        """Return the path of this update's checkpoint, whether it exists or not."""
        return self.path / f"update_{update:08}"

    def partial(self, update: int) -> Path:
        """Return the path under which this update's checkpoint is written."""
        return self.folder(update).with_suffix(".partial")

    def finish(self, update: int, why: str, is_best: bool, checked: dict[str, dict[str, Any]]) -> None:
        """Write the manifest, rename the checkpoint to its final name, point the links to it, and remove old
        checkpoints. `checked`: {file: its entry in the manifest} of the files that are already flushed to the disk."""
        folder = self.folder(update)
        partial = self.partial(update)
        write_manifest(partial, why, checked)
        with self._lock:
            _remove(folder)  # an earlier one, if the run resumed from a checkpoint before it
            partial.rename(folder)
            sync(self.path)
            self.point_link(self.latest, folder)
            if is_best:
                self.point_link(self.best, folder)
            self._last_written = update
            self._remove_old()
        for call in self.finished:
            call(folder)

    @contextlib.contextmanager
    def reading(self, folder: Path) -> Iterator[None]:
        """Keep a checkpoint while this thread reads it and another thread writes new ones."""
        self._names_in_use.append(folder.name)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(OSError):
                self._names_in_use.remove(folder.name)
                self._remove_old()

    def add_downloaded(self, partial: Path, name: str) -> None:
        """Flush a complete checkpoint to the disk, rename it to its final name, and point `latest` to the newest."""
        for path in (*partial.rglob("*"), partial):
            sync(path)
        _remove(self.path / name)
        partial.rename(self.path / name)
        sync(self.path)
        self.point_link(self.latest, next(self.resumable()))

    def folders(self) -> list[Path]:
        """Return the checkpoints, the newest first, without checking their files."""
        folders = (path for path in self.path.glob("update_????????") if UPDATE.fullmatch(path.name))
        parts = (MANIFEST, STATE_FOLDER, "model")
        return sorted((path for path in folders if any((path / part).exists() for part in parts)), reverse=True)

    def resumable(self) -> Iterator[Path]:
        """Return the checkpoints that have a state, the newest first, without checking their files."""
        return (folder for folder in self.folders() if (folder / STATE_FOLDER).is_dir())

    def newest_after(self, update: int) -> Path | None:
        """Return the newest checkpoint if its update is later than this one, else None."""
        return next((folder for folder in self.folders() if _update_of(folder) > update), None)

    def drop(self, is_dropped: Callable[[int], bool]) -> None:
        """Remove the checkpoints of the updates for which `is_dropped` returns True, and unfinished checkpoints that a
        killed run has left."""
        for path in self.path.glob("*.partial"):
            if UPDATE.fullmatch(path.stem) or TEMPORARY_NAME.fullmatch(path.name):
                remove(path)
        for folder in self.folders():
            if is_dropped(_update_of(folder)):
                _remove(folder)
        for link in (self.best, self.latest):
            if link.is_symlink() and not link.exists():
                link.unlink()
        if not os.path.lexists(self.latest) and (newest := next(self.resumable(), None)):
            self.point_link(self.latest, newest)

    def _remove_old(self) -> None:
        """Remove the checkpoints beyond the limit. Models of updates later than the last written one were left by a
        launch that saved no state: they stay until their updates are made again, and do not count."""
        folders = [folder for folder in self.folders() if _update_of(folder) <= self._last_written]
        # A checkpoint that does not say why it was written counts as a requested one.
        asked = SaveReason.REQUESTED
        requested = [folder for folder in folders if read_record(folder / MANIFEST).get("why", asked) == asked]
        states = [folder for folder in folders if (folder / STATE_FOLDER).is_dir()][: self.limit or MIN_CHECKPOINTS]
        keep = {folder.name for folder in (*requested[: self.limit], *states)}
        for state in states:  # a run that resumes from it also needs the best checkpoint of that time
            best = read_record(state / STATE_FOLDER / PROGRESS_FILE).get("best")
            update = best.get("update") if isinstance(best, dict) else None
            if isinstance(update, int):
                keep.add(self.folder(update).name)
        keep.update(self._names_in_use, (link.resolve().name for link in (self.best, self.latest)))
        for folder in folders:
            if folder.name not in keep:
                _remove(folder)

    @staticmethod
    def point_link(link: Path, folder: Path) -> None:
        """Let the link `best` or `latest` point to a checkpoint."""
        new = temporary_path(link)
        new.symlink_to(folder.name)
        new.replace(link)


def write_manifest(folder: Path, why: str, checked: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of all files in a folder, and flush the files and folders to the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = checked.get(name) or manifest_entry(path)
    with atomic_file(folder / MANIFEST) as file:
        file.write(_manifest({"format": CHECKPOINT_FORMAT, "why": why, "files": files}))
    for path in (*filter(Path.is_dir, folder.rglob("*")), folder):
        sync(path)


def manifest_entry(path: Path) -> dict[str, Any]:
    """Flush a file to the disk, and return its entry in the manifest."""
    sync(path)
    return {"bytes": path.stat().st_size, "xxh3_128": file_checksum(path)}


def find_damage(folder: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Return the first problem of a checkpoint's files; None if they are as they were written. Raises UserError: a
    later version has written them, in a format that this one does not know. Ranks share the reading: each reads every
    `num_ranks`-th file, from that of its number on."""
    try:
        text = (folder / MANIFEST).read_text()
        content = parse_json(text)
        del content["checksum"]
        number = content.get("format", 1)  # the first checkpoints had no number
        if text == _manifest(content) and number > CHECKPOINT_FORMAT:
            raise UserError(
                f"{folder} has checkpoint format {number}, and zerofit {__version__} reads formats up to "
                f"{CHECKPOINT_FORMAT}. Install the version that wrote it, or choose another --output_dir"
            )
        files = content["files"]
        expected = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in files.items()}
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
            if path.stat().st_size != size or file_checksum(path) != digest:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None if expected else f"{MANIFEST} names no file"


def _manifest(content: dict[str, Any]) -> str:
    """Return the text of a manifest, with a checksum of itself."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    return json.dumps({**content, "checksum": digest}, indent=1) + "\n"


def file_checksum(path: Path) -> str:
    """Return the XXH3 of a file, 128 bits. It is as fast as the disk, and finds damage, but not manipulation."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _update_of(folder: Path) -> int:
    return int(folder.name.removeprefix("update_"))


def _remove(folder: Path) -> None:
    """Remove a checkpoint, except files that its manifest does not name."""
    sealed = None if folder.is_symlink() else sealed_files(folder)
    files = set(files_below(folder, folder)) if sealed else set()
    if sealed is None or files <= sealed:
        removed = temporary_path(folder)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(removed)  # so that a kill leaves no incomplete checkpoint under its name
        remove(removed)
        return
    for name in files & sealed:
        (folder / name).unlink()
    remove_empty(folder)
