"""What of a run is kept, and how it goes on from there: checkpoints, faults and going back."""

import copy
import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.recipe.errors import UserError
from train.run.checkpoints import ASKED, BEST, LEAVING, START, STATE, Checkpoints, flaw
from train.run.folder import differences, identity
from train.run.progress import Progress
from train.run.resuming import check_data, fingerprint
from train.run.saving import Saver
from train.run.stopping import FAULT, REASONS

if TYPE_CHECKING:
    from train.run.session import Session

MOST_REWINDS = 10


class Keeper:
    """Keeps the progress of a session's run, and brings it back. All ranks call its methods together.

    Args:
        session: the session, its engine prepared.
        job: the task; its training set is what the run's place in the data refers to.
        best: the judge of evaluations.
    """

    def __init__(self, session: "Session", job, tokenizer, best):
        self.session, self.job, self.tokenizer, self.best = session, job, tokenizer, best
        recipe, engine = session.recipe, session.engine
        self.recipe, self.folder, self.is_main = recipe, session.folder, session.main
        self.checkpoints = Checkpoints(
            session.folder.path / "checkpoints", recipe.save_total_limit, recipe.save_keep_every
        )
        self.saver = Saver(self.checkpoints, engine, not session.adapter, recipe.save_async)
        self.data = fingerprint(job.train_set, job.grouping)
        self.done = Progress()
        self.resumed_at, self.goes_on_from = 0, None  # updates made before, and in which run's folder
        self.fault_found = None
        self._last: int | None = None  # the update whose state was saved last
        self._copied_tokenizer = None

    @property
    def keeps_best(self) -> bool:
        """Whether the best evaluation's weights are kept: as the recipe says; else where they are asked for by another
        option, or where there is more than a loss to judge by."""
        recipe, wanted = self.recipe, self.recipe.save_best
        if wanted is None:
            asked = (recipe.load_best_model_at_end, recipe.early_stopping_patience, recipe.metric_for_best_model)
            wanted = any(asked) or any(name not in ("loss", "perplexity") for name in self.job.figures)
        return wanted and self.job.evaluate is not None

    @property
    def loads_best(self) -> bool:
        """Whether model/ is to hold the best weights, not the last."""
        wanted = self.recipe.load_best_model_at_end
        if wanted is None:
            wanted = self.recipe.early_stopping_patience is not None
        return wanted and self.keeps_best and self.best.update is not None

    # ------------------------------------------------------------------------------------------------------- going on

    def resume(self) -> None:
        """Take up the run that is in the folder, or the checkpoint that is named, where there is one.

        Raises:
            UserError: none of the folder's checkpoints can be used, or it is of another run.
        """
        began = time.perf_counter()
        for wanted in self.session.origin.wanted:
            folder, warnings = self.saver.choose(wanted)
            self.session.say(*warnings)
            if folder is not None:
                break
            if warnings:
                raise UserError(
                    f"no checkpoint in {self.checkpoints.path} can be used, for the reasons above. Bring one back, or "
                    "start over with --resume never, which takes away what is left of them"
                )
        else:
            if self.session.origin.wanted:
                self.session.say("note      this run is in the folder already, with no checkpoint: it starts over")
            return
        found = self._load(folder)
        if wanted == "auto":
            differing = differences(self.recipe, self.session.strategy.batches.global_batch, found["run"])
            if differing:
                self.folder.refuse_a_different_run(differing)
        run, self.resumed_at, self.goes_on_from = found["run"], self.done.updates, folder.parents[1]
        size = sum(file.stat().st_size for file in (folder / STATE).iterdir())
        self.session.say(
            f"resumed   {folder}, after update {self.done.updates:,}, written under {run['strategy']}, number of "
            f"processes {run['num_processes']}: {size / 1e6:,.1f} MB read in {time.perf_counter() - began:.1f} s"
        )

    def bring_the_best(self) -> None:
        """See that the best checkpoint so far is in the folder; where it is gone, the search begins anew."""
        there = True
        if self.is_main and self.goes_on_from is not None:
            self.checkpoints.drop_after(self.done.updates)
            there = self.best.update is None or self._best_is_here() or self._best_is_copied()
        if not self.session.engine.from_main(there):
            self.session.say(f"note      the best checkpoint so far, of update {self.best.update}, is gone: the next "
                             "evaluation is the best")  # fmt: skip
            self.best.update, self.best.value, self.best.figures = None, math.nan, {}

    def _best_is_here(self) -> bool:
        if not self.keeps_best:
            return True
        return self.checkpoints.best.resolve() == self.checkpoints.folder(self.best.update).resolve() and (
            self.checkpoints.best.is_dir()
        )

    def _best_is_copied(self) -> bool:
        other = Checkpoints(self.goes_on_from / "checkpoints")
        source = other.folder(self.best.update)
        if other.path.resolve() == self.checkpoints.path.resolve() or flaw(source):
            return False
        shutil.copytree(source, self.checkpoints.folder(self.best.update))
        self.checkpoints.point_to_the_best(self.best.update)
        return True

    def start(self) -> None:
        """Say when checkpoints are written; where a fault leads back to one, write the first now."""
        if self.is_main:
            self.session.say(*self._about_checkpoints())
        if self.recipe.on_fault == "rewind" and not self.done.updates:
            self.keep(START, False, {})

    def rewind(self) -> bool:
        """Go back to the last good checkpoint, to go on without the samples of the update that was at fault.

        Returns: False where that is not wanted, not possible, or no remedy any more.
        """
        if self.recipe.on_fault != "rewind" or len(self.done.left_out) >= MOST_REWINDS:
            return False
        self.saver.settle()
        folder, warnings = self.saver.choose("auto")
        self.session.say(*warnings)
        if folder is None:
            return False
        left_out = sorted({*self.done.left_out, self.fault_found.update})
        self._load(folder)
        self.done.left_out = left_out
        self.session.say(f"rewound   to {folder}; left out: update {', '.join(map(str, left_out))}")
        if self.is_main:
            self.folder.metrics.start(self.done.updates)
            if self.recipe.record_samples:
                self.folder.samples.start(self.done.updates)
        return True

    def _load(self, folder: Path) -> dict[str, Any]:
        found = self.saver.load(folder)
        check_data(self.data, found["data"], folder)
        for name in ("update", "value", "worse_in_a_row", "figures"):
            setattr(self.best, name, found["best"][name])
        self.done = Progress(**{field.name: found[field.name] for field in dataclasses.fields(Progress)})
        self._last = self.done.updates
        return found

    # -------------------------------------------------------------------------------------------------------- keeping

    def keep(self, why: str | None, is_best: bool, figures: dict[str, float]) -> None:
        """Begin a checkpoint where one is due, or where the best weights are kept and these are the best."""
        is_best = is_best and self.keeps_best
        with_state = why is not None and not (self.recipe.save_only_model and why == ASKED)
        updates = self.done.updates
        if not (why or is_best) or (why == LEAVING and updates == self._last):
            return
        # Opened now: the next evaluation puts others in their place.
        predictions = [path.open("rb") for path in self._predictions()] if figures else []

        def fill(folder: Path, weights) -> None:
            self.session.write_model(weights, {"after": figures}, folder / "model", self._tokenizer_of_the_thread())
            for file in predictions:
                with file, (folder / Path(file.name).name).open("wb") as written:
                    shutil.copyfileobj(file, written)

        for lines in (self.folder.metrics, self.folder.samples, self.folder.faults):
            lines.sync()  # what leads up to a checkpoint is on the disk when the checkpoint is
        launch = self.session.strategy.launch
        run = identity(self.recipe, self.session.strategy.batches.global_batch)
        run |= {"num_processes": launch.world_size, "strategy": self.session.strategy.name}
        progress = dataclasses.asdict(self.done) | {
            "best": dataclasses.asdict(self.best), "run": run, "data": self.data,
        }  # fmt: skip
        if not self.saver.bytes_of_copies and self.saver.copies():
            self.session.advise(copied=self.saver.bytes_of_copies)
        self.saver.save(updates, why or BEST, fill, self.session.weights, progress if with_state else None, is_best)
        self.session.stop.has_saved()
        if with_state:
            self._last = updates

    def _predictions(self) -> list[Path]:
        return list(self.folder.path.glob("predictions*.jsonl")) if self.is_main else []

    def _tokenizer_of_the_thread(self):
        """A tokenizer of its own: two threads must not use the same one."""
        if self._copied_tokenizer is None:
            self._copied_tokenizer = copy.deepcopy(self.tokenizer)
        return self._copied_tokenizer

    def fault(self, fault) -> None:
        """Write down an update that must not reach the weights."""
        samples = self.job.train_set

        def head_of(index: int) -> str:
            return self.tokenizer.decode(samples[index]["input_ids"])

        line = fault.report(self.session.engine, self.recipe.on_fault, head_of)
        if self.is_main:
            self.folder.faults.add(line)
        self.fault_found = fault

    def finish(self, stopped: int) -> None:
        """Wait for the last checkpoint, and say what became of it. After a fault, first keep what is good."""
        if stopped == FAULT:
            self.keep(LEAVING, False, {})
        self.saver.settle()
        self.session.say(*self.saver.news)

    # --------------------------------------------------------------------------------------------------------- saying

    def _about_checkpoints(self) -> list[str]:
        """When checkpoints are written, and a warning where there is no room for one."""
        recipe = self.recipe
        strategy = recipe.save_strategy or ("steps" if recipe.save_steps else None)
        asked = {"epoch": "at the end of each epoch", "steps": f"every {recipe.save_steps} updates"}
        when = [asked[strategy]] if strategy in asked else []
        when += [f"every {recipe.save_minutes:g} minutes"] if self.session.stop.every else []
        if not when:
            return ["saves     none: a run that is killed starts over"]
        size = self.saver.bytes_of_a_checkpoint(not recipe.save_only_model)
        free = shutil.disk_usage(self.folder.path).free
        said = [f"saves     {' and '.join(when)}: about {size / 1e6:,.1f} MB each"]
        if free < 1.05 * size:
            said.append(
                f"warning   {self.folder.path} has no room for a checkpoint of {size / 1e6:,.1f} MB: "
                f"{free / 1e6:,.1f} MB are free. Make room, or choose another --output_dir"
            )
        return said

    def why_stopped(self, stopped: int, of: int) -> list[str]:
        """What a person has to know of a run that was left early, before its `of` updates were made."""
        updates = self.done.updates
        by = f"stopped     by {REASONS[stopped]} after update {updates:,} of {of:,}"
        if stopped == FAULT:
            found = self.fault_found
            lines = [
                f"{by}: update {found.update}: {found.reason}",
                f"            its samples are in {self.folder.faults.path}; the weights are as they were before it",
            ]
            if self.recipe.on_fault == "stop":
                return [
                    *lines,
                    "            The same command comes to it again. To go on without these samples add "
                    "--on_fault skip (or rewind)",
                    "            Should the loss have gone wrong before it: start over with a lower "
                    "--learning_rate in another --output_dir",
                ]
            return [
                *lines,
                f"            --on_fault {self.recipe.on_fault} is no remedy any more: there were too many. "
                "Start over with a lower --learning_rate in another --output_dir, or mend the data",
            ]
        newest = next(self.checkpoints.resumable(), None)
        remedy = f"goes on from {newest}" if newest else "starts over"
        if self._last != updates or self.saver.last_failed:
            return [f"{by}, which could not be saved: the same command {remedy}"]
        return [f"{by}: the same command goes on from there"]
