"""Print the last message of a failed run again, after the output of its launcher.

`accelerate launch` prints a traceback of its own, about thirty lines, below the messages of its processes.

* With several processes torchrun prints a summary at the end, with the content of a process's error file: the message
  is written there.
* With one process, and after Ctrl-C, there is no summary. On a terminal a small process, this file, waits until the
  launcher has ended and prints the message again (not with `--quiet`, where the launcher prints nothing).
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time

LONGEST_S = 120.0  # torchrun waits 30 s for its processes by default
TRACEBACK_BYTES = 200  # at least


def _written(pid: int) -> int:
    """Bytes that a process has written so far; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io") as file:
        return int(next(line.split()[1] for line in file if line.startswith("wchar")))
    return 0


LAUNCHER = os.getppid()
WRITTEN_BEFORE = _written(LAUNCHER)


def repeat_after_launcher(text: str, after_signal: bool = False) -> None:
    """Make `text`, which has been printed, the last message on the terminal as well. Never fails.

    Args:
        after_signal: the launcher got the same signal, and ends without a summary.
    """
    with contextlib.suppress(OSError):
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file:  # as torch/distributed/elastic/multiprocessing/errors reads it
            error = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
            with open(file, "w", encoding="utf-8") as opened:
                json.dump(error, opened)
        # The launcher of one process prints only its traceback; if that is out already, `text` is below it.
        is_last = not after_signal if file else _written(LAUNCHER) >= WRITTEN_BEFORE + TRACEBACK_BYTES
        if not is_last and os.environ.get("RANK", "0") == "0" and os.isatty(2) and _prints_a_traceback(LAUNCHER):
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(LAUNCHER), text],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


def _prints_a_traceback(pid: int) -> bool:
    """Whether this process' parent is alive and is an `accelerate launch` without --quiet (known on Linux only)."""
    if os.getppid() != pid:
        return False
    with open(f"/proc/{pid}/cmdline") as file:
        words = file.read().split("\0")
    return is_accelerate_launch(words) and not {"--quiet", "-q"} & set(words)


def is_accelerate_launch(words: list[str]) -> bool:
    """Whether a command is `accelerate launch`, under one of its names or as `zerofit launch` starts it."""
    alone = (
        "accelerate-launch", "accelerate.commands.launch", "accelerate/commands/launch.py",
        "train/tools/launch/agent.py",
    )  # fmt: skip
    first = words[:3]  # Python, -m and the program at most
    return any(word.endswith(alone) for word in first) or (
        "launch" in words and any("accelerate" in word for word in words)
    )


def wait_and_print(pid: int, text: str) -> None:
    """Print the text when the process has ended."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(ProcessLookupError):  # it has
            ended = select.poll()
            ended.register(os.pidfd_open(pid), select.POLLIN)
            if not ended.poll(1000 * LONGEST_S):
                return
        os.write(2, f"\n{text}\n".encode())


if __name__ == "__main__":
    wait_and_print(int(sys.argv[1]), sys.argv[2])
