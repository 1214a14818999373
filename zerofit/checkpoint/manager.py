"""The manager of a run's checkpoints: when one is written, what it contains, and how a run resumes: from which earlier
run, and only if the data is the same, so that its position in the data is still valid."""

import shutil
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from zerofit.checkpoint.directory import PROGRESS_FILE, STATE_FOLDER, CheckpointDirectory, SaveReason, find_damage
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
from zerofit.strategy.batches import RESUMED_RUN

if TYPE_CHECKING:
    from zerofit.training.run import Run

NUM_FINGERPRINT_SAMPLES = 64
MAX_REWINDS = 10
START_OVER_OPTIONS = "--resume never --overwrite_output_dir"
FORBIDDEN_CHANGES = {  # {beginning of a difference between options: why a run cannot resume with it}
    "optim ": "one optimizer cannot read what another has kept",
    "ema_decay was 0.0,": "it has no mean of the weights",
    "seed ": "the data position would change",
    "global_batch_size ": "the data position would change",
    "tokens_per_batch ": "the data position would change",
}


@dataclass(frozen=True)
class ResumePlan:
    """The decision from where a run resumes."""

    identity: dict[str, Any]  # the options that identify the run
    sources: tuple[str, ...]  # tried one after another: auto (the folder's newest checkpoint), or a checkpoint
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EarlierRuns:
    """The records of the runs from which this one may resume."""

    in_folder: dict[str, Any] | None = None  # the options of the run that is in the output folder; None: there is none
    checkpoint: Path | None = None  # the folder that `resume` names
    of_checkpoint: dict[str, Any] | None = None  # the options of the run that wrote this checkpoint

    @classmethod
    def read(cls, recipe: TrainingRecipe, folder: RunFolder) -> "EarlierRuns":
        """Read the records of the output folder and of the checkpoint that `resume` names. Raises UserError: `resume`
        names a folder that is not a checkpoint."""
        in_folder = folder.recorded()
        checkpoints = CheckpointDirectory(folder.path / CHECKPOINTS)
        if in_folder is None and checkpoints.newest_after(folder.written.begun_at) is not None:  # its record is lost
            in_folder = next(filter(None, map(_recorded_in, checkpoints.resumable())), None)
        if recipe.resume in ("auto", "never"):
            return cls(in_folder)
        checkpoint = Path(recipe.resume).expanduser()
        if problem := named_checkpoint_problem(checkpoint):
            raise UserError(
                f"resume = {str(checkpoint)!r}: {problem}. Say auto (the newest of output_dir), never, or a folder "
                "such as RUN/checkpoints/latest"
            )
        of_checkpoint = _recorded_in(checkpoint)
        if not of_checkpoint:
            raise UserError(f"resume = {str(checkpoint)!r}: its state/progress.json cannot be read. Name another")
        return cls(in_folder, checkpoint, of_checkpoint)

    def keep_global_batch(self, recipe: TrainingRecipe, replicas: int) -> tuple[int, bool, str | None]:
        """Keep the global batch if a run resumes with another number of data-parallel processes than its options were
        given for: the recipe adopts the recorded one, and the accumulation follows. Returns (the number of replicas
        that the options are given for, whether the global batch is that of a resumed run, a note on what was done).
        The number is the recorded one, so that the same command resumes the run again."""
        recorded: dict[str, Any] = {}  # the options of the run that this one seems to resume
        if recipe.resume != "never":
            is_this_run = self.in_folder is not None and not evident_differences(recipe, self.in_folder)
            recorded = (self.in_folder if is_this_run else self.of_checkpoint) or {}
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
        """Return the part of the model that the resumed run compiled; None if no run is resumed."""
        recorded = self.in_folder if "auto" in plan.sources else self.of_checkpoint
        if recorded is None:
            return None
        value: bool | str = recorded.get("torch_compile") or False
        return value if value != "auto" else False

    def plan(self, recipe: TrainingRecipe, global_batch: int, folder: RunFolder) -> ResumePlan:
        """Decide where the run resumes, once recipe and strategy are resolved. Raises UserError: the folder holds
        another run, or the data position would change. Raises NothingToDo: the folder holds this run, finished."""
        identity = identity_options(recipe, global_batch)
        differing = differing_options(identity, self.in_folder or {})
        if differing and not recipe.overwrite_output_dir:
            folder.refuse_a_different_run(differing)
        sources = []
        notes = []
        is_inside = self.checkpoint is not None and self.checkpoint.resolve().parents[1] == folder.path.resolve()
        if recipe.resume != "never" and self.in_folder is not None and not differing and not is_inside:
            if folder.is_finished and not recipe.overwrite_output_dir:
                # The order of a corpus' samples follows from the length of the run.
                longer = "" if getattr(recipe, "data_path", None) else "--resume one of its checkpoints, or "
                raise NothingToDo(
                    f"this run already finished, its model is {folder.model}. --overwrite_output_dir repeats it; to "
                    f"train it further, choose another --output_dir and {longer}--model_name_or_path "
                    f"{folder.model}"
                )
            sources += [] if folder.is_finished else ["auto"]
        if self.checkpoint is not None:
            changes = differences_from(recipe, global_batch, self.of_checkpoint or {})
            notes += [f"resumes with a change: {text}" for text in changes]
            sources.append(str(self.checkpoint))
        checkpoints = CheckpointDirectory(folder.path / CHECKPOINTS)
        continues = is_inside or ("auto" in sources and any(checkpoints.resumable()))
        folder.refuse_foreign_files(recipe.overwrite_output_dir, in_checkpoints=not continues)
        if not continues and ("auto" not in sources or folder.model.is_dir()):
            refuse_to_delete(folder, recipe.overwrite_output_dir, is_recorded=self.in_folder is not None)
        return ResumePlan(identity, tuple(sources), tuple(notes))


