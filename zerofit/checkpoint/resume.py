"""Finds the earlier run that this one resumes, and checks that its position in the data is one in this data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from zerofit.checkpoint.directory import PROGRESS, STATE, CheckpointDirectory
from zerofit.checkpoint.writer import named_checkpoint_problem
from zerofit.data.pack import SampleSet
from zerofit.recipe.errors import NothingToDo, UserError
from zerofit.recipe.files import counted, read_record
from zerofit.recipe.options import TrainingRecipe
from zerofit.record.run_folder import (
    CHECKPOINTS,
    GIVEN_FOR,
    RunFolder,
    differing_options,
    evident_differences,
    identity_options,
    is_count,
)
from zerofit.strategy.batches import RESUMED

SAMPLES_LOOKED_AT = 64
START_OVER = "--resume never --overwrite_output_dir"
NEVER_CHANGED = {  # beginnings of differences, and why a run that resumes may have none
    "optim ": "one optimizer cannot read what another has kept",
    "ema_decay was 0.0,": "it has no mean of the weights",
    "seed ": "the data position would change",
    "global_batch_size ": "the data position would change",
    "tokens_per_batch ": "the data position would change",
}


@dataclass(frozen=True)
class ResumePlan:
    """Says where a run resumes from."""

    identity: dict[str, Any]  # the options that make the run the run that it is
    sources: tuple[str, ...] = ()  # tried one after another: auto (the folder's newest checkpoint), or a checkpoint
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class EarlierRuns:
    """The runs from which this one may resume, as they were recorded."""

    own: dict[str, Any] | None = None  # the options of the run that is in the output folder; None: there is none
    checkpoint: Path | None = None  # the folder that `resume` names
    named: dict[str, Any] | None = None  # the options of the run that wrote it

    @classmethod
    def read(cls, recipe: TrainingRecipe, folder: RunFolder) -> "EarlierRuns":
        """Raises UserError: `resume` names a folder that is not a checkpoint."""
        own, checkpoints = folder.recorded(), CheckpointDirectory(folder.path / CHECKPOINTS)
        if own is None and checkpoints.newest_after(folder.written.begun_at) is not None:  # the run's record is lost
            own = next(filter(None, map(_recorded_in, checkpoints.resumable())), None)
        if recipe.resume in ("auto", "never"):
            return cls(own)
        checkpoint = Path(recipe.resume).expanduser()
        if problem := named_checkpoint_problem(checkpoint):
            raise UserError(
                f"resume = {str(checkpoint)!r}: {problem}. Say auto (the newest of output_dir), never, or a folder "
                "such as RUN/checkpoints/latest"
            )
        named = _recorded_in(checkpoint)
        if not named:
            raise UserError(f"resume = {str(checkpoint)!r}: its state/progress.json cannot be read. Name another")
        return cls(own, checkpoint, named)

    def keep_global_batch(self, recipe: TrainingRecipe, replicas: int) -> tuple[int, bool, str | None]:
        """Let the accumulation follow where a run resumes with another number of data-parallel processes than its
        options were given for: the recipe adopts the global batch of the run before. Returns (the number of replicas
        that the options are given for, whether the global batch is that of a run that resumes, what was done). The
        number stays as it was, so that the same command resumes the run again."""
        recorded: dict[str, Any] = {}  # the options of the run that this one seems to resume
        if recipe.resume != "never":
            is_this_run = self.own is not None and not evident_differences(recipe, self.own)
            recorded = (self.own if is_this_run else self.named) or {}
        size: Any = recorded.get("global_batch_size")
        before: Any = recorded.get(GIVEN_FOR)
        given = recipe.global_batch_size if recipe.source("global_batch_size") else None
        if not is_count(size) or not is_count(before) or given not in (None, size):
            return replicas, False, None
        if before == replicas:
            return replicas, given is not None, None
        recipe.adopt("global_batch_size", size, f"{RESUMED}, of {counted(before, 'process')}")
        recipe.adopt("gradient_accumulation_steps", None, "")
        note = f"{replicas} data-parallel processes, and the options are those of {before}: the global batch stays "
        return before, True, f"{note}{size}, and the accumulation follows"

    def compiled(self, plan: "ResumePlan") -> bool | str | None:
        """The part of the model that was compiled in the run that a plan resumes; None: it resumes none."""
        recorded = self.own if "auto" in plan.sources else self.named
        if not plan.sources or recorded is None:
            return None
        value: bool | str = recorded.get("torch_compile") or False
        return value if value != "auto" else False

    def plan(self, recipe: TrainingRecipe, global_batch: int, folder: RunFolder) -> ResumePlan:
        """Decide, once recipe and strategy are resolved. Raises UserError: the folder holds another run, or the
        checkpoint's place in the data would be another. Raises NothingToDo: it holds this very run, finished."""
        now = identity_options(recipe, global_batch)
        differing = differing_options(now, self.own or {})
        if differing and not recipe.overwrite_output_dir:
            folder.refuse_a_different_run(differing)
        sources, notes = [], []
        inside = self.checkpoint is not None and self.checkpoint.resolve().parents[1] == folder.path.resolve()
        if recipe.resume != "never" and self.own is not None and not differing and not inside:
            if folder.is_finished and not recipe.overwrite_output_dir:
                # The order of a corpus' samples follows from the length of the run.
                longer = "" if getattr(recipe, "data_path", None) else "--resume one of its checkpoints, or "
                raise NothingToDo(
                    f"this run already finished, its model is {folder.model}. --overwrite_output_dir repeats it; to "
                    f"train it further, choose another --output_dir and {longer}--model_name_or_path "
                    f"{folder.model}"
                )
            sources += [] if folder.is_finished else ["auto"]
        if self.checkpoint is not None and self.named is not None:
            notes += [f"resumes with a change: {text}" for text in differences_from(recipe, global_batch, self.named)]
            sources.append(str(self.checkpoint))
        checkpoints = CheckpointDirectory(folder.path / CHECKPOINTS)
        continues = inside or ("auto" in sources and any(checkpoints.resumable()))
        folder.refuse_foreign_files(recipe.overwrite_output_dir, in_checkpoints=not continues)
        if not continues and ("auto" not in sources or folder.model.is_dir()):
            refuse_to_clear(folder, recipe.overwrite_output_dir, is_known=self.own is not None)
        return ResumePlan(now, tuple(sources), tuple(notes))


