"""--profile N:M: torch's profiler over some updates, of some ranks.

Nothing here is imported without that option, and the updates outside of N to M are as they are without it.
"""

import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import profile

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.recipe.options import TrainingRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import say
from zerofit.strategy.engine import Engine

COSTLIEST = 10  # operators in the log
SNAPSHOT_EVENTS = 100_000  # allocations and releases that torch remembers


def file_names(rank: int, device: torch.device, memory: bool) -> list[str]:
    """What a rank writes into the run's folder: the trace, and a snapshot of memory where a device has one."""
    snapshots = [f"memory_rank{rank}.pickle"] if memory and device.type == "cuda" else []
    return [f"profile_rank{rank}.json.gz", *snapshots]


class Profiler:
    """Records updates of this rank. A run that stops among them, or resumes there, has the part that it made.

    Args:
        updates: which.
        files: the trace, and where a device has one a snapshot of memory.
        with_memory: whether allocations are recorded, too.
        note: takes a line for the log.
    """

    def __init__(
        self, updates: range, files: tuple[Path, ...], *, device: str, with_memory: bool, note: Callable[[str], None]
    ) -> None:
        self.updates, self.files, self.device, self.with_memory, self.note = updates, files, device, with_memory, note
        self._running: profile | None = None

    def begin(self, update: int) -> None:
        """Called before an update."""
        if update in self.updates and self._running is None:
            if len(self.files) > 1:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
            self._running = profile(profile_memory=self.with_memory)
            self._running.start()

    def end(self, update: int, stops: bool) -> None:
        """Called after an update; `stops`: it is the last one of this launch."""
        if self._running is None or not (stops or update >= self.updates[-1]):
            return
        profiler, self._running = self._running, None
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
        kind = "cpu" if self.device == "cpu" else "device"
        self.note(profiler.key_averages().table(f"self_{kind}_time_total", COSTLIEST, max_name_column_width=40))


def make_profiler(
    engine: Engine, recipe: TrainingRecipe, folder: RunFolder, note: Callable[[str], None]
) -> Profiler | None:
    """The profiler of this rank; None where the rank is not among those of the recipe.

    Raises:
        UserError: there is no such rank, or a file is in the way that no run has written.
    """
    layout, device, ranks = engine.layout, engine.device, recipe.profile_ranks
    if max(ranks) >= layout.world_size:
        raise UserError(f"profile_ranks = {max(ranks)}: the ranks are 0 to {layout.world_size - 1}. Choose among them")
    names = {rank: file_names(rank, device, recipe.profile_memory) for rank in ranks}
    if layout.is_main:
        for name in itertools.chain(*names.values()):
            folder.claim(name)
        if recipe.profile_memory and device.type != "cuda":
            note(f"profile_memory: a {device.type} device has no snapshot; the table has what operators allocate")
    if layout.rank not in ranks:
        return None
    files = tuple(folder.path / name for name in names[layout.rank])
    shown = note if layout.is_main else partial(say, main=layout.rank == ranks[0])
    return Profiler(recipe.profiled_updates, files, device=device.type, with_memory=recipe.profile_memory, note=shown)


def _keep(file: Path, place: Path) -> None:
    with atomic_file(place, "wb") as kept:
        kept.write(file.read_bytes())
