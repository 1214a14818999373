"""What the doctor has found: findings, effective values with their sources, the machine; on a screen."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zerofit.record.terminal import shortened, wrapped

ERROR, WARNING, NOTE = LEVELS = ("error", "warning", "note")
EXIT_CANNOT_RUN, EXIT_BAD_INPUT = 1, 2
NAME, VALUE = 30, 18  # columns, at most


@dataclass(frozen=True)
class Finding:
    """Something that the user should know.

    Attributes:
        level: error (the run would stop, or be another one), warning (it may), note.
        what: what is wrong; with the remedy of its own, where `remedy` is empty.
        remedy: what to type or to change.
    """

    level: str
    what: str
    remedy: str = ""

    @classmethod
    def of_message(cls, message: str, level: str = ERROR) -> "Finding":
        """From a message of another part: its first sentence says what is wrong, the rest what to do."""
        what, _, remedy = re.sub(r"(?<=[^.])[.] (?=[A-Z])", "\0", message, count=1).partition("\0")
        return cls(level, what, remedy)


def error(message: str) -> Finding:
    return Finding.of_message(message, ERROR)


def warning(message: str) -> Finding:
    return Finding.of_message(message, WARNING)


def note(message: str) -> Finding:
    return Finding.of_message(message, NOTE)


@dataclass(frozen=True)
class Value:
    """An effective value, and who set it."""

    name: str
    value: Any
    source: str


@dataclass
class DoctorReport:
    """All of it.

    Attributes:
        examined: in words, what was looked at; None: only the machine.
        command: the launch line.
        machine: (what, facts in words).
        bad_input: a file or an option cannot be read as it is.
    """

    examined: str | None = None
    command: str | None = None
    findings: list[Finding] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    machine: list[tuple[str, str]] = field(default_factory=list)
    bad_input: bool = False

    def add(self, level: str, messages: Iterable[str]) -> None:
        """Findings of messages of other parts of the program."""
        self.findings += [Finding.of_message(message, level) for message in messages]

    @property
    def sorted_findings(self) -> list[Finding]:
        """The worst first, each once."""
        return sorted(dict.fromkeys(self.findings), key=lambda finding: LEVELS.index(finding.level))

    @property
    def exit_code(self) -> int:
        if self.bad_input:
            return EXIT_BAD_INPUT
        return EXIT_CANNOT_RUN if any(finding.level == ERROR for finding in self.findings) else 0

    @property
    def verdict(self) -> str:
        """One line."""
        findings = self.sorted_findings
        counts = [
            f"{count} {level}{'s' if count > 1 else ''}"
            for level in LEVELS
            if (count := sum(finding.level == level for finding in findings))
        ]
        counted = ", ".join(counts) or "nothing is wrong"
        if self.examined is None:
            return counted
        return f"{counted}: {self.examined} {'would not run' if self.exit_code else 'can run'} here"

    def for_terminal(self, width: int | None) -> str:
        """What is wrong first, then the values, then the machine.

        Args:
            width: of the screen; None: lines may be of any length.
        """
        parts = [wrapped(self.verdict, width)]
        parts += ["\n".join(_finding(finding, width) for finding in self.sorted_findings)] if self.findings else []
        if self.command:
            parts.append("launch\n" + wrapped(f"  {self.command}", width, 6))
        if self.values:
            parts.append("\n".join(["values", *_table(self.values, width)]))
        if self.machine:
            first = max(len(what) for what, _ in self.machine)
            rows = (wrapped(f"  {what:<{first}}  {text}", width, first + 4) for what, text in self.machine)
            parts.append("\n".join(["machine", *rows]))
        return "\n\n".join(parts)


def _finding(finding: Finding, width: int | None) -> str:
    text = wrapped(f"{finding.level:<9}{finding.what}", width, 9)
    remedy = wrapped(f"{' ' * 9}-> {finding.remedy}", width, 12)
    return f"{text}\n{remedy}" if finding.remedy else text


def _table(values: list[Value], width: int | None) -> list[str]:
    """Lines with the name, the value and its source; long values and sources without their middle."""
    names = [value.name for value in values]
    texts = [shortened(shown_value(value.value), VALUE) for value in values]
    first, second = min(NAME, max(map(len, names))), max(map(len, texts))
    lines = []
    for name, text, value in zip(names, texts, values):
        line = f"  {shortened(name, first):<{first}}  {text:<{second}}  "
        lines.append(line + (value.source if width is None else shortened(value.source, max(16, width - len(line)))))
    return lines


def shown_value(value: Any) -> str:
    """As a recipe or a JSON writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(shown_value, value)) if isinstance(value, (list, tuple)) else str(value).replace("\n", "\\n")
