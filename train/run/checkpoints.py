"""The checkpoints of a run: complete or absent, never half; `latest` and `best` point to one each.

checkpoints/update_00000100/
  manifest.json   size and SHA-256 of every other file; a checkpoint without it, or that fails it, is never used
  model/          what transformers (an adapter: peft) loads
  state/          what the run goes on from; absent where a model was kept only because it was the best
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest.json"
STATE = "state"


class Checkpoints:
    """checkpoints/update_NNNNNNNN/ of a run's folder.

    Args:
        path: the folder checkpoints/.
        limit: keep the last so many saved ones, and the best beside them; None: all.
    """

    def __init__(self, path: Path, limit: int | None = None):
        self.path, self.limit = path, limit

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation: a link, absent where none was kept."""
        return self.path / "best"

    @property
    def latest(self) -> Path:
        """The checkpoint that was saved last: a link, absent where none was."""
        return self.path / "latest"

    def folder(self, update: int) -> Path:
        """Where the checkpoint of this update is, or would be."""
        return self.path / f"update_{update:08}"

    def begin(self, update: int) -> Path:
        """An empty folder to be filled, under a temporary name."""
        partial = self.folder(update).with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def abandon(self, update: int) -> None:
        """Take away what a failed save has left."""
        shutil.rmtree(self.folder(update).with_suffix(".partial"), ignore_errors=True)

    def finish(self, update: int, is_saved: bool, is_best: bool) -> None:
        """Seal a filled folder, give it its name, point the links there, and drop what is too old."""
        folder = self.folder(update)
        partial = folder.with_suffix(".partial")
        seal(partial)
        if folder.exists():  # of a run that was resumed from before it
            shutil.rmtree(folder)
        partial.rename(folder)
        sync(self.path)
        if is_saved:
            self._point(self.latest, folder)
        if is_best:
            self._point(self.best, folder)
        self._drop()

    def resumable(self) -> Iterator[Path]:
        """Checkpoints that hold a state, the newest first. Whether they are whole is not looked at."""
        for folder in sorted(self.path.glob("update_????????"), reverse=True):
            if (folder / STATE).is_dir():
                yield folder

    def drop_after(self, update: int) -> None:
        """Take away the checkpoints of updates that come again."""
        for folder in self.path.glob("update_*"):
            if folder.suffix or int(folder.name.removeprefix("update_")) > update:
                shutil.rmtree(folder)
        for link in (self.best, self.latest):
            if link.is_symlink() and not link.exists():
                link.unlink()

    def _drop(self) -> None:
        saved = [folder.name for folder in self.resumable()]
        keep = set(saved[: self.limit] if self.limit else saved)
        keep |= {link.resolve().name for link in (self.best, self.latest) if link.is_symlink()}
        for folder in self.path.glob("update_*"):
            if folder.name not in keep:
                shutil.rmtree(folder)

    @staticmethod
    def _point(link: Path, folder: Path) -> None:
        new = link.with_suffix(".partial")
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name)
        new.replace(link)


def seal(folder: Path) -> None:
    """Write the manifest of all files in a folder, and see that everything is on the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
        sync(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files}, indent=1) + "\n")
    sync(manifest)
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def flaw(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, the first thing found; None if they are what was written."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        expected = {name: (about["bytes"], about["sha256"]) for name, about in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes of {size:,}"
        if checksum(path) != digest:
            return f"{name} is not what was written (its checksum differs)"
    return None if expected else f"{MANIFEST} names no file"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Have the operating system put a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
