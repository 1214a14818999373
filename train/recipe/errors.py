"""Mistakes of the user, told in one message without a traceback, and the exit code that goes with them."""

import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

from train.recipe.last_message import repeat_after_launcher

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # as a shell has it for Ctrl-C
EXIT_BROKEN_PIPE = 141  # as a shell has it for a program whose reader went away


class UserError(Exception):
    """One or more problems that only the user can mend. Each names the option, the value and the remedy."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def report(self, outcome: str = "nothing was trained") -> str:
        """The message for the terminal: one line for each problem, or one numbered list headed by the outcome."""
        if len(self.problems) == 1:
            return f"error: {self.problems[0]}"
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return "\n".join([f"error: {len(self.problems)} problems, {outcome}", *lines])


class NothingToDo(Exception):
    """What was asked for is there already. The message says so; the exit code is 0."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, if any does."""
    import difflib

    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def first_line(error: Exception) -> str:
    """What an exception says, in one line; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_HOOKS: dict[str, Callable] = {"explain": lambda error: None, "leave": lambda: None}


def explain_failures_with(explain: Callable[[Exception], int | None]) -> None:
    """Have errors that are no mistakes of the user explained: `explain` tells what it knows of one, and returns the
    exit code; None where it knows nothing."""
    _HOOKS["explain"] = explain


def before_leaving(farewell: Callable[[], None]) -> None:
    """Have something done before the process is left in order."""
    _HOOKS["leave"] = farewell


def reports_user_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap an entry point: a `UserError` becomes one message on stderr and exit code 2.

    Every rank meets the same mistake at about the same time, and a launcher stops all ranks when the first one leaves.
    So rank 0 speaks and leaves; the others stay quiet for long enough that its message gets out, and leave after it.
    Where a machine lacks what others have, the first of its ranks is the one that speaks.
    An error that `explain_failures_with` has an explanation for ends with its exit code; any other is raised.
    """

    @functools.wraps(main)
    def wrapped(argv: list[str] | None = None) -> int:
        try:
            return main(argv)
        except UserError as error:
            rank, said = int(os.environ.get("RANK", "0")), error.report()
            if rank:
                _wait_for_the_launcher(seconds=20 if os.environ.get("LOCAL_RANK", "0") == "0" else 25)
                said = f"[rank {rank}] {said}"
            print(said, file=sys.stderr, flush=True)
            repeat_after_launcher(said)
            return EXIT_USER_ERROR
        except NothingToDo as message:
            if int(os.environ.get("RANK", "0")) == 0:
                print(message, flush=True)
            return 0
        except BrokenPipeError:  # `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains as it ends
            return EXIT_BROKEN_PIPE
        except Exception as error:
            code = _HOOKS["explain"](error)
            if code is None:
                named = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
                repeat_after_launcher(f"{named} (its traceback stands above)")
                raise
            return code
        except KeyboardInterrupt:
            if int(os.environ.get("RANK", "0")) == 0:
                message = "interrupted while the run was starting: its folder is as it was"
                print(f"\n{message}", file=sys.stderr, flush=True)
                repeat_after_launcher(message, after_signal=True)
            return EXIT_INTERRUPTED

    return wrapped


def _wait_for_the_launcher(seconds: float) -> None:
    """Leave quietly when the launcher asks to; return only if nobody asked, because then this rank erred alone."""
    signal.signal(signal.SIGTERM, lambda *_: leave(EXIT_USER_ERROR))
    time.sleep(seconds)


def leave(code: int) -> None:
    """End the process with this exit code and nothing in between.

    A finished run that left it to the interpreter to take down torch's and DeepSpeed's native threads ended with
    "terminate called without an active exception" about once in ten launches of ZeRO-3 over gloo.
    """
    _HOOKS["leave"]()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
