"""Metrics of the evaluate library that need no network: each module here is one."""

import functools
import importlib
from pathlib import Path

FOLDER = Path(__file__).parent


def compute(name: str, predictions: list, references: list, **options) -> dict[str, float]:
    """The figures of the metric `name` (a module of this folder), by the evaluate library."""
    return _metric(name).compute(predictions=predictions, references=references, **options)


@functools.cache
def _metric(name: str):
    # Not evaluate.load: it copies the module to a cache, and imports what is there.
    module = importlib.import_module(f"{__name__}.{name}")
    return getattr(module, name.capitalize())(keep_in_memory=True)
