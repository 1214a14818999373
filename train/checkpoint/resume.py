"""Going on: which run it is that goes on, and whether a checkpoint's place in the data is a place in this data."""

from pathlib import Path
from typing import Any

import numpy as np

from train.checkpoint.directory import STATE
from train.checkpoint.shards import read_progress
from train.checkpoint.writer import named_checkpoint_problem
from train.data.pack import SampleSet
from train.recipe.errors import NothingToDo, UserError
from train.recipe.options import BatchOptions
from train.record.run_folder import RunFolder, differences

SAMPLES_LOOKED_AT = 64


class ResumePlan:
    """What a run may go on from, as its folder and the option `resume` have it. First `settle` it.

    Args:
        recipe: its global batch is adopted from the run that goes on, where the number of processes has changed.
        folder: the output folder.

    Raises:
        UserError: `resume` names a folder that is no checkpoint.
    """

    def __init__(self, recipe, folder: RunFolder, world_size: int):
        self.recipe, self.folder = recipe, folder
        self.own = folder.recorded()  # the options of the run that is in the folder
        self.named: Path | None = None
        self.wanted: list[str] = []  # what is tried, one after another: auto, or a checkpoint's folder
        self.note: str | None = None
        named_run = None
        if recipe.resume not in ("auto", "never"):
            self.named = Path(recipe.resume).expanduser()
            named_run = self._run_of(self.named)
        self._named_run = named_run
        goes_on = self.own if self.own is not None and not self._is_evidently_another() else named_run
        if goes_on is not None and recipe.resume != "never":
            self.note = keep_global_batch(recipe, goes_on, world_size)

    def settle(self, global_batch: int) -> list[str]:
        """Decide, once the strategy has filled in what the recipe left open. Returns what is to be said of it.

        Raises:
            UserError: the folder holds another run, or the checkpoint's place in the data would be another.
            NothingToDo: the folder holds this very run, and it is finished.
        """
        recipe, own = self.recipe, self.own
        differing = differences(recipe, global_batch, own) if own is not None else []
        if differing and not recipe.overwrite_output_dir:
            self.folder.refuse_a_different_run(differing)
        is_own = own is not None and not differing
        notes = [self.note] if self.note else []
        inside = self.named is not None and self.named.resolve().parents[1] == self.folder.path.resolve()
        if recipe.resume == "never":
            return notes
        if is_own and not inside:
            if self.folder.is_finished and not recipe.overwrite_output_dir:
                # The order of a corpus' samples follows from the length of the run.
                longer = "" if getattr(recipe, "data_path", None) else "--resume one of its checkpoints, or "
                raise NothingToDo(
                    f"this very run is finished, its model is {self.folder.model}. --resume never makes it again; to "
                    f"train it further, choose another --output_dir and {longer}--model_name_or_path "
                    f"{self.folder.model}"
                )
            self.wanted = [] if self.folder.is_finished else ["auto"]
        if self.named is not None:
            notes += [f"goes on otherwise: {text}" for text in differences_from(recipe, global_batch, self._named_run)]
            self.wanted.append(str(self.named))
        return notes

    def _is_evidently_another(self) -> bool:
        """Whether the folder's run is another one, whatever a strategy may yet fill in."""
        left_open = {name for name, value in self.recipe.to_dict().items() if value is None}
        differing = differences(self.recipe, self.own.get("global_batch_size"), self.own)
        return any(text.split()[0] not in left_open for text in differing)

    def _run_of(self, checkpoint: Path) -> dict[str, Any]:
        problem = named_checkpoint_problem(checkpoint)
        if problem:
            raise UserError(
                f"resume = {str(checkpoint)!r}: {problem}. Say auto (the newest of output_dir), never, or a folder "
                "such as RUN/checkpoints/latest"
            )
        try:
            return read_progress(checkpoint / STATE)["run"]
        except (OSError, ValueError, KeyError):
            raise UserError(f"resume = {str(checkpoint)!r}: its state/progress.json cannot be read") from None


def keep_global_batch(recipe: BatchOptions, recorded: dict[str, Any], world_size: int) -> str | None:
    """Let the accumulation follow where a run goes on with another number of processes. Returns what was done."""
    size, before = recorded.get("global_batch_size"), recorded.get("num_processes")
    if size is None or before in (None, world_size) or recipe.source("global_batch_size"):
        return None
    recipe.adopt("global_batch_size", size, f"the run that goes on, of {before} processes")
    recipe.adopt("gradient_accumulation_steps", None, "")
    return (
        f"{world_size} processes, before it were {before}: the global batch stays {size}, and the accumulation follows"
    )


def differences_from(recipe, global_batch: int, recorded: dict[str, Any]) -> list[str]:
    """The options in which a run differs from the one of the checkpoint that was named.

    Raises:
        UserError: another seed or global batch, with which the checkpoint's place in the data is another place.
    """
    differing = differences(recipe, global_batch, recorded)
    displaced = [text for text in differing if text.startswith(("seed ", "global_batch_size "))]
    if displaced:
        raise UserError(
            f"resume = {recipe.resume!r}: {'; '.join(displaced)}: its place in the data would be another. Set it as "
            "it was"
        )
    return differing


def fingerprint(samples: SampleSet, grouping: str) -> dict[str, Any]:
    """What tells a training set from another: its size, a checksum over some of its samples, and how it is grouped."""
    import xxhash

    digest = xxhash.xxh3_64()
    for index in np.linspace(0, len(samples) - 1, min(len(samples), SAMPLES_LOOKED_AT)).astype(int):
        digest.update(np.ascontiguousarray(samples[int(index)]["input_ids"], dtype=np.int64).tobytes())
    return {"samples": len(samples), "checksum": digest.hexdigest(), "grouping": grouping}


def check_data(now: dict[str, Any], found: dict[str, Any], folder: Path) -> None:
    """Raises UserError where the training data is not what the checkpoint was made with."""
    if now == found:
        return
    changed = next(name for name in now if now[name] != found.get(name))
    what = {
        "samples": f"has {now['samples']:,} samples, and had {found['samples']:,}",
        "checksum": "has other samples than it had",
        "grouping": f"is grouped by {now['grouping']!r}, and was by {found['grouping']!r}",
    }
    raise UserError(
        f"the training data {what[changed]} when {folder} was written: its place in the data would be another. "
        "Restore the data (with data_path also max_train_steps and num_train_epochs, which the order follows from), "
        "or start over with --resume never"
    )
