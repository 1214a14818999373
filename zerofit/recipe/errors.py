"""Exit codes, how a process ends, and errors of the user: one message without a traceback, and code 2."""

import contextlib
import difflib
import functools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO

EXIT_USER_ERROR = 2
EXIT_FAILED = 1  # an error with a traceback, or a process that is gone
EXIT_TO_BE_RESUMED = 85  # it has saved and left: the same command continues
EXIT_NEEDS_A_PERSON = 86  # the same command would come to the same end: an anomaly, a full disk
EXIT_OUT_OF_MEMORY = 87
EXIT_INTERRUPTED = 130  # the code of a shell for Ctrl-C
EXIT_TERMINATED = 143  # the code of a shell for SIGTERM
EXIT_BROKEN_PIPE = 141  # the code of a shell for a closed pipe
EXIT_TIMEOUT_S = 10.0  # within which a process that leaves has left; telling other machines may take some of it
# What a terminal obeys: control characters but tab and new line, and marks that turn the direction of what follows.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Return a text for the terminal or a report, with control characters written as Python writes them."""
    return CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """One or more problems that the user must fix. Each names the option, the value and the remedy."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def report(self, outcome: str = "nothing was trained") -> str:
        """Return the message for the terminal: one line for one problem, or a numbered list headed by the outcome."""
        if len(self.problems) == 1:
            return escape_controls(f"error: {self.problems[0]}")
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        return escape_controls("\n".join([f"error: {len(self.problems)} problems, {outcome}", *lines]))


class Problems:
    """The problems of several independent checks, to be reported together."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the problems of a UserError that ends this block, and continue after it."""
        try:
            yield
        except UserError as error:
            self.found += error.problems

    def raise_found(self) -> None:
        """Raises UserError if a problem was collected."""
        if self.found:
            raise UserError(self.found)


class NothingToDo(Exception):
    """The result exists already, which the message says; the exit code is 0."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `name`; None if none is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "Remove it") -> str:
    """Return the remedy for an unknown name: the known one that is most similar, or another remedy."""
    close = nearest(name, known)
    return f"Did you mean {close}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True on rank 0; also where RANK is not a number, so that the message about it is printed at once."""
    rank = environment.get("RANK", "0")
    return rank == "0" or not rank.isdigit()


LAUNCHER_VARIABLE = "ZEROFIT_LAUNCHER"  # a variable of the ranks of zerofit/launch/agent.py


def print_last(text: str, after_signal: bool = False, file: TextIO | None = None, is_printed: bool = False) -> None:
    """Print a message below the traceback that torchrun, and `accelerate launch` with several processes, print when a
    process fails: they end theirs with the content of the process's error file. `after_signal`: the launcher got the
    same signal, and ends without the content of error files. `is_printed`: the message is on the screen already, above
    the traceback."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and not after_signal and LAUNCHER_VARIABLE not in os.environ:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError), open(error_file, "w", encoding="utf-8") as opened:
            json.dump({"message": message}, opened)
            return
    if not is_printed:
        print(text, file=file or sys.stderr, flush=True)


@dataclass
class Exit:
    """The end of this process: the functions that are called before it, and its exit code. `explain`: prints an
    explanation of an error other than UserError, and returns the exit code, or None. `tell`: tells other machines the
    message and the exit code."""

    explain: Callable[[Exception], int | None] = lambda error: None
    cleanup: Callable[[], None] = lambda: None  # `leave` calls it before it ends the process
    record: Callable[[int, str | None], None] = lambda code, reason: None  # puts an exit code and its reason on record
    tell: Callable[[str, int], None] = lambda message, code: None
    code: int | None = None  # the exit code once it is decided, which a later signal does not change


EXIT = Exit()  # this process's
_LEAVING: dict[str, tuple[int, int]] = {}  # at most one: the thread that ends the process, and its code


@contextlib.contextmanager
def exit_within() -> Iterator[None]:
    """Restore EXIT after a run in a process that goes on: the cleanup that the run has set is called at the end of
    this context, and its functions are removed."""
    saved = replace(EXIT)
    try:
        yield
    finally:
        if EXIT.cleanup is not saved.cleanup:
            EXIT.cleanup()
        vars(EXIT).update(vars(saved))


def record_code(code: int, reason: str | None = None) -> None:
    """Set the exit code, and record it where this process keeps a record."""
    EXIT.code = code
    EXIT.record(code, reason)


def reports_user_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap an entry point: a `UserError` becomes one message on stderr and exit code 2.

    Usually all ranks find the same error at about the same time, and the launcher stops all ranks when the first one
    exits. So rank 0 prints the message and exits; the other ranks wait until then, and print it only if no launcher
    stops them, because the error concerns their machine alone: its first rank comes first.
    An error that is explained (see `Exit`) ends with the exit code of the explanation; any other is raised.
    """

    @functools.wraps(main)
    def wrapped(*arguments: Any) -> int:
        EXIT.code = None  # an earlier call in this process may have set it
        try:
            EXIT.code = main(*arguments)
            return EXIT.code
        except UserError as error:
            message = error.report()
            record_code(EXIT_USER_ERROR, message)
            if not is_first_rank():
                EXIT.tell(message, EXIT_USER_ERROR)
                signal.signal(signal.SIGTERM, lambda *_: leave(EXIT_USER_ERROR))  # SIGTERM comes from the launcher
                time.sleep(20 if os.environ.get("LOCAL_RANK", "0") == "0" else 25)
                message = f"[rank {os.environ['RANK']}] {message}"
            print_last(message)
            EXIT.tell(message, EXIT_USER_ERROR)
            return EXIT_USER_ERROR
        except NothingToDo as done:
            record_code(0)
            if is_first_rank():
                print(escape_controls(str(done)), flush=True)
            EXIT.tell(str(done), 0 if is_first_rank() else EXIT_USER_ERROR)
            return 0
        except BrokenPipeError:  # `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it as it ends
            return EXIT_BROKEN_PIPE
        except Exception as error:
            code = EXIT.explain(error)
            description = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
            record_code(EXIT_FAILED if code is None else code, description)
            EXIT.tell(description, EXIT_FAILED if code is None else code)
            if code is None:
                print_last(f"{description} (its traceback is above)", is_printed=True)
                raise
            return code
        except KeyboardInterrupt:
            if is_first_rank():
                message = "interrupted while the run was starting: its folder is unchanged"
                print_last(message, after_signal=True)
            record_code(EXIT_INTERRUPTED)
            return EXIT_INTERRUPTED

    return wrapped


def leave(code: int) -> None:
    """End the process at once with this exit code.

    Without it, when the interpreter ends the native threads of torch and DeepSpeed, a finished run ended with
    "terminate called without an active exception" about once in ten launches of ZeRO-3 over gloo.
    """
    this_exit = threading.get_ident(), code
    first_exit = _LEAVING.setdefault("first", this_exit)
    if first_exit is not this_exit:
        if first_exit[0] == this_exit[0]:  # a signal's handler within this function
            return
        time.sleep(EXIT_TIMEOUT_S)  # another thread, of signals for instance, is leaving: its code holds
        os._exit(first_exit[1])
    with contextlib.suppress(Exception):  # no failure here changes the exit code
        EXIT.tell(f"exit code {code}", code)
    with contextlib.suppress(Exception):
        EXIT.cleanup()
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
