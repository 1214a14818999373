"""Saving and resuming, on all ranks together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.recipe.errors import UserError, first_line
from train.run.checkpoints import STATE, Checkpoints, flaw
from train.run.state_files import StateFiles, read_progress, write_index, write_pieces


class Saver:
    """Writes checkpoints of an engine, and reads them into it. All ranks call its methods together."""

    def __init__(self, checkpoints: Checkpoints, engine):
        self.checkpoints, self.engine = checkpoints, engine

    def save(
        self, update: int, fill: Callable[[Path], None], progress: dict[str, Any] | None, is_best: bool
    ) -> str | None:
        """Write the checkpoint of this update. Returns why it failed, on every rank; nothing is left of it then.

        Args:
            fill: writes what is for others (model/, predictions) into a folder; called on the main process.
            progress: what the run goes on from, beside the optimizer's state; None: only the model is kept.
        """
        main, checkpoints = self.engine.is_main, self.checkpoints
        partial = checkpoints.folder(update).with_suffix(".partial")
        if problem := self._everywhere(lambda: checkpoints.begin(update) if main else None)[0]:
            return problem
        pieces: list[tuple] = []
        if progress is not None:
            problem, pieces = self._everywhere(lambda: self._write_pieces(partial / STATE))
        if not problem:
            problem, _ = self._everywhere(
                lambda: self._finish(update, fill, progress, pieces, is_best), main_only=True
            )
        if problem and main:
            checkpoints.abandon(update)
        return problem

    def _write_pieces(self, folder: Path) -> list[tuple]:
        folder.mkdir(exist_ok=True)
        return write_pieces(folder, self.engine.accelerator.process_index, self.engine.state)

    def _finish(self, update: int, fill, progress: dict | None, pieces: list[tuple], is_best: bool) -> None:
        partial = self.checkpoints.folder(update).with_suffix(".partial")
        if progress is not None:
            steps, scale = self.engine.state.steps, self.engine.loss_scale()
            more = {"updates": update, "steps": steps, "loss_scale": scale, "world_size": self.engine.world_size}
            write_index(partial / STATE, pieces, {**progress, **more})
        fill(partial)
        self.checkpoints.finish(update, progress is not None, is_best)

    def _everywhere(self, work: Callable[[], Any], main_only: bool = False) -> tuple[str | None, list]:
        """Do some work on every rank. Returns the first failure, and on the main process the joined results."""
        failure, result = None, None
        try:
            result = work() if self.engine.is_main or not main_only else None
        except Exception as error:
            if not _is_of_the_disk(error):
                raise
            failure = first_line(error)
        shares = self.engine.gather_objects((failure, result))
        problem = next((said for said, _ in shares if said), None) if shares else None
        joined = [item for _, share in shares or () for item in share] if isinstance(result, list) and shares else []
        return self.engine.from_main(problem), joined

    def choose(self, wanted: str) -> tuple[Path | None, list[str]]:
        """The checkpoint to resume from (the newest whole one, or the one that is named), and warnings about others.

        Raises:
            UserError: the one that is named is no whole checkpoint.
        """
        found: tuple[Path | None, list[str], str | None] = (None, [], None)
        if self.engine.is_main:
            found = self._newest_whole() if wanted == "auto" else self._named(Path(wanted).expanduser())
        folder, warnings, problem = self.engine.from_main(found)
        if problem:
            raise UserError(problem)
        return folder, warnings

    def _newest_whole(self) -> tuple[Path | None, list[str], None]:
        warnings = []
        for folder in self.checkpoints.resumable():
            problem = flaw(folder)
            if problem is None:
                return folder, warnings, None
            warnings.append(f"warning   {folder} is not used: {problem}")
        return None, warnings, None

    def _named(self, folder: Path) -> tuple[Path | None, list[str], str | None]:
        folder = folder.resolve()
        if not (folder / STATE).is_dir():
            return None, [], f"resume = {str(folder)!r} is no checkpoint to resume from: it has no {STATE}/ folder"
        problem = flaw(folder)
        return (None, [], f"resume = {str(folder)!r}: {problem}. Name another") if problem else (folder, [], None)

    def load(self, folder: Path) -> dict[str, Any]:
        """Put a checkpoint's state into the engine. Returns the progress of its run.

        Raises:
            UserError: it is of another model.
        """
        progress, files = read_progress(folder / STATE), StateFiles(folder / STATE)
        problems = files.problems(self.engine.state.parameters)
        if problems:
            raise UserError(
                f"the checkpoint {folder} is of another model: {problems[0]} ({len(problems)} such weights). Choose "
                "another --output_dir, or start over with --resume never"
            )
        self.engine.state.load(files.read, progress["steps"])
        self.engine.continue_from(progress["updates"], progress["loss_scale"])
        return progress


def _is_of_the_disk(error: Exception) -> bool:
    """Whether a save failed for want of room or permission, and not through a mistake in the program."""
    from safetensors import SafetensorError

    said = str(error).lower()
    words = ("no space left", "os error", "i/o error", "permission denied", "disk quota", "read-only file system")
    return isinstance(error, OSError) or (isinstance(error, SafetensorError) and any(word in said for word in words))
