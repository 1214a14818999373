"""Samples that differ in length: one row of token ids each, padded by the batch that it is in."""

import numpy as np
from datasets import Dataset

from train.data.pack import DatasetStats, Sample
from train.data.token_tables import Documents


class TokenizedDataset:
    """Rows of a tokenised table.

    Args:
        table: columns of token ids, and `truncated`, the tokens that each row lost.
        columns: those that a sample has.
        labels: one label a row (a class, int64, or a number, float32), which samples then have as `label`.
    """

    def __init__(self, table: Dataset, columns: tuple[str, ...], labels: np.ndarray | None = None):
        self.columns = {name: Documents(table, name) for name in columns}
        self.labels = labels
        counted = [self.columns[name].lengths for name in ("input_ids", "labels") if name in columns]
        # Updates are made of rows whose sources are alike. Were targets considered too, some updates would hold short
        # ones only, and a token weighs the more the fewer its update has (docs/padding.md).
        self.lengths = counted[0]
        self.sort_key = counted[0] if len(counted) == 1 else counted[0] * (1 + counted[1].max()) + counted[1]
        self.truncated = np.asarray(table.with_format("numpy")["truncated"][:])
        truncated = int(np.sum(self.truncated))
        self.contents = DatasetStats(
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