def refuse_to_delete(folder: RunFolder, overwrite: bool, is_recorded: bool = True) -> None:
    """Check that a run that starts over deletes no checkpoints and no model, unless `overwrite` is set. `is_recorded`:
    the record of the run in the folder can be read. Raises UserError: it names what would be deleted."""
    newest = CheckpointDirectory(folder.path / CHECKPOINTS).newest_after(folder.written.begun_at)
    deleted = newest or (folder.model if folder.model.is_dir() and any(folder.model.iterdir()) else None)
    if deleted is None and not is_recorded and folder.has_updates():
        deleted = folder.metrics.path
    if deleted is not None and not overwrite:
        raise UserError(
            f"output_dir = {str(folder.path)!r} holds {deleted.relative_to(folder.path)}, and this run would start "
            f"over. Choose another --output_dir, or delete what is there with {START_OVER_OPTIONS}"
        )


def _recorded_in(checkpoint: Path) -> dict[str, Any]:
    """Return the options that a checkpoint was written with; empty if they cannot be read."""
    run = read_record(checkpoint / STATE_FOLDER / PROGRESS_FILE).get("run")
    return run if isinstance(run, dict) else {}


def differences_from(recipe: TrainingRecipe, global_batch: int, recorded: dict[str, Any]) -> list[str]:
    """Return the options in which a run differs from the run that wrote the named checkpoint. Raises UserError: a run
    cannot resume with such a change of the optimizer, the mean of the weights, the seed or the batch."""
    differing = differing_options(identity_options(recipe, global_batch), recorded)
    forbidden = FORBIDDEN_CHANGES.items()
    problems = [f"{text}: {why}" for text in differing for beginning, why in forbidden if text.startswith(beginning)]
    if problems:
        raise UserError(
            f"resume = {recipe.resume!r}: {'; '.join(problems)}. Set it as it was, or train on its weights in a run "
            "of their own: --model_name_or_path RUN/model"
        )
    return differing


def data_fingerprint(samples: SampleSet, grouping: str) -> dict[str, Any]:
    """Return the fingerprint of a training set: its size, a checksum over some of its samples, and how it is grouped.
    For a stream, which has no size and is not read here, the checksum is over the description of its sources."""
    digest = xxhash.xxh3_64()
    if stream := getattr(samples, "made_of", None):
        digest.update(repr(sorted(stream.items())).encode())
        return {"samples": 0, "checksum": digest.hexdigest(), "grouping": grouping}
    for index in np.linspace(0, len(samples) - 1, min(len(samples), NUM_FINGERPRINT_SAMPLES)).astype(int):
        digest.update(np.ascontiguousarray(samples[int(index)]["input_ids"], dtype=np.int64).tobytes())
    return {"samples": len(samples), "checksum": digest.hexdigest(), "grouping": grouping}


def check_data(now: dict[str, Any], recorded: dict[str, Any], folder: Path) -> None:
    """Compare two fingerprints. Raises UserError: the training data differs from that of the checkpoint."""
    differing = [name for name in {**now, **recorded} if now.get(name) != recorded.get(name)]
    if differing:
        changed = "; ".join(f"{name} {now.get(name)}, and was {recorded.get(name)}" for name in differing)
        raise UserError(
            f"the training data is not that which {folder} was written with ({changed}): the data position would "
            "change. Restore the data (with data_path also max_train_steps and num_train_epochs, which the order "
            f"follows from), or start over with {START_OVER_OPTIONS}"
        )


