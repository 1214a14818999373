"""Metrics of the evaluate library that need no network: each module here is one."""

import functools
import importlib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def compute(name: str, predictions: list[Any], references: list[Any], **options: Any) -> dict[str, float]:
    """The figures of the metric `name` (a module of this folder), by the evaluate library."""
    figures: dict[str, float] = _metric(name).compute(predictions=predictions, references=references, **options)
    return figures


@functools.cache
def _metric(name: str) -> Any:  # evaluate has no types
    # Not evaluate.load: it copies the module to a cache, and imports what is there.
    module = importlib.import_module(f"{__name__}.{name}")
    return getattr(module, name.capitalize())(keep_in_memory=True)
