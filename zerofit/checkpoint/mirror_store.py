"""What lies in an object store of a run: its results and its checkpoints.

s3://bucket/run/
  recipe.yaml, metrics.jsonl, ..., model/   as in the run's folder
  checkpoints/update_00000100/              as there; the manifest is written last, and is removed first
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from zerofit.checkpoint.directory import MANIFEST, NAME
from zerofit.recipe.addresses import open_address
from zerofit.recipe.errors import first_line
from zerofit.recipe.parsing import parse_json
from zerofit.record.written_files import CHECKPOINTS, RECORD

# What every run writes, in the order in which it is copied.
RESULTS = (
    "recipe.yaml", "strategy.yaml", RECORD, "metrics.jsonl", "samples.jsonl", "stream.jsonl", "anomalies.jsonl",
    "environment.json", "loss.png",
)  # fmt: skip
PAUSES_S = (1.0, 4.0)  # before a call that failed is tried again
T = TypeVar("T")


class MirrorStore:
    """The files at one address.

    Args:
        address: as s3://bucket/run.

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

        _persistently(write)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        try:
            content: bytes = _persistently(lambda: self._files.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return None
        return content

    def get(self, name: str, path: Path) -> None:
        """Download a file; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _persistently(lambda: self._files.get_file(f"{self._root}/{name}", str(path)))

    def remove(self, name: str) -> None:
        """Remove a folder; of a checkpoint the manifest first, so that what a kill leaves is no checkpoint."""
        place = f"{self._root}/{name}"
        for path in (f"{place}/{MANIFEST}", place):
            self._files.invalidate_cache()
            if _persistently(lambda path=path: self._files.exists(path)):  # type: ignore[misc]
                _persistently(lambda path=path: self._files.rm(path, recursive=True))  # type: ignore[misc]

    def checkpoints(self) -> list[str]:
        """The names of checkpoints, the newest first, half ones included."""
        self._files.invalidate_cache()
        try:
            places = _persistently(lambda: self._files.ls(f"{self._root}/{CHECKPOINTS}", detail=False))
        except FileNotFoundError:
            return []
        names = (place.rstrip("/").rsplit("/", 1)[-1] for place in places)
        return sorted(filter(NAME.fullmatch, names), reverse=True)

    def manifests(self) -> Iterator[tuple[str, bytes]]:
        """(name, manifest) of checkpoints that have one, the newest first."""
        for name in self.checkpoints():
            if manifest := self.read(f"{CHECKPOINTS}/{name}/{MANIFEST}"):
                yield name, manifest

    def complete(self) -> Iterator[tuple[str, list[str]]]:
        """(name, files) of checkpoints with a manifest, the newest first."""
        for name, manifest in self.manifests():
            if files := files_of(manifest):
                yield name, files


def files_of(manifest: bytes | None) -> list[str]:
    """The files that a manifest names; none where it cannot be read."""
    try:
        files = list(parse_json(manifest or b"")["files"].keys())
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    return [] if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files) else files


def _persistently(call: Callable[[], T]) -> T:
    """Call, and call again after a failure: stores ask for that (HTTP 503)."""
    for pause_s in PAUSES_S:
        try:
            return call()
        except (FileNotFoundError, PermissionError):
            raise
        except Exception:  # each store has its own
            time.sleep(pause_s)
    return call()


def reason(error: Exception) -> str:
    """Why the store failed, for a message."""
    return f"{type(error).__name__}: {first_line(error)}"
