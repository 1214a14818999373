"""The checkpoints of a run: when one is written, what is in it, and how the run resumes from it: which earlier
run that is, and whether its position in the data is one in this data.
"""

import shutil
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from zerofit.checkpoint.directory import BEST, LEAVING, PROGRESS, START, STATE, CheckpointDirectory, find_damage
from zerofit.checkpoint.writer import AsyncCheckpointWriter, BestEvaluation, named_checkpoint_problem
from zerofit.data.pack import SampleSet
from zerofit.health.anomaly import Anomaly
from zerofit.model.export import NamedWeights
from zerofit.recipe.errors import NothingToDo, UserError, first_line
from zerofit.recipe.files import counted, is_disk_error, read_record, remove
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
from zerofit.record.terminal import log_lines
from zerofit.strategy.batches import RESUMED_RUN

if TYPE_CHECKING:
    from zerofit.training.run import Run

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
        own = folder.recorded()
        checkpoints = CheckpointDirectory(folder.path / CHECKPOINTS)
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
        recipe.adopt("global_batch_size", size, f"{RESUMED_RUN}, of {counted(before, 'process')}")
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
        sources = []
        notes = []
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


MAX_REWINDS = 10


class CheckpointManager:
    """Saves and restores a run. All ranks call its methods together.

    Args:
        run: its state is saved, and restored in place.
        about: what a checkpoint tells of the run: the options that make it, its strategy, its processes.
        data: the fingerprint of the training set, which the run's place in the data refers to.
    """

    def __init__(self, run: "Run", about: dict[str, Any], data: dict[str, Any]) -> None:
        self.folder = run.folder
        self.recipe = run.recipe
        self.state = run.state
        self.mirror = run.mirror
        self._best = run.best
        self.resumed_at = 0  # updates that were made before this launch
        self.resumed_from: Path | None = None  # the folder of the run that it resumes
        self._resumes_its_own_folder = False  # and not a run of another folder
        self.directory = CheckpointDirectory(run.folder.path / "checkpoints", run.recipe.save_total_limit)
        self.writer = AsyncCheckpointWriter(self.directory, run.engine, run.exporter.writes_all, run.recipe.save_async)
        self._engine = run.engine
        self._exporter = run.exporter
        self._about = about
        self._data = data
        self._starts_over = False  # this run is in the folder, and has left no state
        self._interval_s = 0.0 if run.recipe.save_strategy == "no" else 60 * run.recipe.save_minutes
        self._saved_at = time.time()
        self._saved_update: int | None = None  # the update whose state was saved last
        self.missing: list[str] = []  # what could not be written to model/ of the latest checkpoint

    # ------------------------------------------------------------------------------------------------------- resuming

    def resume(self, plan: ResumePlan) -> None:
        """Restore the run that is in the folder, or the checkpoint that is named, where there is one. Raises
        UserError: none of the folder's checkpoints can be used, or it is of another run."""
        began = time.perf_counter()
        checkpoint = None
        for source in plan.sources:
            checkpoint, warnings = self.writer.choose(source)
            self._log(*warnings)
            if checkpoint is not None:
                break
            if warnings:
                raise UserError(
                    f"no checkpoint in {self.directory.path} can be used, for the reasons above. Bring one back, or "
                    f"start over with {START_OVER}, which deletes what is left of them"
                )
        else:
            source = ""
        self._starts_over = "auto" in plan.sources and source != "auto"
        if self._starts_over and checkpoint is None:
            models = "; its models stay until they come again" if self.directory.folders() else ""
            self._log(
                f"note      this run is in the folder already, with no state to resume from: it starts over{models}"
            )
        if checkpoint is None:
            return
        run = self._restore(checkpoint)["run"]
        if source == "auto" and (differing := differing_options(plan.identity, run)):
            self.folder.refuse_a_different_run(differing)
        self.resumed_at = self.state.updates
        self.resumed_from = checkpoint.parents[1]
        self._resumes_its_own_folder = self.resumed_from.resolve() == self.folder.path.resolve()
        size = sum(file.stat().st_size for file in (checkpoint / STATE).iterdir())
        self._log(
            f"resumed   {checkpoint}, after update {self.state.updates:,}, written under {run['strategy']}, number of "
            f"processes {run['num_processes']}: {size / 1e6:,.1f} MB read in {time.perf_counter() - began:.1f} s"
        )

    def drop_replaced(self) -> None:
        """Remove old checkpoints, on the main process: after a resume those of later updates, which come again; of
        another run, which this one replaces, all. If this run starts over since it has no state, its models stay until
        their updates come again. Raises UserError: another launch has written here since this one began."""
        self.folder.lock()
        if self._resumes_its_own_folder:
            self.directory.drop(lambda update: update > self.state.updates)
        elif self._starts_over and not self.recipe.overwrite_output_dir:
            self.directory.drop(lambda update: update <= self.state.updates)
        else:
            refuse_to_clear(self.folder, self.recipe.overwrite_output_dir)
            self.directory.drop(lambda update: True)

    def restore_best_checkpoint(self) -> None:
        """Check that the best checkpoint so far is in the folder; if it is missing, or was the best by another figure,
        best-metric tracking restarts."""
        best = self.state.best
        is_here = True
        if best.metric not in ("", self._best.metric):
            self._log(
                f"note      metric_for_best_model was {best.metric}, and is {self._best.metric} now: the next "
                "evaluation is the best, and early_stopping_patience counts from there"
            )
            vars(best).update(vars(BestEvaluation()))
        if self._engine.is_main:
            is_here = best.update is None or not self._best.keeps or self._bring_best(best.update)
        if not self._engine.from_main(is_here):
            self._log(
                f"note      the best checkpoint so far, of update {best.update}, is gone: the next evaluation is the "
                "best"
            )
            vars(best).update(vars(BestEvaluation(metric=best.metric, worse_in_a_row=best.worse_in_a_row)))

    def _bring_best(self, update: int) -> bool:
        """Let `best` point to the best checkpoint so far, which is copied if the run that is resumed lies elsewhere.
        Returns False where it is gone."""
        if not (self.directory.folder(update) / "model").is_dir():
            if self.resumed_from is None or self._resumes_its_own_folder:
                return False
            other = CheckpointDirectory(self.resumed_from / "checkpoints").folder(update)
            if find_damage(other):
                return False
            shutil.copytree(other, self.directory.partial(update))
            self.directory.partial(update).rename(self.directory.folder(update))
        self.directory.point(self.directory.best, self.directory.folder(update))
        return True

    def start(self) -> None:
        """Say when checkpoints are written; where an anomaly leads back to one, write the first now."""
        recipe = self.recipe
        free = shutil.disk_usage(self.folder.path).free
        strategy = recipe.save_strategy or ("steps" if recipe.save_steps else None)
        asked = {"epoch": "at the end of each epoch", "steps": f"every {recipe.save_steps} updates"}
        when = [asked[strategy]] if strategy in asked else []
        when += [f"every {recipe.save_minutes:g} minutes"] if self._interval_s else []
        size = self.writer.bytes_of_weights + self._engine.state.bytes_of_all()
        if not when:
            self._log("saves     none: a run that is killed starts over")
        else:
            self._log(f"saves     {' and '.join(when)}: about {size / 1e6:,.1f} MB each")
        if when and free < 1.05 * size:
            self._log(
                f"warning   {self.folder.path} has no room for a checkpoint of {size / 1e6:,.1f} MB: "
                f"{free / 1e6:,.1f} MB are free. Make room, or choose another --output_dir"
            )
        if self.mirror is not None:
            updates = self.state.updates if self._resumes_its_own_folder else -1
            self.mirror.start(self.folder.path, self.directory, updates)
        if self.resumed_from is None:
            self.writer.check()
        if recipe.on_anomaly == "rewind" and not self.state.updates:
            self.save(START, False, {})

    def rewind(self, anomaly: Anomaly) -> bool:
        """Go back to the newest usable checkpoint, and skip the refused update when it comes again. Returns False
        where `on_anomaly` is not rewind, no checkpoint is usable, or MAX_REWINDS updates are skipped."""
        if self.recipe.on_anomaly != "rewind" or len(self.state.skipped_updates) >= MAX_REWINDS:
            return False
        self.writer.wait()
        checkpoint, warnings = self.writer.choose("auto")
        self._log(*warnings)
        if checkpoint is None:
            return False
        skipped = sorted({*self.state.skipped_updates, anomaly.update})
        self._restore(checkpoint)
        self.state.skipped_updates = skipped
        self.restore_best_checkpoint()
        self._log(f"rewound   to {checkpoint}; skipped: update {', '.join(map(str, skipped))}")
        if self._engine.is_main:
            self.folder.metrics.start(self.state.updates)
            if self.recipe.record_samples:
                self.folder.samples.start(self.state.updates)
        return True

    def _restore(self, checkpoint: Path) -> dict[str, Any]:
        saved = self.writer.load(checkpoint)
        check_data(self._data, saved["data"], checkpoint)
        self.state.restore(saved)
        self._saved_update = self.state.updates
        return saved

    # --------------------------------------------------------------------------------------------------------- saving

    @property
    def saved_latest(self) -> bool:
        """True if the state of the latest update is in a checkpoint."""
        return self._saved_update == self.state.updates and not self.writer.last_failed

    def is_due_by_clock(self) -> bool:
        return bool(self._interval_s) and time.time() >= self._saved_at + self._interval_s

    def save(self, why: str | None, is_best: bool, held_out: dict[str, float]) -> None:
        """Begin a checkpoint. `why`: ASKED, CLOCK, ... of zerofit/checkpoint/directory.py; None: as the best only,
        without a state. `held_out`: figures of this update's evaluation; empty: there was none."""
        with_state = why is not None
        if why == LEAVING and self.state.updates == self._saved_update:
            return
        # Opened now: the next evaluation puts others in their place.
        files = self.folder.path.glob("predictions*.jsonl") if held_out and self._engine.is_main else ()
        predictions = [path.open("rb") for path in files]

        def fill(folder: Path, weights: NamedWeights) -> None:
            try:
                missing = self._exporter.write(weights, held_out, folder / "model")
            except Exception as error:
                if is_disk_error(error) or not with_state:
                    raise
                traceback.print_exc()
                remove(folder / "model")
                missing = [f"all of it ({first_line(error)})"]  # the state is there to resume from
            if missing != self.missing:
                self.missing = missing
                self.writer.messages += [f"warning   model/ of checkpoints is without {each}" for each in missing]
            for file in predictions:
                with file, (folder / Path(file.name).name).open("wb") as written:
                    shutil.copyfileobj(file, written)

        for lines in (self.folder.metrics, self.folder.samples, self.folder.anomalies):
            lines.sync()  # what leads up to a checkpoint is on the disk when the checkpoint is
        progress = asdict(self.state) | {"run": self._about, "data": self._data} if with_state else None
        self.writer.save(self.state.updates, why or BEST, fill, self._exporter.weights, progress, is_best=is_best)
        if with_state:
            self._saved_at = time.time()
            self._saved_update = self.state.updates

    def messages(self) -> list[str]:
        """Lines on checkpoints since the last call, for the log of the main process."""
        messages = self.writer.messages
        self.writer.messages = []
        return messages + (self.mirror.messages() if self.mirror is not None else [])

    def finish(self, after_anomaly: bool) -> None:
        """Wait for the last checkpoint, and say what became of it. After an anomaly, first save what is good."""
        if after_anomaly:
            self.save(LEAVING, False, {})
        self.writer.wait()
        self._log(*self.messages())

    def _log(self, *lines: str) -> None:
        log_lines(*lines, main=self._engine.is_main)
