"""Marks for values that are not known, within texts."""

import re

OPEN, CLOSE = "\ue000", "\ue001"
UNKNOWN = re.compile(
    f"{OPEN}([^{CLOSE}]*){CLOSE}"
)  # has the variable's name; none: only a running shell has the value


def unknown(name: str) -> str:
    """The mark for the unknown value of a variable."""
    return f"{OPEN}{name}{CLOSE}"


def unknown_in(text: str) -> list[str]:
    """The variables whose unknown values are marked in a text."""
    return UNKNOWN.findall(text)


def shown(text: str) -> str:
    """A text for people: unknown values are written as $NAME."""
    return UNKNOWN.sub(lambda found: f"${found[1]}", text)
