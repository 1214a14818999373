"""The rule after which failures a run is started again: by `zerofit launch --max_restarts` (agent.py), and by the
batch script of `zerofit submit slurm`.

Never after a mistake of the user, an anomaly or an out-of-memory, since the same command would end in the same way,
nor after a signal to the launcher itself; always after processes that have saved and left otherwise (85), which does
not count; and not after two failures at the same update.
"""

from pathlib import Path

from zerofit.recipe.errors import (
    EXIT_NEEDS_A_PERSON,
    EXIT_OUT_OF_MEMORY,
    EXIT_TERMINATED,
    EXIT_TO_BE_RESUMED,
    EXIT_USER_ERROR,
)
from zerofit.record.jsonl import line_of_update

FINAL = {
    EXIT_USER_ERROR: "a mistake",
    EXIT_NEEDS_A_PERSON: "an anomaly, or a full disk",
    EXIT_OUT_OF_MEMORY: "out of memory",
}


class Restarts:
    """Decides after each failure whether the ranks are started again."""

    def __init__(self, folder: Path | None, failed_after: int | None = None):
        self.folder = folder
        self.is_stopped = False  # somebody has asked the launch to end
        self.failed_after = failed_after

    def record_failure(self, codes: set[int]) -> str:
        """Take a failure into account. Returns why the processes are not started again; empty where they are.

        Args:
            codes: of the processes that have failed; negative: the signal that killed one. Those that the agent has
                ended since have EXIT_TERMINATED.
        """
        if self.is_stopped:
            return "it was asked to end"
        if final := codes & FINAL.keys():
            return f"the same command would end in the same way: {FINAL[min(final)]}"
        if not have_saved(codes):
            before, self.failed_after = self.failed_after, self.updates()
            if self.failed_after == before:
                return f"it has failed twice after update {before}"
        return ""

    def updates(self) -> int:
        """The last update in metrics.jsonl; 0 where there is none."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:  # type: ignore[operator]
                lines = file.read().splitlines()
        except (OSError, TypeError):
            return 0
        return next((line["update"] for line in map(line_of_update, reversed(lines)) if line is not None), 0)


def have_saved(codes: set[int]) -> bool:
    """Return whether the processes have left in order."""
    return EXIT_TO_BE_RESUMED in codes and codes <= {EXIT_TO_BE_RESUMED, EXIT_TERMINATED}


def code_of_run(codes: list[int]) -> int:
    """The exit code of a run from those of its machines: what needs a person goes first, and a process that was
    ended because of another goes last."""
    if not any(codes):
        return 0
    if final := [code for code in codes if code in FINAL]:
        return min(final)
    if set(codes) <= {0, EXIT_TO_BE_RESUMED, EXIT_TERMINATED} and EXIT_TO_BE_RESUMED in codes:
        return EXIT_TO_BE_RESUMED
    causes = [code for code in codes if code not in (0, EXIT_TERMINATED, EXIT_TO_BE_RESUMED)]
    return (causes or [code for code in codes if code])[0]
