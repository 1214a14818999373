"""Samples of different lengths: one row of token ids each, which the collator pads."""

import numpy as np
from datasets import Dataset

from zerofit.data.pack import DatasetStats, Sample
from zerofit.data.token_row import Documents


class TokenizedDataset:
    """Rows of a tokenized table.

    Args:
        table: columns of token ids, and `truncated`, the number of tokens cut from each row.
        columns: the columns of a sample.
        labels: one label per row (a class, int64, or a number, float32); it becomes `label` of the sample.
    """

    def __init__(self, table: Dataset, columns: tuple[str, ...], labels: np.ndarray | None = None):
        self.columns = {name: Documents(table, name) for name in columns}
        self.labels = labels
        self.scores: np.ndarray | None = None  # how difficult each is, where a column of the records says so
        counted = [self.columns[name].lengths for name in ("input_ids", "labels") if name in columns]
        # Rows of one update have sources of similar length. With targets considered too, some updates would have only
        # short targets, and a token has more weight in an update with fewer tokens (docs/measurements/padding.md).
        self.lengths = counted[0]
        self.sort_key = counted[0] if len(counted) == 1 else counted[0] * (1 + counted[1].max()) + counted[1]
        self.truncated = np.asarray(table.with_format("numpy")["truncated"][:])
        truncated = int(np.sum(self.truncated))
        self.stats = DatasetStats(
            documents=len(table),
            tokens=int(np.sum(counted)) + truncated,
            samples=len(table),
            truncated=truncated,
            trained=int(counted[1].sum()) if len(counted) > 1 else None,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        sample = {name: column.row(index) for name, column in self.columns.items()}
        return sample if self.labels is None else {**sample, "label": self.labels[index]}

    def mean_lengths(self) -> list[float]:
        """The mean number of tokens in each column."""
        return [float(column.lengths.mean()) for column in self.columns.values()]
