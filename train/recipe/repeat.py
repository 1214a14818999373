"""The last words of a run that fails, after those of its launcher.

`accelerate launch` prints a traceback of its own, some thirty lines, below whatever its processes had to say.

* torchrun, its launcher of several processes, shows in a summary at the end what a process has written into its error
  file: there the message goes.
* With one process, and after Ctrl-C, there is no such place. On a terminal a small process, this file, waits for the
  launcher's end and prints the message again, if the launcher has written a traceback meanwhile (not with `--quiet`).
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time

LAUNCHER = os.getppid()
LONGEST_S = 120.0  # torchrun waits for its processes for 30 s, unless told otherwise
TICK_MS = 5
TRACEBACK_BYTES = 200  # at least; a launcher that is quiet has written some 70 bytes of other things as it ends


def repeat_after_launcher(text: str, after_signal: bool = False) -> None:
    """See that `text`, which has been printed, is also the last that is read. Never fails.

    Args:
        after_signal: the launcher has heard the same signal, and ends without a summary.
    """
    with contextlib.suppress(OSError):
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file and not after_signal:
            # As torch/distributed/elastic/multiprocessing/errors reads it.
            told = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
            with open(file, "w", encoding="utf-8") as opened:
                json.dump(told, opened)
        elif os.environ.get("RANK", "0") == "0" and os.isatty(2) and _is_launcher(LAUNCHER):
            numbers = (str(LAUNCHER), str(written(LAUNCHER)))
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *numbers, text],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


def _is_launcher(pid: int) -> bool:
    """Whether this process' parent, alive, is `accelerate launch`. (Linux; elsewhere nobody can tell.)"""
    if os.getppid() != pid:
        return False
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    return b"launch" in words and any(b"accelerate" in word for word in words)


def written(pid: int) -> int | None:
    """Bytes that a process has written so far; None where that cannot be seen."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/io") as file:
        return int(next(line.split()[1] for line in file if line.startswith("wchar")))
    return None


def wait_and_print(pid: int, before: int | None, text: str) -> None:
    """Print the text when the process has ended, unless it wrote nothing in between."""
    now, until = before, time.monotonic() + LONGEST_S
    with contextlib.suppress(OSError):  # it is gone already
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        while not ended.poll(TICK_MS):
            now = written(pid) or now
            if time.monotonic() > until:
                return
    if before is None or now >= before + TRACEBACK_BYTES:
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())


if __name__ == "__main__":
    wait_and_print(int(sys.argv[1]), None if sys.argv[2] == "None" else int(sys.argv[2]), sys.argv[3])
