"""A script of train/ that is killed as it writes a file of its mirror: SEED train/clm.py ..."""

import os
import random
import runpy
import signal
import sys
from pathlib import Path

from zerofit.checkpoint.mirror import MirrorStore

LAST = 30  # of the calls that a kill may come in


def kill_at(number: int, when: str) -> None:
    """Kill this process before, after, or in the middle of the write of this number."""
    put, count = MirrorStore.put, 0

    def counted(self, source, name):
        nonlocal count
        count += 1
        if count < number:
            return put(self, source, name)
        if when != "before":
            content = source if isinstance(source, bytes) else source.read_bytes()
            put(self, content[: len(content) // 2] if when == "within" else content, name)
        return os.kill(os.getpid(), signal.SIGKILL)

    MirrorStore.put = counted


if __name__ == "__main__":
    drawn = random.Random(int(sys.argv[1]))
    kill_at(drawn.randint(1, LAST), drawn.choice(["before", "within", "after"]))
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
