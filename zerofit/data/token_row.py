"""Documents as one long row of token ids. No library for tables is imported here: `zerofit plan` reads no data."""

from typing import TYPE_CHECKING

import numpy as np

from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

NO_TEXT = "the data holds no text: nothing to train on. Look at train_file and text_column"


class Documents:
    """The token ids of all documents as one long row, read from the memory-mapped Arrow file.

    `offsets` (int64, documents + 1) is the start of each document. `column` is the column of ids to read.
    """

    def __init__(self, dataset: "Dataset", column: str = "input_ids"):
        assert dataset._indices is None, "tokenized data is read in its stored order"
        self._chunks: list[np.ndarray] = []
        lengths = []
        for chunk in dataset.data.column(column).chunks:
            offsets = chunk.offsets.to_numpy()
            self._chunks.append(chunk.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]])
            lengths.append(np.diff(offsets))
        lengths = np.concatenate([*lengths, np.zeros(0, np.int64)]).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._starts = np.concatenate([[0], np.cumsum([len(chunk) for chunk in self._chunks])]).astype(np.int64)
        if self.num_tokens == 0:
            raise UserError(NO_TEXT)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def row(self, index: int) -> np.ndarray:
        """The ids of one document, a copy (int64)."""
        return self.tokens(int(self.offsets[index]), int(self.offsets[index + 1]))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) of the long row, a copy (int64)."""
        out = np.empty(stop - start, dtype=np.int64)
        chunk = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begin = self._starts[chunk]
            end = min(stop, self._starts[chunk + 1])
            out[len(out) - (stop - start) :][: end - start] = self._chunks[chunk][start - begin : end - begin]
            start, chunk = end, chunk + 1
        return out
