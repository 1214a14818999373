"""Metrics of the evaluate library that need no network: each module here is one, and is loaded by its path."""

import functools
from pathlib import Path

FOLDER = Path(__file__).parent


def compute(name: str, predictions: list, references: list, **options) -> dict[str, float]:
    """The figures of the metric `name` (a module of this folder), by the evaluate library."""
    return _metric(name).compute(predictions=predictions, references=references, **options)


@functools.cache
def _metric(name: str):
    import evaluate

    return evaluate.load(str(FOLDER / f"{name}.py"), keep_in_memory=True)
