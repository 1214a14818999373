"""Metrics of the evaluate library that need no network: each module here is one, and is loaded by its path."""

from pathlib import Path

FOLDER = Path(__file__).parent


def compute(name: str, predictions: list, references: list, **options) -> dict[str, float]:
    """The figures of the metric `name` (a module of this folder), by the evaluate library."""
    import evaluate

    metric = evaluate.load(str(FOLDER / f"{name}.py"), keep_in_memory=True)
    return metric.compute(predictions=predictions, references=references, **options)