def refuse_to_clear(folder: RunFolder, overwrite: bool, is_known: bool = True) -> None:
    """Raises UserError where a run that starts would delete checkpoints or a model, and was not told to. `is_known`:
    it is known which run is in the folder, and this is the same."""
    newest = CheckpointDirectory(folder.path / CHECKPOINTS).newest_after(folder.written.begun_at)
    holds = newest or (folder.model if folder.model.is_dir() and any(folder.model.iterdir()) else None)
    if holds is None and not is_known and folder.has_updates():
        holds = folder.metrics.path
    if holds is not None and not overwrite:
        raise UserError(
            f"output_dir = {str(folder.path)!r} holds {holds.relative_to(folder.path)}, and this run would start "
            f"over. Choose another --output_dir, or delete what is there with {START_OVER}"
        )


def _recorded_in(checkpoint: Path) -> dict[str, Any]:
    """The options that a checkpoint was written with; empty if they cannot be read."""
    run = read_record(checkpoint / STATE / PROGRESS).get("run")
    return run if isinstance(run, dict) else {}


def differences_from(recipe: TrainingRecipe, global_batch: int, recorded: dict[str, Any]) -> list[str]:
    """The options in which a run differs from the one of the checkpoint that was named. Raises UserError: another
    optimizer; no mean of the weights where there shall be one; another seed or batch, with which the checkpoint's
    place in the data is another place."""
    differing = differing_options(identity_options(recipe, global_batch), recorded)
    reasons = NEVER_CHANGED.items()
    problems = [f"{text}: {why}" for text in differing for beginning, why in reasons if text.startswith(beginning)]
    if problems:
        raise UserError(
            f"resume = {recipe.resume!r}: {'; '.join(problems)}. Set it as it was, or train on its weights in a run "
            "of their own: --model_name_or_path RUN/model"
        )
    return differing


def data_fingerprint(samples: SampleSet, grouping: str) -> dict[str, Any]:
    """The fingerprint of a training set: its size, a checksum over some of its samples, and how it is grouped. Of
    a stream, which has no size and is not read for this, what it is made of."""
    digest = xxhash.xxh3_64()
    if stream := getattr(samples, "made_of", None):
        digest.update(repr(sorted(stream.items())).encode())
        return {"samples": 0, "checksum": digest.hexdigest(), "grouping": grouping}
    for index in np.linspace(0, len(samples) - 1, min(len(samples), SAMPLES_LOOKED_AT)).astype(int):
        digest.update(np.ascontiguousarray(samples[int(index)]["input_ids"], dtype=np.int64).tobytes())
    return {"samples": len(samples), "checksum": digest.hexdigest(), "grouping": grouping}


def check_data(now: dict[str, Any], recorded: dict[str, Any], folder: Path) -> None:
    """Raises UserError where the training data is not what the checkpoint was made with."""
    if now == recorded:
        return
    changed = "; ".join(
        f"{name} {now[name]}, and was {recorded.get(name)}" for name in now if now[name] != recorded.get(name)
    )
    raise UserError(
        f"the training data is not that which {folder} was written with ({changed}): the data position would change. "
        "Restore the data (with data_path also max_train_steps and num_train_epochs, which the order follows from), "
        f"or start over with {START_OVER}"
    )
