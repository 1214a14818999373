"""Print the last message of a failed run below the output of its launcher, once.

`accelerate launch` and torchrun print a traceback of their own, up to forty lines, when a process fails.

* With several processes the traceback ends with the content of the process's error file, which has the message.
* Otherwise, and on a terminal, a small process, this file, waits until the launcher has ended and prints the message.
  Where it would not live as long (the launcher is the first process of a container) and with `--quiet`, the message is
  printed at once.

`zerofit launch` prints no traceback: there the message is printed at once too.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time

LAUNCHER = os.getppid()
LONGEST_S = 120.0  # torchrun waits 30 s for its processes by default
AGENT = "zerofit/tools/launch/agent.py"  # the launcher that `zerofit launch` starts
BELOW = "its message is the last one below"


def print_last(text: str, after_signal: bool = False, file=None) -> None:
    """Print `text` as the last message; of the rank with number 0 where it is not in the launcher's own output.

    Args:
        after_signal: the launcher got the same signal, and ends without the content of error files.
        file: where it is printed if that is done at once; stderr by default.
    """
    if not _leave_to_launcher(text, after_signal):
        print(text, file=file or sys.stderr, flush=True)


def repeat_last(text: str) -> None:
    """The same for what is on the screen already: without a launcher there is nothing to do. Never fails."""
    _leave_to_launcher(text, after_signal=False)


def _leave_to_launcher(text: str, after_signal: bool) -> bool:
    """Whether the text will be printed later, or by another process."""
    with contextlib.suppress(OSError):
        pid, file = os.getppid(), os.environ.get("TORCHELASTIC_ERROR_FILE")
        words = _command(pid)
        if not prints_a_traceback(words):
            return False
        lives = pid != 1 and _parent(pid) != 1
        waits = lives and os.environ.get("RANK", "0") == "0" and (after_signal or not file or os.isatty(2))
        if waits:
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(pid), text],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        if file:  # as torch/distributed/elastic/multiprocessing/errors reads it
            extra = {"timestamp": str(int(time.time()))}
            with open(file, "w", encoding="utf-8") as opened:
                json.dump({"message": {"message": BELOW if waits else text, "extraInfo": extra}}, opened)
        return waits or bool(file and not after_signal)
    return False


def _command(pid: int) -> list[str]:
    """The command line of a process (known on Linux only)."""
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().rstrip("\0").split("\0")


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def prints_a_traceback(words: list[str]) -> bool:
    """Whether a command is a launcher that prints a traceback when its process fails."""
    if any(word.endswith(AGENT) for word in words[:3]):
        return False
    is_torchrun = any(word.endswith(("torchrun", "torch.distributed.run", "distributed/run.py")) for word in words[:3])
    return is_torchrun or (is_accelerate_launch(words) and not {"--quiet", "-q"} & set(words))


def is_accelerate_launch(words: list[str]) -> bool:
    """Whether a command is `accelerate launch`, `accelerate-launch`, `python -m accelerate.commands.launch`, or what
    `zerofit launch` runs it with."""
    alone = ("accelerate-launch", "accelerate.commands.launch", "accelerate/commands/launch.py", AGENT)
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
            ended.poll(1000 * LONGEST_S)
        os.write(2, f"\n{text}\n".encode())


if __name__ == "__main__":
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of a scheduler, to all processes of the job
    wait_and_print(int(sys.argv[1]), sys.argv[2])