class CheckpointManager:
    """The saving and restoring of a run. All ranks call its methods together.

    Args:
        run: the run whose state is saved, and restored in place.
        about: what a checkpoint records of the run: identity options, strategy, number of processes.
        data: the fingerprint of the training set, in which the run has its position.
    """

    def __init__(self, run: "Run", about: dict[str, Any], data: dict[str, Any]) -> None:
        self._run = run
        self.folder = run.folder
        self.recipe = run.recipe
        self.state = run.state
        self.resumed_at = 0  # updates that were made before this launch
        self.resumed_from: Path | None = None  # the folder of the run that is resumed
        self._resumes_its_own_folder = False  # False also if a run of another folder is resumed
        self.directory = CheckpointDirectory(run.folder.path / CHECKPOINTS, run.recipe.save_total_limit)
        self.writer = AsyncCheckpointWriter(self.directory, run.engine, run.exporter.writes_all, run.recipe.save_async)
        self._about = about
        self._data = data
        self._starts_over = False  # True if this run is in the folder, but has left no state
        self._interval_s = 0.0 if run.recipe.save_strategy == "no" else 60 * run.recipe.save_minutes
        self._saved_at = time.time()
        self._saved_update: int | None = None  # the update whose state was saved last
        self.missing: list[str] = []  # what could not be written to model/ of the latest checkpoint

    def resume(self, plan: ResumePlan) -> None:
        """Restore the run from the first source of the plan that has a checkpoint, if there is one. Raises UserError:
        the folder's checkpoints are all damaged, or the checkpoint is of another run."""
        began = time.perf_counter()
        checkpoint = None
        for source in plan.sources:
            checkpoint, warnings = self.writer.choose(source)
            self._run.log_lines(*warnings)
            if checkpoint is not None:
                break
            if warnings:
                raise UserError(
                    f"no checkpoint in {self.directory.path} can be used, for the reasons above. Bring one back, or "
                    f"start over with {START_OVER_OPTIONS}, which deletes what is left of them"
                )
        else:
            source = ""
        self._starts_over = "auto" in plan.sources and source != "auto"
        if self._starts_over and checkpoint is None:
            models = "; its models stay until they come again" if self.directory.folders() else ""
            self._run.log_lines(
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
        size = sum(file.stat().st_size for file in (checkpoint / STATE_FOLDER).iterdir())
        self._run.log_lines(
            f"resumed   {checkpoint}, after update {self.state.updates:,}, written under {run['strategy']}, number of "
            f"processes {run['num_processes']}: {size / 1e6:,.1f} MB read in {time.perf_counter() - began:.1f} s"
        )

    def drop_replaced(self) -> None:
        """Remove the checkpoints that this run replaces, on the main process: after a resume those of later updates,
        which are made again; of another run all. If this run starts over because it has no state, its models stay
        until their updates are made again. Raises UserError: another launch has written here since this one began."""
        self.folder.lock()
        if self._resumes_its_own_folder:
            self.directory.drop(lambda update: update > self.state.updates)
        elif self._starts_over and not self.recipe.overwrite_output_dir:
            self.directory.drop(lambda update: update <= self.state.updates)
        else:
            refuse_to_delete(self.folder, self.recipe.overwrite_output_dir)
            self.directory.drop(lambda update: True)

    def restore_best_checkpoint(self) -> None:
        """Check that the best checkpoint so far is in the folder, or copy it there. If it is missing, or was the best
        by another metric, best-metric tracking restarts."""
        best = self.state.best
        is_here = True
        if best.metric not in ("", self._run.best.metric):
            self._run.log_lines(
                f"note      metric_for_best_model was {best.metric}, and is {self._run.best.metric} now: the next "
                "evaluation is the best, and early_stopping_patience counts from there"
            )
            vars(best).update(vars(BestEvaluation()))
        if self._run.engine.is_main:
            is_here = best.update is None or not self._run.best.keeps or self._link_best(best.update)
        if not self._run.engine.from_main(is_here):
            self._run.log_lines(
                f"note      the best checkpoint so far, of update {best.update}, is gone: the next evaluation is the "
                "best"
            )
            vars(best).update(vars(BestEvaluation(metric=best.metric, worse_in_a_row=best.worse_in_a_row)))

    def _link_best(self, update: int) -> bool:
        """Let `best` point to the best checkpoint so far, which is copied if the resumed run has another folder.
        Returns False if it is missing."""
        best = self.directory.folder(update)
        if not (best / "model").is_dir():
            if self.resumed_from is None or self._resumes_its_own_folder:
                return False
            source = CheckpointDirectory(self.resumed_from / CHECKPOINTS).folder(update)
            if find_damage(source):
                return False
            shutil.copytree(source, self.directory.partial(update))
            self.directory.partial(update).rename(best)
        self.directory.point_link(self.directory.best, best)
        return True

    def start(self) -> None:
        """Log when checkpoints are written, and start the mirror. If an anomaly rewinds the run, write the first
        checkpoint now."""
        recipe = self.recipe
        free_bytes = shutil.disk_usage(self.folder.path).free
        strategy = recipe.save_strategy or ("steps" if recipe.save_steps else None)
        intervals = {"epoch": "at the end of each epoch", "steps": f"every {recipe.save_steps} updates"}
        when = [intervals[strategy]] if strategy in intervals else []
        when += [f"every {recipe.save_minutes:g} minutes"] if self._interval_s else []
        size = self.writer.bytes_of_weights + self._run.engine.state.bytes_of_all()
        if not when:
            self._run.log_lines("saves     none: a run that is killed starts over")
        else:
            self._run.log_lines(f"saves     {' and '.join(when)}: about {size / 1e6:,.1f} MB each")
        if when and free_bytes < 1.05 * size:
            self._run.log_lines(
                f"warning   {self.folder.path} has no room for a checkpoint of {size / 1e6:,.1f} MB: "
                f"{free_bytes / 1e6:,.1f} MB are free. Make room, or choose another --output_dir"
            )
        if self._run.mirror is not None:
            self._run.mirror.start(self.directory, self.state.updates if self._resumes_its_own_folder else -1)
        if self.resumed_from is None:
            self.writer.check()
        if recipe.on_anomaly == "rewind" and not self.state.updates:
            self.save(SaveReason.AT_START, False, {})

    def rewind(self, anomaly: Anomaly) -> bool:
        """Go back to the newest intact checkpoint, and skip the refused update when it is reached again. Returns False
        if `on_anomaly` is not rewind, no checkpoint is intact, or MAX_REWINDS updates are skipped already."""
        if self.recipe.on_anomaly != "rewind" or len(self.state.skipped_updates) >= MAX_REWINDS:
            return False
        self.writer.wait()
        checkpoint, warnings = self.writer.choose("auto")
        self._run.log_lines(*warnings)
        if checkpoint is None:
            return False
        skipped = sorted({*self.state.skipped_updates, anomaly.update})
        self._restore(checkpoint)
        self.state.skipped_updates = skipped
        self.restore_best_checkpoint()
        self._run.log_lines(f"rewound   to {checkpoint}; skipped: update {', '.join(map(str, skipped))}")
        if self._run.engine.is_main:
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

    @property
    def saved_latest(self) -> bool:
        """Return True if the state of the latest update is in a checkpoint."""
        return self._saved_update == self.state.updates and not self.writer.last_failed

    def is_due_by_clock(self) -> bool:
        return bool(self._interval_s) and time.time() >= self._saved_at + self._interval_s

    def save(self, why: SaveReason | None, is_best: bool, held_out: dict[str, float]) -> None:
        """Start a checkpoint. `why`: None for the best model only, without a state. `held_out`: the figures of this
        update's evaluation; empty if there was none."""
        with_state = why is not None
        if why == SaveReason.BEFORE_EXIT and self.state.updates == self._saved_update:
            return
        # Opened now, since the next evaluation replaces them.
        files = self.folder.path.glob("predictions*.jsonl") if held_out and self._run.engine.is_main else ()
        predictions = [path.open("rb") for path in files]

        def fill(folder: Path, weights: NamedWeights) -> None:
            try:
                missing = self._run.exporter.write(weights, held_out, folder / "model")
            except Exception as error:
                if is_disk_error(error) or not with_state:
                    raise
                traceback.print_exc()
                remove(folder / "model")
                missing = [f"all of it ({first_line(error)})"]  # the run can still resume from the state
            if missing != self.missing:
                self.missing = missing
                self.writer.messages += [f"warning   model/ of checkpoints is without {file}" for file in missing]
            for source in predictions:
                with source, (folder / Path(source.name).name).open("wb") as written:
                    shutil.copyfileobj(source, written)

        for lines in (self.folder.metrics, self.folder.samples, self.folder.anomalies):
            lines.sync()  # so that the lines up to a checkpoint are on the disk before it
        progress = asdict(self.state) | {"run": self._about, "data": self._data} if with_state else None
        reason = why or SaveReason.BEST
        self.writer.save(self.state.updates, reason, fill, self._run.exporter.weights, progress, is_best=is_best)
        if with_state:
            self._saved_at = time.time()
            self._saved_update = self.state.updates

    def messages(self) -> list[str]:
        """Return the lines on checkpoints since the last call, for the log of the main process."""
        messages = self.writer.messages
        self.writer.messages = []
        return messages + (self._run.mirror.messages() if self._run.mirror is not None else [])

    def finish(self, after_anomaly: bool) -> None:
        """Wait for the last checkpoint, and log its result. After an anomaly, first save the state before it."""
        if after_anomaly:
            self.save(SaveReason.BEFORE_EXIT, False, {})
        self.writer.wait()
        self._run.log_lines(*self.messages())
