"""A Megatron command line, and the result for each of its flags: carried over, satisfied, no counterpart, error or
unknown. No flag is dropped silently."""

import re
from dataclasses import dataclass, field
from typing import Any, overload

from zerofit.recipe.fields import option
from zerofit.recipe.megatron_flags import CARRIED, flag_status
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

    flags: dict[str, list[str]]
    written: dict[str, str] = field(default_factory=dict)
    rows: dict[str, FlagRow] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, call: Call) -> "FlagLedger":
        flags, written, name, stray = {}, {}, None, []
        for word in call.arguments:
            if is_flag(word):
                written_name, equals, value = word[2:].partition("=")
                name = written_name.replace("-", "_")
                flags[name], written[name] = [value] if equals else [], written_name
            elif name:
                flags[name].append(word)
            else:
                stray.append(word)
        ledger = cls(flags, written)
        for word in stray:
            ledger.wrong("", f"{word!r} is where a flag was expected")
        return ledger

    def has(self, name: str) -> bool:
        return name in self.flags

    def first(self, *names: str) -> str | None:
        """The first of these spellings that was given."""
        return next((name for name in names if name in self.flags), None)

    def spelled(self, name: str) -> str:
        """The flag as it was written, with its value."""
        return " ".join([f"--{self.written.get(name, name.replace('_', '-'))}", *self.flags.get(name, [])])

    def words(self, name: str) -> list[str]:
        """All words that follow a flag."""
        return self.flags.get(name, [])

    @overload
    def text(self, name: str, default: str) -> str: ...

    @overload
    def text(self, name: str, default: None = None) -> str | None: ...

    def text(self, name: str, default: str | None = None) -> str | None:
        words = self.words(name)
        if len(words) > 1:
            self.wrong(name, "one value was expected")
        return words[0] if words else default

    def number(self, name: str, kind: type[int | float] = int, default: Any = None) -> Any:
        """The value of a flag as a number; `default` where it is not given, or is not a number."""
        text = self.text(name)
        if text is None:
            if self.has(name) and name not in self.rows:
                self.wrong(name, "a number was expected")
            return default
        try:
            return kind(float(text)) if kind is float else int(text.replace("_", ""))
        except ValueError:
            self.wrong(name, f"{'an integer' if kind is int else 'a number'} was expected")
            return default

    def carried(self, name: str, words: str) -> None:
        """Give a flag a row, if it was given; so do `satisfied` and `none`."""
        self._row(name, "carried over", words)

    def satisfied(self, name: str, words: str) -> None:
        self._row(name, "satisfied", words)

    def none(self, name: str, words: str) -> None:
        self._row(name, "no counterpart", words)

    def default(self, flag: str, words: str) -> None:
        """Megatron's default of a flag that was not given, where ours differs."""
        self.rows[f"={flag}"] = FlagRow(f"({flag})", "carried over", f"{words}  (Megatron's default)")

    def wrong(self, name: str, words: str) -> None:
        """Note what stops the conversion; with the flag of that name as it was written, if it was given."""
        spelled = self.spelled(name) if self.has(name) else ""
        self.rows[name] = FlagRow(spelled, "error", words)
        self.problems.append(f"{spelled}: {words}" if spelled else words)

    def _row(self, name: str, status: str, words: str) -> None:
        if self.has(name) and self.rows.get(name, FlagRow("", "", "")).status != "error":
            self.rows[name] = FlagRow(self.spelled(name), status, words)

    def finish(self) -> list[FlagRow]:
        """All rows: first those of flags, in their order, then the others."""
        for name in self.flags:
            if name not in self.rows:
                reached = not self.problems or (name not in CARRIED and name not in ("split", "global_batch_size"))
                status = flag_status(name) if reached else ("not reached", "an error came before it")
                self.rows[name] = FlagRow(self.spelled(name), *status)
        given = [self.rows[name] for name in self.flags]
        return given + [row for name, row in self.rows.items() if name not in self.flags and row.flag]


def table(rows: list[FlagRow]) -> list[str]:
    """Lines for a terminal: how many rows there are of each kind, then the rows."""
    kinds = ("carried over", "satisfied", "no counterpart", "unknown", "error")
    counts = {kind: sum(row.status == kind for row in rows) for kind in kinds}
    lines = [", ".join(f"{number} {kind}" for kind, number in counts.items() if number), ""]
    return lines + [f"  {row.flag:<{WIDTH}} {row.status:<15} {row.words}".rstrip() for row in rows]
