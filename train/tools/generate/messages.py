"""Messages for the user go to stderr: stdout has what the model writes, and nothing else."""

import sys


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
