"""--profile N:M: torch's profiler over some updates, of some ranks.

Nothing here is imported without that option, and the updates outside of N to M are as they are without it.
"""

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.recipe.options import TrainingRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import say
from zerofit.training.step import StepResult, TrainStep

COSTLIEST = 10  # operators in the log
SNAPSHOT_EVENTS = 100_000  # allocations and releases that torch remembers


def file_names(rank: int, device: torch.device, memory: bool) -> list[str]:
    """What a rank writes into the run's folder: the trace, and a snapshot of memory where a device has one."""
    snapshots = [f"memory_rank{rank}.pickle"] if memory and device.type == "cuda" else []
    return [f"profile_rank{rank}.json.gz", *snapshots]


@dataclass(frozen=True)
class ProfiledStep(TrainStep):
    """Makes updates, and records some of them.

    Args:
        updates: which. A run that stops among them, or resumes there, has the part that it made.
        files: of this rank.
        with_memory: whether allocations are recorded, too.
        note: takes a line for the log.
    """

    updates: range = range(0)
    files: tuple[Path, ...] = ()
    with_memory: bool = False
    note: Callable[[str], None] = lambda line: None
    running: list[profile] = field(default_factory=list)

    def __call__(self, update: int, *args: Any, **kwargs: Any) -> StepResult:
        if update not in self.updates:
            return super().__call__(update, *args, **kwargs)
        if not self.running:
            self._start()
        result = super().__call__(update, *args, **kwargs)
        if update == self.updates[-1] or result.signals.stop_reason:
            self._stop(update)
        return result

    def _start(self) -> None:
        if len(self.files) > 1:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        self.running.append(profile(profile_memory=self.with_memory))
        self.running[0].start()

    def _stop(self, update: int) -> None:
        profiler = self.running.pop()
        profiler.stop()
        trace, *snapshots = self.files
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / trace.name
            profiler.export_chrome_trace(str(file))
            _keep(file, trace)
            for snapshot in snapshots:
                torch.cuda.memory._dump_snapshot(str(file))
                torch.cuda.memory._record_memory_history(enabled=None)
                _keep(file, snapshot)
        self.note(f"profile   updates {self.updates[0]} to {update}: {', '.join(file.name for file in self.files)}")
        kind = "cpu" if self.engine.device.type == "cpu" else "device"
        self.note(profiler.key_averages().table(f"self_{kind}_time_total", COSTLIEST, max_name_column_width=40))


def profiled(step: TrainStep, recipe: TrainingRecipe, folder: RunFolder, note: Callable[[str], None]) -> TrainStep:
    """The step of a rank: one that records, where the rank is among those of the recipe.

    Raises:
        UserError: there is no such rank, or a file is in the way that no run has written.
    """
    layout, device, ranks = step.engine.layout, step.engine.device, recipe.profile_ranks
    if max(ranks) >= layout.world_size:
        raise UserError(f"profile_ranks = {max(ranks)}: the ranks are 0 to {layout.world_size - 1}. Choose among them")
    names = {rank: file_names(rank, device, recipe.profile_memory) for rank in ranks}
    if layout.is_main:
        for name in itertools.chain(*names.values()):
            folder.claim(name)
        if recipe.profile_memory and device.type != "cuda":
            note(f"profile_memory: a {device.type} device has no snapshot; the table has what operators allocate")
    if layout.rank not in ranks:
        return step
    parts = {each.name: getattr(step, each.name) for each in dataclasses.fields(step)}
    files = tuple(folder.path / name for name in names[layout.rank])
    shown = note if layout.is_main else partial(say, main=layout.rank == ranks[0])
    return ProfiledStep(
        **parts, updates=recipe.profiled_updates, files=files, with_memory=recipe.profile_memory, note=shown
    )


def _keep(file: Path, place: Path) -> None:
    with atomic_file(place, "wb") as kept:
        kept.write(file.read_bytes())
