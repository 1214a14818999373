"""A Megatron command line, and the result for each of its flags: carried over, satisfied, no counterpart or unknown,
or a problem. No flag is dropped silently."""

import re
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any, Self

from zerofit.recipe.fields import option
from zerofit.recipe.megatron_flags import flag_status
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import is_flag

WIDTH = 46  # of the column of flags
PREPARATION = ("preprocess_data.py", "merge_datasets.py")
SEARCH = "llmacc.pretrain"  # a module that chooses the degrees itself, and then starts pretrain_gpt.py
PROGRAM = re.compile(
    rf"(pretrain_\w+\.py|finetune_\w+\.py|{'|'.join(map(re.escape, (*PREPARATION, SEARCH)))})(?=\s|$)"
)
PROCESSES = ("nproc_per_node", "num_gpus", "gpus_per_node", "ntasks_per_node")
MACHINES = ("nnodes", "num_nodes", "nodes")


@dataclass
class MegatronArgsOptions(Recipe):
    """A Megatron command line (pretrain_gpt.py, preprocess_data.py, merge_datasets.py) to a recipe and a strategy"""

    output: str | None = option(None, "The folder to write; by default outputs/megatron-converted.")
    overwrite: bool = option(False, "Replace files of an earlier conversion.")
    tokenizer_name: str | None = option(None, "The tokenizer's folder or hub name, instead of Megatron's files.")
    model_name_or_path: str | None = option(None, "Weights to begin with, instead of Megatron's --load.")
    num_processes: int | None = option(None, "Processes; by default as many as the launcher starts.", positive=True)


@dataclass
class Call:
    """A program that is started.

    Args:
        launcher: the words before the program's name.
    """

    program: str
    arguments: list[str]
    launcher: list[str] = field(default_factory=list)

    def of_launcher(self, names: tuple[str, ...]) -> str | None:
        """The value of the launcher's option with one of these names; empty: it has none. None: there is no option."""
        for word, following in zip(self.launcher, [*self.launcher[1:], ""]):
            name, equals, value = word.lstrip("-").partition("=")
            if word.startswith("-") and name.replace("-", "_") in names:
                return value if equals else "" if following.startswith("-") else following
        return None

    @property
    def processes(self) -> int | None:
        """Processes on one machine; None where the launcher does not say."""
        said = self.of_launcher(PROCESSES)
        if said is None and self.launcher and re.match(r"(.*/)?(python|torchrun)", self.launcher[0]):
            return 1
        return _number(said)

    @property
    def machines(self) -> int:
        return _number(self.of_launcher(MACHINES)) or 1


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() and int(text) > 0 else None


def call_of(words: list[str]) -> Call:
    """Read a command line: a launcher and a program, or arguments of pretrain_gpt.py alone."""
    at = next((index for index, word in enumerate(words) if PROGRAM.search(word)), None)
    if at is None:
        return Call("pretrain_gpt.py", list(words))
    found = PROGRAM.search(words[at])
    return Call(found[1] if found else "", words[at + 1 :], words[:at])


@dataclass
class FlagRow:
    flag: str
    status: str
    words: str


@dataclass
class FlagLedger:
    """The flags of one program, with the result for each.

    Attributes:
        flags: {name with underscores: the words that follow it}; the last of several counts, as in argparse.
        problems: what stops the conversion.
    """

    flags: dict[str, list[str]] = field(default_factory=dict)
    rows: dict[str, FlagRow] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, call: Call) -> Self:
        ledger, name = cls(), None
        for word in call.arguments:
            if is_flag(word):
                written, equals, value = word[2:].partition("=")
                name = written.replace("-", "_")
                ledger.flags[name] = [value] if equals else []
            elif name:
                ledger.flags[name].append(word)
            else:
                ledger.wrong("", f"{word!r} is where a flag was expected")
        return ledger

    def has(self, name: str) -> bool:
        return name in self.flags

    def first(self, *names: str) -> str:
        """The first of these spellings that was given; else the first one."""
        return next((name for name in names if name in self.flags), names[0])

    def spelled(self, name: str) -> str:
        """The flag with its value."""
        return " ".join([f"--{name.replace('_', '-')}", *self.flags[name]])

    def text(self, name: str) -> str | None:
        """The value of a flag; None: it is not given, or stands alone."""
        words = self.flags.get(name, [])
        if len(words) > 1:
            self.wrong(name, "one value was expected")
        return words[0] if words else None

    def number(self, name: str, kind: type[int | float] = int, default: Any = None) -> Any:
        """The value of a flag as a number; `default` where it is not given, or is not a number."""
        if not self.has(name):
            return default
        try:
            (text,) = self.flags[name]
            return kind(text)
        except ValueError:
            self.wrong(name, f"{'an integer' if kind is int else 'a number'} was expected")
            return default

    def _row(self, status: str, name: str, words: str) -> None:
        """Give a flag a row, if it was given."""
        if self.has(name):
            self.rows[name] = FlagRow(self.spelled(name), status, words)

    carried = partialmethod(_row, "carried over")
    satisfied = partialmethod(_row, "satisfied")
    none = partialmethod(_row, "no counterpart")

    def default(self, flag: str, words: str) -> None:
        """Megatron's default of a flag that was not given, where ours differs."""
        self.rows[f"={flag}"] = FlagRow(f"({flag})", "carried over", f"{words}  (Megatron's default)")

    def wrong(self, name: str, words: str) -> None:
        """Note what stops the conversion; with the flag of that name as it was written, if it was given."""
        self.problems.append(f"{self.spelled(name)}: {words}" if self.has(name) else words)

    def finish(self) -> list[FlagRow]:
        """All rows: first those of flags, in their order, then the others."""
        for name in self.flags:
            if name not in self.rows:
                self.rows[name] = FlagRow(self.spelled(name), *flag_status(name))
        given = [self.rows[name] for name in self.flags]
        return given + [row for name, row in self.rows.items() if name not in self.flags]


def ledger_lines(rows: list[FlagRow]) -> list[str]:
    """Lines for a terminal: how many rows there are of each kind, then the rows."""
    kinds = ("carried over", "satisfied", "no counterpart", "unknown")
    counts = {kind: sum(row.status == kind for row in rows) for kind in kinds}
    lines = [", ".join(f"{number} {kind}" for kind, number in counts.items() if number), ""]
    return lines + [f"  {row.flag:<{WIDTH}} {row.status:<15} {row.words}".rstrip() for row in rows]
