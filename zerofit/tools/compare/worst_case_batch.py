"""The worst case of a recipe: batches in which every row has the greatest length."""

from collections.abc import Callable

import numpy as np

from zerofit.data.collate import Batch
from zerofit.data.pack import Sample, SampleSet
from zerofit.training.task import Task


class WorstCaseBatches:
    """Batches of the task's own samples, each repeated until it has the greatest length.

    Args:
        task: its `longest` has that length.
    """

    def __init__(self, task: Task):
        self.samples: SampleSet = task.train_set
        self.collate: Callable[[list], Batch] = task.collate
        self.longest = task.longest

    def batch(self, size: int, start: int, longest: dict[str, int] | None = None) -> Batch:
        """A batch of `size` rows: samples `start`, `start` + 1 and so on, from the beginning again after the last.

        Args:
            longest: tokens by column, in place of the task's.
        """
        indices = [(start + place) % len(self.samples) for place in range(size)]
        return self.collate([(stretched(self.samples[index], longest or self.longest), index) for index in indices])


def stretched(sample: Sample, longest: dict[str, int]) -> Sample:
    """A sample with its rows of tokens repeated to the greatest length. Where labels are next tokens, all are trained.

    Args:
        longest: tokens by column. Columns of the same length as `input_ids` are stretched with it.
    """
    length = len(sample["input_ids"])
    long = dict(sample)
    for name, values in sample.items():
        if name in longest:
            long[name] = np.resize(values, longest[name])
        elif np.ndim(values) == 1 and len(values) == length:
            long[name] = np.resize(values, longest["input_ids"])
    if "position_ids" in sample and np.array_equal(sample["position_ids"], np.arange(length)):
        long["position_ids"] = np.arange(longest["input_ids"])  # one document stays one
    if "labels" in sample and "labels" not in longest:  # next tokens: prompts and padding are trained as well
        long["labels"] = long["input_ids"].copy()
    if "sizes" in sample:  # of choices, which are in one row
        long["sizes"] = np.full_like(sample["sizes"], longest["input_ids"] // len(sample["sizes"]))
        long["sizes"][-1] += longest["input_ids"] - long["sizes"].sum()
    if "num_tokens" in sample:
        long["num_tokens"] = np.array(longest["input_ids"])
    return long
