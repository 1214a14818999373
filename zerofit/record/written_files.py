"""files.json names the files of a run's folder that runs have written. Nothing else in the folder is ever removed.

files.json has the names of the files ({"written": [...]}; of a name that ends in / the whole folder, which is never
removed), and the update that the run began after ({"begun_at": 0}). A name is in it before its file is written.
Checkpoints are not in it: the manifest of each names its files.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from zerofit.recipe.files import TEMPORARY, atomic_file, remove
from zerofit.recipe.parsing import read_record

RECORD, LOCK, MODEL, CHECKPOINTS = "files.json", ".lock", "model", "checkpoints"
MANIFEST, LINKS = "manifest.json", ("best", "latest")  # in checkpoints/
UPDATE = re.compile(r"update_\d{8}")  # the name of a checkpoint
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
    """The record of one folder."""

    def __init__(self, path: Path):
        self.path = path

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
        return NAMES if any((self.path / CHECKPOINTS).glob(f"update_????????/{MANIFEST}")) else set()

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

    def foreign(self, in_checkpoints: bool) -> Iterator[str]:
        """The names of files and links that no run has written; of those in checkpoints/ only where that is said."""
        names, checkpoints = self.names, self.path / CHECKPOINTS
        sealed = {path.parent.name: sealed_files(path.parent) for path in checkpoints.glob(f"*/{MANIFEST}")}
        for name in files_below(self.path, self.path):
            path, (top, *below) = self.path / name, name.split("/")
            plain, is_temporary = _plain(top)
            if not below:
                of_runs = {*names, RECORD, LOCK, *(NAMES if is_temporary else ())}
                left_by_a_launch = name == "environment.json" and "exit_code" in read_record(
                    path
                )  # before it was a run
                is_ours = path.is_file() and not path.is_symlink() and (plain in of_runs or left_by_a_launch)
            elif top != CHECKPOINTS:
                is_ours = name in names or f"{plain}/" in names or (is_temporary and plain == MODEL)
            elif len(below) == 1:
                is_ours = (
                    path.is_symlink() and _plain(below[0])[0] in LINKS and bool(UPDATE.fullmatch(os.readlink(path)))
                )
            elif (files := sealed.get(below[0])) is not None:
                is_ours = "/".join(below[1:]) in files
            else:  # a run has left it half, or its manifest is damaged
                is_ours = bool(names) and bool(UPDATE.fullmatch(_plain(below[0])[0].removesuffix(".partial")))
            if not is_ours and (in_checkpoints or top != CHECKPOINTS or not below):
                yield name

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


def _plain(name: str) -> tuple[str, bool]:
    """The name that a file or folder of a temporary name is to get, or its own; whether it has a temporary one."""
    temporary = TEMPORARY.fullmatch(name)
    return (temporary["name"], True) if temporary else (name, False)


def sealed_files(checkpoint: Path) -> set[str] | None:
    """The files that a checkpoint's manifest names, and itself; None: it cannot be read."""
    files = read_record(checkpoint / MANIFEST).get("files")
    return {*files, MANIFEST} if isinstance(files, dict) else None


def files_below(folder: Path, root: Path) -> Iterator[str]:
    """All files and symbolic links in a folder, by their names relative to `root`. No link is followed."""
    for below, folders, files in os.walk(folder):
        folders.sort()
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
