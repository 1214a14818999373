"""The checkpoints of a run: complete or absent, never half; `latest` and `best` point to one each.

checkpoints/update_00000100/
  manifest.json   why it was written, and size and checksum (XXH3, 128 bits) of every other file; a checkpoint without
                  it, or that fails it, is never used
  model/          what transformers (an adapter: peft) loads
  state/          what the run resumes from; absent where only the model was to be kept
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.recipe.files import atomic_file, sync, temporary_path

MANIFEST = "manifest.json"
STATE = "state"
# Why a checkpoint is written. Those that were asked for stay as long as the recipe says; the others are there to
# resume from, and the last two of them are enough.
ASKED, CLOCK, LEAVING, START, BEST = "asked", "clock", "leaving", "start", "best"
AT_LEAST = 2  # if the newest has come to harm there is one before it


class CheckpointDirectory:
    """checkpoints/update_NNNNNNNN/ of a run's folder. Only one process writes here, but for the files within state/.

    Args:
        path: the folder checkpoints/.
        limit: of those that were asked for, keep the last so many; None: all.
        every: beside these, keep each whose update is a multiple of this.
    """

    def __init__(self, path: Path, limit: int | None = None, every: int | None = None):
        self.path, self.limit, self.every = path, limit, every

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation: a link, absent where none was kept."""
        return self.path / "best"

    @property
    def latest(self) -> Path:
        """The checkpoint that was written last: a link, absent where none was."""
        return self.path / "latest"

    def folder(self, update: int) -> Path:
        """Where the checkpoint of this update is, or would be."""
        return self.path / f"update_{update:08}"

    def partial(self, update: int) -> Path:
        """Where it is being written."""
        return self.folder(update).with_suffix(".partial")

    def finish(self, update: int, why: str, is_best: bool, checked: dict[str, dict[str, Any]]) -> None:
        """Seal what was written, give it its name, point the links there, and drop what is too old.

        Args:
            checked: {file: its entry of the manifest}, of those files that are on the disk already.
        """
        folder, partial = self.folder(update), self.partial(update)
        seal(partial, why, checked)
        if folder.exists():  # of a run that was resumed from before it
            shutil.rmtree(folder)
        partial.rename(folder)
        sync(self.path)
        self._point(self.latest, folder)
        if is_best:
            self._point(self.best, folder)
        self._drop()

    def abandon(self, update: int) -> None:
        """Take away what a failed save has left."""
        shutil.rmtree(self.partial(update), ignore_errors=True)

    def resumable(self) -> Iterator[Path]:
        """Checkpoints that hold a state, the newest first. Whether they are whole is not looked at."""
        for folder in sorted(self.path.glob("update_????????"), reverse=True):
            if (folder / STATE).is_dir():
                yield folder

    def drop_after(self, update: int) -> None:
        """Take away the checkpoints of updates that come again, and what a killed run has left half."""
        for folder in self.path.glob("update_*"):
            if folder.suffix or int(folder.name.removeprefix("update_")) > update:
                shutil.rmtree(folder)
        for link in (self.best, self.latest):
            if link.is_symlink() and not link.exists():
                link.unlink()
        if not self.latest.is_symlink() and (newest := next(self.resumable(), None)):
            self._point(self.latest, newest)

    def point_to_the_best(self, update: int) -> None:
        """Let `best` point to the checkpoint of this update."""
        self._point(self.best, self.folder(update))

    def _drop(self) -> None:
        folders = sorted(self.path.glob("update_????????"), reverse=True)
        asked = [folder for folder in folders if _why(folder) == ASKED]
        keep = {*asked[: self.limit], *list(self.resumable())[: self.limit or AT_LEAST]}
        keep |= {link.resolve() for link in (self.best, self.latest) if link.is_symlink()}
        kept = {folder.name for folder in keep}
        for folder in folders:
            milestone = self.every and int(folder.name.removeprefix("update_")) % self.every == 0
            if folder.name not in kept and not milestone:
                shutil.rmtree(folder)

    @staticmethod
    def _point(link: Path, folder: Path) -> None:
        new = temporary_path(link)
        new.symlink_to(folder.name)
        new.replace(link)


def seal(folder: Path, why: str, checked: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of all files in a folder, and see that everything is on the disk."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = checked.get(name) or entry(path)
    with atomic_file(folder / MANIFEST) as file:
        file.write(_manifest(why, files))
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def entry(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest, once it is on the disk."""
    sync(path)
    return {"bytes": path.stat().st_size, "xxh3_128": checksum(path)}


def flaw(folder: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """What is wrong with a checkpoint's files, the first thing found; None if they are what was written.

    Args:
        rank: look at every `num_ranks`-th file only, from this one on: ranks share the reading.
    """
    try:
        text = (folder / MANIFEST).read_text()
        why, files = json.loads(text)["why"], json.loads(text)["files"]
        expected = {name: (about["bytes"], about["xxh3_128"]) for name, about in files.items()}
        outside = next((name for name in files if Path(name).is_absolute() or ".." in Path(name).parts), None)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if text != _manifest(why, files):
        return f"{MANIFEST} is not what was written (its checksum differs)"
    if outside:
        return f"{MANIFEST} names a file of another folder, {outside!r}"
    for name, (size, digest) in list(expected.items())[rank::num_ranks]:
        path = folder / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size:,} bytes of {size:,}"
            if checksum(path) != digest:
                return f"{name} is not what was written (its checksum differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None if expected else f"{MANIFEST} names no file"


def _manifest(why: str, files: dict[str, dict[str, Any]]) -> str:
    """The text of a manifest, which bears a checksum of its own."""
    import xxhash

    content = {"why": why, "files": files}
    return (
        json.dumps({**content, "checksum": xxhash.xxh3_128_hexdigest(json.dumps(content).encode())}, indent=1) + "\n"
    )


def checksum(path: Path) -> str:
    """XXH3 of a file, 128 bits: as fast as the disk, and meant for damage, not for malice."""
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _why(folder: Path) -> str:
    try:
        return json.loads((folder / MANIFEST).read_text())["why"]
    except (OSError, ValueError, KeyError, TypeError):
        return ASKED  # nobody knows: it counts, and stays as long as any
