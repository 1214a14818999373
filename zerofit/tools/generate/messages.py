"""Messages for the user go to stderr: stdout has what the model writes, and nothing else."""

import sys

from zerofit.recipe.errors import printable


def say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
