"""--profile N:M: torch's profiler over some updates of rank 0, memory included.

Nothing here is imported without that option, and the updates outside of N to M are as they are without it.
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import profile

from zerofit.recipe.files import atomic_file

if TYPE_CHECKING:
    from zerofit.training.run import Run

COSTLIEST = 10  # operators in the log
SNAPSHOT_EVENTS = 100_000  # allocations and releases that torch remembers


class Profiler:
    """Records updates of this rank. A run that stops among them, or resumes there, has the part that it made. Raises
    UserError: a file is in the way that no run has written."""

    def __init__(self, run: "Run") -> None:
        self.updates = run.recipe.profiled_updates
        self.log_lines, self.device = run.recorder.log_lines, run.device.type
        names = ["profile_rank0.json.gz", *(["memory_rank0.pickle"] if self.device == "cuda" else [])]
        for name in names:
            run.folder.claim(name)
        self.files = [run.folder.path / name for name in names]
        self._running: profile | None = None

    def begin(self, update: int) -> None:
        """Called before an update."""
        if update in self.updates and self._running is None:
            if len(self.files) > 1:
                torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
            self._running = profile(profile_memory=True)
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
        self.log_lines(
            f"profile   updates {self.updates[0]} to {update}: {', '.join(file.name for file in self.files)}"
        )
        kind = "cpu" if self.device == "cpu" else "device"
        self.log_lines(profiler.key_averages().table(f"self_{kind}_time_total", COSTLIEST, max_name_column_width=40))


def _keep(file: Path, place: Path) -> None:
    with atomic_file(place, "wb") as kept:
        kept.write(file.read_bytes())
