"""A script of train/ in which ranks are disturbed: disturbed.py RANK,RANK ... WHAT SCRIPT OPTIONS ...

WHAT is `unused` (DDP looks for parameters that have no gradient), `forward` or `data` (slow), `gradient FACTOR FACTOR
...`, `stop in PHASE`, `kill UPDATE`, or `SIGNAL PHASE UPDATE`: in that phase of that update, or of the next one that
has it, the rank sends the signal to all ranks. Gradients of the first update are multiplied by the first factor, and
so on; the loss stays as it is.
"""

import functools
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from zerofit.data.collate import CausalCollator
from zerofit.strategy import processes
from zerofit.strategy.engine import Engine
from zerofit.training.run import Run


def burn(*_) -> None:
    """Compute for as long as this takes without other programs."""
    until = time.thread_time() + 0.0015
    while time.thread_time() < until:
        torch.ones(64).sum()


def wait_for_a_disk(collate, *args):
    time.sleep(0.08)
    return collate(*args)


def end_after_others() -> None:
    """Have this process killed when no other rank is left."""
    others = {child.pid for child in psutil.Process(os.getppid()).children()} - {os.getpid()}
    waits = "; ".join(f"while kill -0 {pid}; do sleep 0.1; done" for pid in others)
    subprocess.Popen(
        ["sh", "-c", f"{waits}; kill -9 {os.getpid()}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def disturb(what: str) -> None:
    if what == "forward":
        before = torch.nn.Linear.forward
        torch.nn.Linear.forward = lambda self, hidden: (burn(), before(self, hidden))[1]
    elif what == "unused":
        kwargs = processes.DistributedDataParallelKwargs
        processes.DistributedDataParallelKwargs = functools.partial(kwargs, find_unused_parameters=True)
    elif what == "data":
        collate = CausalCollator.__call__
        CausalCollator.__call__ = lambda self, *args: wait_for_a_disk(collate, self, *args)
    elif what.startswith("gradient "):
        factors, forward_backward = iter(map(float, what.split()[1:])), Engine.forward_backward

        def multiplied(self, micro_batches, loss_sum, scale):
            return forward_backward(self, micro_batches, loss_sum, scale * next(factors))

        Engine.forward_backward = multiplied
    else:
        enter, words, sent = Run.enter, what.split(), []

        def disturbed(self, name, update):
            enter(self, name, update)
            if words[0] == "stop" and name == words[2] and update >= 2:
                end_after_others()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif words[0] == "kill" and update == int(words[1]):
                while list((self.folder.path / "checkpoints").glob("*.partial")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            elif words[0].startswith("SIG") and name == words[1] and update >= int(words[2]) and not sent:
                sent.append(update)
                ranks = psutil.Process(os.getppid()).children()
                for rank in sorted(ranks, key=lambda rank: rank.pid == os.getpid()):  # this one at the end
                    rank.send_signal(signal.Signals[words[0]])

        Run.enter = disturbed


if __name__ == "__main__":
    rank, what = sys.argv[1:3]
    if os.environ["RANK"] in rank.split(","):
        disturb(what)
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
