"""How each class was recognized: precision, recall and F1, and the picture of what was taken for what."""

from typing import Any

import numpy as np

from zerofit.data.labelled.labels import Labels
from zerofit.data.labelled.samples import HeldOut
from zerofit.record.plot import plot_confusion
from zerofit.record.run_folder import RunFolder
from zerofit.record.terminal import screen_width, table

MAX_ROWS, MAX_PICTURED = 20, 60  # classes of a table, and of a picture


def report_classes(folder: RunFolder, labels: Labels, held_out: list[HeldOut]) -> list[str]:
    """Tables for the log from the run's predictions, one for each held-out part; each part gets a picture in the run's
    folder (confusion.png). Nothing of numbers and of choices, which are no classes."""
    if labels.names is None or labels.choices:
        return []
    lines = []
    for part in held_out:
        rows = folder.predictions(part.suffix)
        matrix = confusion(rows, labels.names)
        lines += [
            f"classes     of {len(rows):,} held-out examples{part.suffix.replace('_', ' ')}",
            per_class(matrix, labels.names),
        ]
        if len(labels.names) <= MAX_PICTURED:
            with folder.new_file(f"confusion{part.suffix}.png", "wb") as file:
                plot_confusion(matrix, labels.names, file)
    return lines


def confusion(rows: list[dict[str, Any]], names: tuple[str, ...]) -> np.ndarray:
    """(classes, classes) how many examples of each class, by row, were predicted as each, by column."""
    numbers = {name: number for number, name in enumerate(names)}
    matrix = np.zeros((len(names), len(names)), dtype=np.int64)
    for row in rows:
        matrix[numbers[row["label"]], numbers[row["prediction"]]] += 1
    return matrix


def per_class(matrix: np.ndarray, names: tuple[str, ...]) -> str:
    """The table: the classes with the most examples, in the order of their numbers. 0 where nothing was predicted."""
    right, examples, predicted = np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall = right / np.maximum(predicted, 1), right / np.maximum(examples, 1)
    f1 = 2 * right / np.maximum(examples + predicted, 1)
    rows: list[tuple[str, ...]] = [("class", "precision", "recall", "f1", "examples", "predicted")]
    for number in sorted(np.argsort(-examples, kind="stable")[:MAX_ROWS]):
        figures = (f"{values[number]:.4f}" for values in (precision, recall, f1))
        rows.append((names[number], *figures, f"{examples[number]:,}", f"{predicted[number]:,}"))
    more = len(names) - MAX_ROWS
    return table(rows, screen_width()) + (f"\n  and {more:,} more, with fewer examples" if more > 0 else "")
