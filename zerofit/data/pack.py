"""From tables of token ids to samples: packed blocks with or without document boundaries, or a row per record.
Conversations are packed in zerofit/data/chat/samples.py.

No library for tables is imported here: `zerofit plan` reads no data.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from zerofit.model.loss import IGNORE
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

    from zerofit.data.order import Order
    from zerofit.data.prompts import Prompts

NO_TEXT = "the data holds no text: nothing to train on. Look at train_file and text_column"
# input_ids, labels, and position_ids if packed; each (length,) int64. num_tokens if the row ends in padding.
Sample = dict[str, np.ndarray]


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of the samples of a part. Counts are in tokens unless their names say otherwise."""

    documents: int
    tokens: int
    samples: int
    truncated: int  # number of tokens cut off
    trained: int | None = None  # tokens that are predicted, and so trained on; None for classification
    padding: float | None = None  # largest fraction of positions that are padding; None if it depends on the batches

    @property
    def mean_length(self) -> int:
        """Return the mean number of tokens of a sample, without padding."""
        return round((self.tokens - self.truncated) / self.samples)

    @property
    def pair_lengths(self) -> tuple[float, float]:
        """Return the mean number of tokens of a source and of a target, without padding."""
        assert self.trained is not None, "targets are trained on"
        source = (self.tokens - self.truncated - self.trained) / self.samples
        return source, self.trained / self.samples


def stats_rows(
    train: DatasetStats | None, validation: DatasetStats | None, prompts: DatasetStats | None = None
) -> list[tuple[str, ...]]:
    """Return the table of the data for the log: one row per statistic, one column per part. `prompts`: the statistics
    of predict_file, which is the only part then."""
    parts = {"training": train, "held out": validation, "to answer": prompts}
    columns = [(name, stats) for name, stats in parts.items() if stats]
    first = columns[0][1]
    rows = [("", *(name for name, _ in columns))]
    for label, show, shown in (
        ("documents", lambda c: f"{c.documents:,}", first.documents != first.samples),
        ("samples", lambda c: f"{c.samples:,}", True),
        ("tokens", lambda c: f"{c.tokens:,}", True),
        ("tokens trained on" if train else "predicted", lambda c: f"{c.trained:,}", first.trained is not None),
        ("tokens truncated", lambda c: f"{c.truncated:,} ({c.truncated / c.tokens:.1%})", True),
        ("padding", lambda c: f"{c.padding:.1%}", first.padding is not None),
    ):
        if shown:
            rows.append((label, *(show(stats) for _, stats in columns)))
    return rows


class SampleSet(Protocol):
    """Samples by index, each a dict with at least `input_ids`. Every rank can read every sample.

    With grouping by length, `lengths` decides which samples form an update, and `sort_key` which samples of an update
    form a micro-batch. Both are None if all samples have the same length.
    """

    @property
    def stats(self) -> DatasetStats: ...

    @property
    def lengths(self) -> np.ndarray | None: ...

    @property
    def sort_key(self) -> np.ndarray | None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class LabelledSamples(SampleSet, Protocol):
    """Samples with `labels`: (N,) int64 classes or float32 numbers; for token classification those of all words, less
    the words that are cut off; for multi-label classification (N, classes) of 0 or 1."""

    @property
    def labels(self) -> np.ndarray: ...


