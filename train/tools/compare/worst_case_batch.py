"""The worst case that a recipe allows: batches in which every row is as long as rows may be."""

from collections.abc import Callable

import numpy as np

from train.data.collate import Batch
from train.data.pack import Sample, SampleSet
from train.training.task import Task


class WorstCase:
    """Batches of the job's own samples, each repeated until it is as long as the recipe allows.

    Args:
        job: its `longest` says how long rows may be.
    """

    def __init__(self, job: Task):
        self.samples: SampleSet = job.train_set
        self.collate: Callable[[list], Batch] = job.collate
        self.longest = job.longest

    def batch(self, size: int, start: int) -> Batch:
        """A batch of `size` rows: samples `start`, `start` + 1 and so on, from the beginning again after the last."""
        indices = [(start + place) % len(self.samples) for place in range(size)]
        return self.collate([(stretched(self.samples[index], self.longest), index) for index in indices])


def stretched(sample: Sample, longest: dict[str, int]) -> Sample:
    """A sample whose rows of tokens are repeated to their longest; every token is trained on where any is.

    Args:
        longest: tokens by column. Columns that are as long as `input_ids` go with it.
    """
    own = len(sample["input_ids"])
    found = dict(sample)
    for name, values in sample.items():
        if name in longest:
            found[name] = np.resize(values, longest[name])
        elif np.ndim(values) == 1 and len(values) == own:
            found[name] = np.resize(values, longest["input_ids"])
    if "labels" in sample and "labels" not in longest:  # next tokens: prompts and filling count as well
        found["labels"] = found["input_ids"].copy()
    if "sizes" in sample:  # of choices, which share the row
        found["sizes"] = np.full_like(sample["sizes"], longest["input_ids"] // len(sample["sizes"]))
        found["sizes"][-1] += longest["input_ids"] - found["sizes"].sum()
    if "num_tokens" in sample:
        found["num_tokens"] = np.array(longest["input_ids"])
    return found
