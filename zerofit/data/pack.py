"""From documents to samples: packed blocks with or without document boundaries, or one padded row per document.

A conversation is never split over two blocks (zerofit/data/chat/prepare.py tokenizes conversations and makes labels).
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from zerofit.data.token_row import Documents
from zerofit.model.loss import IGNORE

if TYPE_CHECKING:
    from datasets import Dataset

# input_ids, labels, and position_ids if packed; each (length,) int64. num_tokens if some of them are filling.
Sample = dict[str, np.ndarray]


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of the samples of a part. Counts are in tokens unless their names say otherwise."""

    documents: int
    tokens: int
    samples: int
    truncated: int  # tokens cut away
    trained: int | None = None  # tokens that are predicted, and so trained on; None for classification
    padding: float | None = None  # largest fraction of positions that are padding; None if it depends on the batches

    @property
    def mean_length(self) -> int:
        """Mean number of tokens of a sample, without padding."""
        return round((self.tokens - self.truncated) / self.samples)


def stats_rows(
    train: DatasetStats | None, validation: DatasetStats | None, prompts: DatasetStats | None = None
) -> list[tuple[str, ...]]:
    """The table of the data, shown before the run: one row per number, one column per part.

    Args:
        prompts: those of predict_file, which has no other part.
    """
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
    """Samples by index. Every rank can read every sample.

    With grouping by length, `lengths` decides which samples form an update, and `sort_key` which samples of an update
    form a micro-batch. Both are None if all samples have the same length.
    """

    stats: DatasetStats
    lengths: np.ndarray | None
    sort_key: np.ndarray | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class PackedBlocks:
    """Blocks of exactly block_size tokens, cut from the concatenated documents.

    With `boundaries`, position_ids restart at each document (from which transformers' attention separates documents),
    the first token of a document is not predicted from the document before it, and the last block is filled up with
    masked tokens. Without, the blocks are those of `group_texts`: one text, whose remainder is dropped.

    Args:
        limit: use the first blocks only, at most this many.
    """

    def __init__(self, documents: Documents, block_size: int, boundaries: bool, filler: int, limit: int | None = None):
        self.documents, self.block_size, self.boundaries, self.filler = documents, block_size, boundaries, filler
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
    """One document per sample, truncated at block_size; the collator pads them.

    Args:
        limit: use the first documents only, at most this many.
    """

    def __init__(self, documents: Documents, block_size: int, limit: int | None = None):
        lengths = documents.lengths[:limit]
        self.documents, self.block_size = documents, block_size
        self.lengths = self.sort_key = np.minimum(lengths, block_size)
        kept = int(self.lengths.sum())
        self.stats = DatasetStats(
            documents=len(lengths),
            tokens=int(lengths.sum()),
            samples=len(lengths),
            trained=int((self.lengths - 1).sum()),
            truncated=int(lengths.sum()) - kept,
            padding=1 - kept / (len(lengths) * int(self.lengths.max())),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        start = int(self.documents.offsets[index])
        tokens = self.documents.tokens(start, start + int(self.lengths[index]))
        return {"input_ids": tokens, "labels": tokens.copy()}


class Conversations:
    """Conversations with their labels, one per sample; the collator pads them.

    Args:
        table: input_ids and labels, both empty for a skipped conversation; truncated, the number of tokens cut from
            each; trained, the number of labels that are trained on.
        scores: how difficult each is, where a column of the records says so.
    """

    def __init__(self, table: "Dataset", scores: np.ndarray | None = None):
        self.ids, self.labels = Documents(table), Documents(table, "labels")
        self.rows = np.flatnonzero(self.ids.lengths)
        self.lengths = self.sort_key = self.ids.lengths[self.rows]
        self.scores = scores if scores is None else scores[self.rows]
        numbers = table.select_columns(["truncated", "trained"]).with_format("numpy")
        self.truncated, self.trained = (int(numbers[name][:].sum()) for name in ("truncated", "trained"))
        self.stats = self.stats_of(len(self), len(self) * int(self.lengths.max()))

    def stats_of(self, samples: int, positions: int) -> DatasetStats:
        """The statistics for this number of samples and of positions in all samples together."""
        kept = self.ids.num_tokens
        return DatasetStats(
            documents=len(self.ids),
            tokens=kept + self.truncated,
            samples=samples,
            truncated=self.truncated,
            trained=self.trained,
            padding=1 - kept / positions,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = int(self.rows[index])
        return {"input_ids": self.ids.row(row), "labels": self.labels.row(row)}


class PackedConversations:
    """Blocks of block_size tokens, each with as many complete conversations as fit, filled up with masked tokens.

    None is split: the second half of an answer teaches nothing without its question. position_ids restart at each
    conversation and at the filling, which keeps attention inside each.
    """

    def __init__(self, conversations: Conversations, block_size: int, filler: int):
        self.conversations, self.block_size, self.filler = conversations, block_size, filler
        self.lengths = self.sort_key = None
        self.blocks = best_fit(conversations.lengths, block_size)
        self.stats = conversations.stats_of(len(self.blocks), len(self.blocks) * block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Sample:
        samples = [self.conversations[member] for member in self.blocks[index]]
        lengths = [len(sample["input_ids"]) for sample in samples]
        missing = self.block_size - sum(lengths)
        return {
            "input_ids": np.concatenate([*(sample["input_ids"] for sample in samples), np.full(missing, self.filler)]),
            "labels": np.concatenate([*(sample["labels"] for sample in samples), np.full(missing, IGNORE)]),
            "position_ids": np.concatenate([np.arange(length) for length in (*lengths, missing)]),
            "num_tokens": np.array(sum(lengths)),
        }


def best_fit(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Pack by best fit decreasing: the indices in each block, no block longer than `size`.

    Each length in turn, the longest first, goes into the block that it fills up best. That takes at most 11/9 of the
    fewest blocks possible, plus four (Johnson et al. 1974, doi:10.1137/0203025), and is the same every time.
    """
    blocks: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens of room: the blocks that have as many
    rooms: list[int] = []  # the keys of with_room, sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            block = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            room, block = size, len(blocks)
            blocks.append([])
        blocks[block].append(index)
        left = room - length
        if left and left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        if left:
            with_room[left].append(block)
    return blocks


@dataclass
class TextData:
    """Samples of both parts, the tokenizer that made them, and notes for the log.

    Args:
        train: None without training.
        kind: how text became samples.
        order: the order of the training samples, if they have one already.
        samples_per_epoch: training samples of one pass over the data; by default all.
        report: a table of the data; by default the statistics of both parts.
        prompts: those of predict_file, without any other part.
    """

    train: SampleSet | None
    validation: SampleSet | None
    tokenizer: PreTrainedTokenizerBase
    block_size: int
    notes: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)  # a training sample as text
    is_chat: bool = False
    kind: str = ""
    order: object | None = None
    samples_per_epoch: int = 0
    report: list[tuple[str, ...]] = field(default_factory=list)
    prompts: SampleSet | None = None

    def __post_init__(self):
        self.samples_per_epoch = self.samples_per_epoch or len(self.train or ())
        if not self.report:
            parts = (self.train, self.validation, self.prompts)
            self.report = stats_rows(*(part and part.stats for part in parts))
