"""Layouts that are predicted at the same time, on all cores."""

import contextlib
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

from zerofit.estimate.planned_model import PlannedModel
from zerofit.strategy.host_memory import usable_cores
from zerofit.tools.plan.prediction import LayoutOutcome

A = TypeVar("A")
B = TypeVar("B")


Progress = Callable[[int, int], None]  # called with how many are done, of how many


def find_all(
    model: PlannedModel, outcomes: list[LayoutOutcome], find_one: Callable[[LayoutOutcome], None], progress: Progress
) -> None:
    """Find what each layout holds, or why it holds nothing. Layouts that share traces stay together in their order:
    nothing is traced twice, and the predictions are the same on any number of cores."""
    shares: dict[Any, list[LayoutOutcome]] = {}
    for outcome in outcomes:
        if not outcome.refused:
            about = outcome.resolved
            key = model.trace_settings(about.precision, about.sharding, about.layout)
            shares.setdefault(key, []).append(outcome)

    def find(share: list[LayoutOutcome]) -> list[tuple[Any, ...]]:
        for outcome in share:
            find_one(outcome)
        return [(outcome.predictions, outcome.refused, outcome.remedies) for outcome in share]

    for share, found in zip(shares.values(), in_processes(find, [*shares.values()], progress)):
        for outcome, (predictions, refused, remedies) in zip(share, found):
            outcome.predictions, outcome.refused, outcome.remedies = predictions, refused, remedies


def in_processes(function: Callable[[A], B], items: list[A], progress: Progress = lambda done, count: None) -> list[B]:
    """[function(item) for each item], in copies of this process where one can work, one for each core; an error is
    raised in this one."""
    _shared["work"] = function, items  # closures cannot be pickled: copies find them here
    done: list[B] = []
    workers = min(usable_cores(), len(items))
    with contextlib.ExitStack() as stack:
        results: Iterable[B] = map(function, items)
        if workers > 1 and _can_fork():
            # One thread each, as DataLoader's workers: a copy has none of the OpenMP threads of this process.
            fork = multiprocessing.get_context("fork")
            pool = ProcessPoolExecutor(workers, fork, initializer=torch.set_num_threads, initargs=(1,))
            stack.enter_context(pool)
            if pool.submit(_can_differentiate).result():
                results = pool.map(_one, range(len(items)))
        for found in results:
            done.append(found)
            progress(len(done), len(items))
    return done


_shared: dict[str, Any] = {}


def _one(number: int) -> Any:
    function, items = _shared["work"]
    return function(items[number])


def _can_differentiate() -> bool:
    """Return whether autograd works in this copy: some builds of torch refuse it after the first process has used
    it."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _can_fork() -> bool:
    """Return whether a copy of this process can go on: not with a lock that another thread holds, nor with a CUDA
    context."""
    return sys.platform == "linux" and threading.active_count() == 1 and not torch.cuda.is_initialized()
