"""The options of `zerofit doctor`, and its report: findings, effective values with their sources, the machine."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerofit.recipe.base import option, to_text
from zerofit.recipe.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError
from zerofit.recipe.files import counted
from zerofit.recipe.options import StrategyOptions
from zerofit.record.terminal import shortened
from zerofit.tools.tool_recipe import TaskOption

ERROR = "error"
WARNING = "warning"
NOTE = "note"
LEVELS = (ERROR, WARNING, NOTE)  # the run would stop; it may stop; it would not
MAX_VALUE_WIDTH = 18  # characters of a value


@dataclass
class DoctorOptions(TaskOption, StrategyOptions):
    """A report: the values, who set them, and whether it can run here; options of the training recipe count too"""

    num_processes: int | None = option(
        None, "Processes of all machines; else the YAML's, or one for each accelerator.", positive=True, common=True
    )
    num_machines: int | None = option(None, "Machines; by default those of the YAML, else 1.", positive=True)


@dataclass
class DoctorReport:
    """The findings of the doctor on a machine and a launch.

    Attributes:
        examined: what was examined besides the machine, in words; None: nothing.
        command: the command of the launch.
        findings: (level, message); the first sentence says what is wrong, the others what to do.
        values: (option, effective value, its source).
        facts: (title, text) on the machine.
        bad_input: a file or an option is invalid.
    """

    examined: str | None = None
    command: str | None = None
    findings: list[tuple[str, str]] = field(default_factory=list)
    values: list[tuple[str, Any, str]] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    bad_input: bool = False

    def add(self, level: str, *messages: str) -> None:
        """Add findings of a level."""
        self.findings += [(level, message) for message in messages]

    @contextlib.contextmanager
    def collected(self, level: str = ERROR, prefix: str = "") -> Iterator[None]:
        """Catch a UserError or ImportError of this block and add its problems to the findings."""
        try:
            yield
        except UserError as refusal:
            self.add(level, *(prefix + problem for problem in refusal.problems))
        except ImportError as missing:
            self.add(ERROR, f"a package cannot be imported: {missing}. Run make setup")

    def messages(self, level: str) -> list[str]:
        """Return the messages of a level without repetitions."""
        return list(dict.fromkeys(message for level_found, message in self.findings if level_found == level))

    @property
    def exit_code(self) -> int:
        if self.bad_input:
            return EXIT_USER_ERROR
        return EXIT_FAILED if self.messages(ERROR) else 0

    def text(self) -> str:
        """Return the report for a terminal: findings, then the command of the launch, the values and the machine."""
        findings = [(level, message) for level in LEVELS for message in self.messages(level)]
        counts = [counted(len(self.messages(level)), level) for level in LEVELS if self.messages(level)]
        verdict = ", ".join(counts) or "nothing is wrong"
        if self.examined:
            verdict += f": {self.examined} {'would not run' if self.exit_code else 'can run'} here"
        values = [
            (name, shortened(to_text(value).replace("\n", "\\n"), MAX_VALUE_WIDTH), source)
            for name, value, source in self.values
        ]
        launch = [f"  {self.command}"] if self.command else []
        parts = [[verdict], [f"{level:<9}{message}" for level, message in findings]]
        titled = {"launch": launch, "values": _align_columns(values), "machine": _align_columns(self.facts)}
        parts += [[title, *lines] for title, lines in titled.items() if lines]
        return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows of cells as lines in which all columns but the last are aligned."""
    widths = [max(map(len, column)) for column in list(zip(*rows))[:-1]]
    return ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in rows]
