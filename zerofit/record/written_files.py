"""files.json names the files of a run's folder that runs have written. Nothing else in the folder is ever removed.

files.json has the names of the files ({"written": [...]}; of a name that ends in / the whole folder, which is never
removed), and the update that the run began after ({"begun_at": 0}). A name is in it before its file is written.
Checkpoints are not in it: the manifest of each names its files.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from zerofit.recipe.files import TEMPORARY, atomic_file, remove
from zerofit.recipe.parsing import read_record

RECORD, LOCK, MODEL, CHECKPOINTS = "files.json", ".lock", "model", "checkpoints"
# What every run may write; names that follow from the data are added when the files are written.
NAMES = {
    "recipe.yaml",
    "strategy.yaml",
    "environment.json",
    "metrics.jsonl",
    "samples.jsonl",
    "stream.jsonl",
    "anomalies.jsonl",
    "loss.png",
    "predictions.jsonl",
    "flight/",
}


class WrittenFiles:
    """The record of one folder.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = path

    @property
    def exists(self) -> bool:
        return bool(self._read())

    @property
    def begun_at(self) -> int:
        """The update after which the run in the folder began: above 0 where it resumed a run of another folder."""
        begun_at = self._read().get("begun_at")
        return begun_at if type(begun_at) is int else 0

    @property
    def names(self) -> set[str]:
        """The names in the record. A folder with checkpoints and without a record is a run's that was copied in part:
        its files are those that every run writes."""
        if record := self._read():
            written = record.get("written")
            return {name for name in written if _is_inside(name)} if isinstance(written, list) else set()
        return NAMES if any((self.path / CHECKPOINTS).glob("update_????????/manifest.json")) else set()

    def _read(self) -> dict[str, Any]:
        return read_record(self.path / RECORD)

    def add(self, names: Iterable[str], begun_at: int | None = None) -> None:
        """Write down, and flush to the disk, that files of these names are ours."""
        before = self._read()
        record = {
            "begun_at": self.begun_at if begun_at is None else begun_at,
            "written": sorted(self.names.union(names)),
        }
        if record != before:
            with atomic_file(self.path / RECORD) as file:
                file.write(json.dumps(record, indent=1) + "\n")

    def is_ours(self, name: str) -> bool:
        """Return True if a file may be written under this name: it is ours, or not there."""
        return name in self.names or not os.path.lexists(self.path / name)

    def foreign(self) -> Iterator[str]:
        """The names of what no run has written, but for checkpoints/ (see CheckpointDirectory.foreign)."""
        names = self.names
        for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name) if self.path.is_dir() else ():
            temporary = TEMPORARY.fullmatch(entry.name)
            name = temporary["name"] if temporary else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.is_symlink() or not (is_folder or entry.is_file()):
                yield entry.name
            elif is_folder and name != CHECKPOINTS and f"{name}/" not in names and not (temporary and name == MODEL):
                yield from (name for name in files_below(Path(entry), self.path) if name not in names)
            elif not is_folder and name not in {*names, RECORD, LOCK, *(NAMES if temporary else ())}:
                yield from () if _is_exit_code(Path(entry)) else (entry.name,)

    def remove(self, chosen: Iterable[str]) -> None:
        """Remove those of these files that are ours, the folders that are empty then, and what a kill has left."""
        for name in self.names.intersection(chosen):
            path = self.path / name
            if path.is_file() and not any(folder.is_symlink() for folder in (path, *path.parents[: name.count("/")])):
                path.unlink()
        remove_empty(self.path / MODEL)
        for path in self.path.glob("*.partial"):
            match = TEMPORARY.fullmatch(path.name)
            if match and match["name"] in {*self.names, RECORD, MODEL}:
                remove(path)


def _is_exit_code(path: Path) -> bool:
    """Return True for the environment.json of a launch that ended before it was a run (see exit_code.py)."""
    return path.name == "environment.json" and "exit_code" in read_record(path)


def files_below(folder: Path, root: Path) -> Iterator[str]:
    """All files and symbolic links in a folder, by their names relative to `root`. No link is followed."""
    for below, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(below, name))]
        yield from (Path(below, name).relative_to(root).as_posix() for name in sorted([*files, *links]))


def remove_empty(folder: Path) -> None:
    """Remove a folder and those in it, as far as they hold no file."""
    for below, _, _ in () if folder.is_symlink() else os.walk(folder, topdown=False):
        if not os.listdir(below):
            os.rmdir(below)


def _is_inside(name: Any) -> bool:
    """Return True if a name of the record lies in the folder: a stranger may have written the record."""
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    return not path.is_absolute() and ".." not in path.parts
