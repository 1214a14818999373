"""Layouts that are predicted at the same time, on all cores."""

import contextlib
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from zerofit.estimate.planned_model import PlannedModel
from zerofit.strategy.host_memory import usable_cores
from zerofit.tools.plan.prediction import LayoutOutcome


def find_all(
    model: PlannedModel,
    outcomes: list[LayoutOutcome],
    find_one: Callable[[LayoutOutcome], None],
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> None:
    """Find what each layout holds, or why it holds nothing.

    Layouts that share traces stay together in their order: nothing is traced twice, and the predictions are the same
    on any number of cores.
    """
    shares: dict[Any, list[LayoutOutcome]] = {}
    for outcome in outcomes:
        if not outcome.refused:
            about = outcome.resolved
            key = model.trace_settings(about.precision, about.sharding, about.layout)
            shares.setdefault(key, []).append(outcome)

    def find(share: list[LayoutOutcome]) -> list[tuple]:
        for outcome in share:
            find_one(outcome)
        return [(outcome.predictions, outcome.refused) for outcome in share]

    several = list(shares.values())
    workers = min(usable_cores(), len(several)) if _can_fork() else 1
    for share, found in zip(several, in_processes(find, several, workers, progress)):
        for outcome, (predictions, refused) in zip(share, found):
            outcome.predictions, outcome.refused = predictions, refused


def in_processes(
    function: Callable, items: list, workers: int, progress: Callable[[int, int], None] = lambda done, count: None
) -> list:
    """[function(item) for each item], by this process and `workers` - 1 copies of it; each takes the next item.

    What a copy did not bring back, since it failed or was ended, is done here: an error is raised in this process.
    """
    context = multiprocessing.get_context("fork" if workers > 1 else None)
    taken = context.Value("q", 0)

    def work(progress: Callable[[int, int], None] = lambda done, count: None) -> dict[int, Any]:
        done = {}
        while True:
            with taken.get_lock():
                number, taken.value = taken.value, taken.value + 1
            if number >= len(items):
                return done
            progress(number, len(items))
            done[number] = function(items[number])

    def work_as_copy(sender: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
        with contextlib.suppress(Exception):
            sender.send(work())

    receivers = []
    for _ in range(workers - 1):
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=work_as_copy, args=(sender,), daemon=True).start()
        sender.close()
        receivers.append(receiver)
    done = work(progress)
    for receiver in receivers:
        with contextlib.suppress(EOFError):
            done |= receiver.recv()
    return [done[number] if number in done else function(item) for number, item in enumerate(items)]


def _can_fork() -> bool:
    """Whether a copy of this process can go on: not with a lock that another thread holds, nor with a CUDA context."""
    return sys.platform == "linux" and threading.active_count() == 1 and not torch.cuda.is_initialized()