class Documents:
    """The token ids of all documents as one long row, read from the memory-mapped Arrow file.

    `offsets` (int64, documents + 1) is the start of each document. `column` is the column of ids, or of numbers of
    other types, to read.
    """

    def __init__(self, dataset: "Dataset", column: str = "input_ids"):
        assert len(dataset.data) == len(dataset), "tokenized data is read in its stored order"
        chunks = dataset.data.column(column).chunks
        self._chunks: list[np.ndarray] = [chunk.flatten().to_numpy() for chunk in chunks]
        self.offsets = np.cumsum(np.concatenate([[0], *(chunk.value_lengths().to_numpy() for chunk in chunks)]))
        self._starts = np.cumsum([0, *map(len, self._chunks)])
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
        """Return a copy of the ids of one document (int64; numbers that are not integers keep their type)."""
        return self.tokens(int(self.offsets[index]), int(self.offsets[index + 1]))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of the ids [start, stop) of all documents in one row, with the dtype as in `row`."""
        stored = self._chunks[0].dtype
        out = np.empty(stop - start, dtype=np.int64 if stored.kind == "i" else stored)
        chunk = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begin = self._starts[chunk]
            end = min(stop, self._starts[chunk + 1])
            out[len(out) - (stop - start) :][: end - start] = self._chunks[chunk][start - begin : end - begin]
            start = end
            chunk = chunk + 1
        return out


class PackedBlocks:
    """Blocks of exactly block_size tokens, cut from the concatenated documents.

    With `boundaries`, position_ids restart at each document (from which transformers' attention separates documents),
    the first token of a document is not predicted from the document before it, and the last block is filled up with
    masked tokens. Without, the blocks are those of `group_texts`: one text, whose remainder is dropped. `limit`: use
    the first blocks only, at most this many.
    """

    def __init__(self, documents: Documents, block_size: int, boundaries: bool, filler: int, limit: int | None = None):
        self.documents = documents
        self.block_size = block_size
        self.boundaries = boundaries
        self.filler = filler
        self.lengths = self.sort_key = None
        tokens = documents.num_tokens if limit is None else min(documents.num_tokens, limit * block_size)
        self.num_blocks = -(-tokens // block_size) if boundaries else tokens // block_size
        used = tokens if boundaries else self.num_blocks * block_size
        unpredicted = np.arange(self.num_blocks) * block_size
        if boundaries:
            begins = documents.offsets[:-1]
            unpredicted = np.union1d(unpredicted, begins[begins < used])
        positions = self.num_blocks * block_size
        self.stats = DatasetStats(
            documents=int((documents.offsets[:-1] < tokens).sum()),
            tokens=tokens,
            samples=self.num_blocks,
            trained=used - len(unpredicted),
            truncated=tokens - used,
            padding=(positions - used) / positions if positions else 0.0,
        )

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, index: int) -> Sample:
        start = index * self.block_size
        stop = min(start + self.block_size, self.documents.num_tokens)
        missing = self.block_size - (stop - start)
        tokens = np.concatenate([self.documents.tokens(start, stop), np.full(missing, self.filler)])
        labels = tokens.copy()
        if not self.boundaries:
            return {"input_ids": tokens, "labels": labels}
        labels[self.block_size - missing :] = IGNORE
        first, last = np.searchsorted(self.documents.offsets, [start, stop], side="left")
        begins = self.documents.offsets[first:last] - start  # documents that begin inside this block
        labels[begins] = IGNORE
        begins = np.concatenate([[0], begins, [self.block_size - missing, self.block_size]])
        positions = np.arange(self.block_size) - np.repeat(begins[:-1], np.diff(begins))
        counted = {"num_tokens": np.array(stop - start)} if missing else {}
        return {"input_ids": tokens, "labels": labels, "position_ids": positions, **counted}


class SeparateDocuments:
    """One document per sample, truncated at block_size; the collator pads them. `limit`: use the first documents only,
    at most this many."""

    def __init__(self, documents: Documents, block_size: int, limit: int | None = None):
        lengths = documents.lengths[:limit]
        self.documents = documents
        self.block_size = block_size
        self.lengths = self.sort_key = np.minimum(lengths, block_size)
        num_tokens = int(self.lengths.sum())
        self.stats = DatasetStats(
            documents=len(lengths),
            tokens=int(lengths.sum()),
            samples=len(lengths),
            trained=int((self.lengths - 1).sum()),
            truncated=int(lengths.sum()) - num_tokens,
            padding=1 - num_tokens / (len(lengths) * int(self.lengths.max())),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        start = int(self.documents.offsets[index])
        tokens = self.documents.tokens(start, start + int(self.lengths[index]))
        return {"input_ids": tokens, "labels": tokens.copy()}


class TokenizedDataset:
    """One sample per record, unpadded. `table`: columns of token ids, `truncated` (the tokens cut from each row), and
    perhaps `label`. `columns`: those of a sample: input_ids, labels (the target); for multiple choice `sizes`, tokens
    of each choice; for words `tags`, the tag of each, and `starts`, its first token's place: -1 if it was cut off,
    or has none."""

    def __init__(self, table: "Dataset", columns: tuple[str, ...]):
        self.columns = {name: Documents(table, name) for name in columns}
        numbers = table.with_format("numpy")
        self.labels = numbers["label"][:] if "label" in table.column_names else np.zeros(0)
        counted = [self.columns[name].lengths for name in ("input_ids", "labels") if name in columns]
        # Updates group by the length of sources alone. Grouped by targets too, some updates would have short targets
        # only, and each token of these would weigh more, since the loss is a mean over tokens.
        self.lengths = counted[0]
        self.sort_key = counted[0] if len(counted) == 1 else counted[0] * (1 + counted[1].max()) + counted[1]
        if "sizes" in columns:
            sizes = [self.columns["sizes"].row(index) for index in range(len(table))]
            self.lengths = self.sort_key = np.array([row.max() * len(row) for row in sizes])  # lengths with padding
        if "tags" in columns:
            tags, starts = (self.columns[name].tokens(0, self.columns[name].num_tokens) for name in ("tags", "starts"))
            self.labels = tags[starts >= 0]
        truncated = int(np.sum(numbers["truncated"][:]))
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
        return {**sample, "label": self.labels[index]} if len(self.labels) and "tags" not in sample else sample

    @property
    def widths(self) -> np.ndarray:
        """Return (samples, 1 or 2) tokens of each row: of the input, and of the target where there is one."""
        return np.stack(
            [self.columns[name].lengths for name in ("input_ids", "labels") if name in self.columns], axis=1
        )


@dataclass(kw_only=True)
class TaskData:
    """The samples that a task trains on and those held out, the tokenizer that made them, and notes for the log.
    `train, validation`: None where there are none. `sources`: of a mixture, the held-out samples of each source by its
    name."""

    train: SampleSet | None = None
    validation: SampleSet | None = None
    tokenizer: PreTrainedTokenizerBase
    notes: list[str] = field(default_factory=list)
    order: "Order | None" = None  # the order of the training samples, if they have one already
    samples_per_epoch: int = 0  # training samples of one pass over the data; by default all
    passes: list[float] = field(default_factory=list)  # in a mixture, how often an epoch reads each source
    sources: dict[str, SampleSet] = field(default_factory=dict)
    prompts: "Prompts | None" = None  # predict_file's prompts, if there is no other part

    def __post_init__(self) -> None:
        self.samples_per_epoch = self.samples_per_epoch or len(self.train or ())

    @property
    def trained(self) -> SampleSet:
        """Return the training samples of a launch that trains."""
        assert self.train is not None, "it trains"
        return self.train

    @property
    def parts(self) -> dict[str, SampleSet]:
        """Return the held-out samples: by the name of the source in a mixture, else under ""."""
        return self.sources or ({"": self.validation} if self.validation else {})

    @property
    def num_held_out(self) -> int:
        return len(self.validation or ())

    def describe(self) -> list[str | list[tuple[str, ...]]]:
        """Return lines and tables for the log."""
        return [stats_rows(*(part.stats if part else None for part in (self.train, self.validation, self.prompts)))]


@dataclass(kw_only=True)
class TextData(TaskData):
    """The data of the causal task. `report`: a table of the data; by default the statistics of both parts."""

    block_size: int
    shown: list[str] = field(default_factory=list)  # a training sample as text
    is_chat: bool = False
    kind: str = ""  # how text became samples
    report: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def longest(self) -> dict[str, int]:
        """Return the maximum number of tokens of a training sample, by column."""
        return {"input_ids": self.block_size}

    def describe(self) -> list[str | list[tuple[str, ...]]]:
        return [f"data      {self.kind}", *([self.report] if self.report else super().describe())]
