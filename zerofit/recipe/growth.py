"""What changes in the first updates: sizes that grow, each a pure function of the update, and the order of samples."""

import re
from dataclasses import dataclass

FORM = "START@UPDATES"
LENGTH = "length"  # of samples, as their difficulty


@dataclass(frozen=True)
class Growth:
    """The first update has the size `first`. It grows in steps of as much until, after `updates` updates, it is
    `last`, which is a multiple of `first`."""

    first: int
    last: int
    updates: int

    def __call__(self, update: int) -> int:
        """The size of an update, counted from 1."""
        steps = self.last // self.first - 1
        return self.first * (1 + min(update - 1, self.updates) * steps // self.updates)


def read_growth(text: str) -> tuple[int, int] | None:
    """(first size, updates that grow) of `START@UPDATES`; None: it is no such text."""
    found = re.fullmatch(r"([1-9]\d*)@([1-9]\d*)", text)
    return found and (int(found[1]), int(found[2]))


def growth_problems(recipe, name: str, example: str) -> list[str]:
    """What is wrong with the text of an option that has the form of a growth."""
    text = getattr(recipe, name)
    if text is None or read_growth(text):
        return []
    return [
        f"{name} = {text!r}: say {FORM}, the size in the first update and the number of updates in which it "
        f"grows, e.g. {example}"
    ]


@dataclass(frozen=True)
class Difficulty:
    """What difficulty_warmup says.

    Args:
        field: a column of the records, or LENGTH.
        updates: until all samples are mixed.
        stated: the option, its value and what set it, for messages.
    """

    field: str
    updates: int
    stated: str


def read_difficulty(text: str, source: str | None = None) -> Difficulty | None:
    """The meaning of `FIELD@UPDATES`; None: it is no such text."""
    found = re.fullmatch(r"(.+)@([1-9]\d*)", text)
    return found and Difficulty(found[1], int(found[2]), f"difficulty_warmup = {text} ({source})")


def difficulty_problems(recipe) -> list[str]:
    """What is wrong with the text of difficulty_warmup."""
    text = recipe.difficulty_warmup
    if text is None or read_difficulty(text):
        return []
    return [
        f"difficulty_warmup = {text!r}: say FIELD@UPDATES, a column of numbers (or {LENGTH}) and the number of "
        f"updates until all samples are mixed, e.g. {LENGTH}@2000"
    ]
