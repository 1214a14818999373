"""What changes in the first updates: sizes that grow, each a pure function of the update, and the order of samples."""

import re
from dataclasses import dataclass

FORM = "START@UPDATES"


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
