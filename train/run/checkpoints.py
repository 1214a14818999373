"""The checkpoints of a run: complete or absent, never half; `latest` and `best` point to one each."""

import shutil
from collections.abc import Callable
from pathlib import Path


class Checkpoints:
    """checkpoints/update_NNNNNNNN/ of a run's folder. Only the main process writes.

    Args:
        path: the folder checkpoints/.
        limit: keep the last so many saved ones, and the best beside them; None: all.
    """

    def __init__(self, path: Path, limit: int | None = None):
        self.path, self.limit = path, limit
        self.saved: list[str] = []  # names, oldest first; one that was kept as the best only is not among them

    @property
    def best(self) -> Path:
        """The checkpoint of the best evaluation: a link, absent where none was kept."""
        return self.path / "best"

    @property
    def latest(self) -> Path:
        """The checkpoint that was written last: a link, absent where none was."""
        return self.path / "latest"

    def write(self, update: int, fill: Callable[[Path], None], is_saved: bool, is_best: bool) -> None:
        """Let `fill` write the files of the checkpoint of this update, point the links there, drop what is too old."""
        folder = self.path / f"update_{update:08}"
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        partial.rename(folder)
        if is_saved:
            self.saved.append(folder.name)
        self._point(self.latest, folder)
        if is_best:
            self._point(self.best, folder)
        self._drop()

    def _drop(self) -> None:
        keep = set(self.saved[-self.limit :] if self.limit else self.saved)
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
