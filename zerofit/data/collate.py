"""From samples to the tensors of a micro-batch, and batches by tokens.

A collator is called with (sample, index) pairs. The index FILLER marks a place without a sample: its row only fills
the shape; it is not trained on and not counted.

Batches by tokens: where rows are short, r times as many of them take the place of rows of full length.

An epoch is a permutation drawn from (seed, epoch), cut into windows of some 16 updates. A window's samples are sorted
by length and cut into updates of r x G rows: G is the global batch in rows of full length, and r as large as fits, so
that r rows of the update's longest are no longer than a full row. The updates are put into random order. The rows that
fill no update, at a random place among the sorted ones, wait for the next window or the end of the epoch.

A micro-batch of m full rows becomes one of r x m rows, which takes no more memory: lengths count as GPUs pad them
(`round_up`). So an update depends on the lengths, the seed and G alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from zerofit.data.order import FILLER
from zerofit.data.pack import Sample, SampleSet
from zerofit.model.configuration import usable_positions
from zerofit.model.loss import IGNORE
from zerofit.recipe.errors import UserError

IndexedSamples = list[tuple[Sample, int]]
Lengths = TypeVar("Lengths", int, np.ndarray)
GPU_MULTIPLE = 64  # lengths of long rows on GPUs are multiples of it; a power of two
SORTED_UPDATES = 16  # updates whose samples are sorted together


@dataclass
class Batch:
    """A micro-batch: the inputs of the model, and its counts."""

    inputs: Mapping[str, torch.Tensor | int]  # tensors (B, T); for flattened rows also the lengths of documents
    num_targets: float  # tokens or examples over which the loss is summed; with class weights, the sum of the weights
    num_tokens: int  # tokens that the model reads and predicts, without padding
    num_positions: int  # tokens and padding
    indices: list[int]  # the samples' numbers in the data
    labels: torch.Tensor | None = None  # only for losses outside the model: (B,), words (B, T), pairs (B, 2)
    packed: bool | None = None  # True: some row has several documents; None: unknown

    def tensor(self, name: str) -> torch.Tensor:
        """Return an input that is a tensor."""
        value = self.inputs[name]
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def samples(self) -> list[int]:
        """Return the indices of the samples, without FILLER."""
        return [index for index in self.indices if index != FILLER]

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        inputs = {name: value if isinstance(value, int) else change(value) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, labels=None if self.labels is None else change(self.labels))


@dataclass
class CausalCollator:
    """Stack blocks, or pad rows of different lengths on the right. `flatten`: concatenate packed rows to (1, B * T)
    and pass the ends of documents to flash attention, which would otherwise compute them from position_ids in each
    layer, and for one row only."""

    pad_id: int  # the token that pads rows; its label is ignored and attention does not see it
    flatten: bool = False
    multiple: int = 1  # widths are rounded up to a multiple of this, or of less (round_up)
    marks_padding: bool = False  # packed rows come with `is_token`, for a model with experts

    def __call__(self, samples: IndexedSamples) -> Batch:
        rows = [sample for sample, _ in samples]
        indices = [index for _, index in samples]
        lengths = [len(row["input_ids"]) for row in rows]
        packed = "position_ids" in rows[0]
        names = {
            "input_ids": self.pad_id,
            "labels": IGNORE,
            "next_tokens": IGNORE,
            "position_ids": 0,
            "attention_mask": 0,
            "documents": 0,
        }
        same_length = len(set(lengths)) == 1
        width = lengths[0] if same_length else round_up(max(lengths), self.multiple)
        inputs = {name: stack(rows, name, width, filler) for name, filler in names.items() if name in rows[0]}
        targets = inputs["next_tokens"] if "next_tokens" in inputs else inputs["labels"]
        targets[~is_sample(indices)] = IGNORE
        if not packed and not same_length:
            inputs["attention_mask"] = padding_mask(lengths, width)
        if "documents" in inputs:
            inputs["attention_mask"] = document_mask(inputs.pop("documents"))
        first = 1 if "labels" in inputs else 0  # nothing predicts the first label
        num_targets = int((targets[:, first:] != IGNORE).sum())
        counts = [int(row.get("num_tokens", len(row["input_ids"]))) for row in rows]
        num_tokens = total_length(counts, indices)
        if self.marks_padding and packed:
            inputs["is_token"] = padding_mask(counts, width)
        ends: dict[str, torch.Tensor | int] = {}  # the documents' ends, named as transformers' FlashAttentionKwargs
        if self.flatten and packed:
            if "labels" in inputs:  # a row's last token must not be trained on the next row's first
                targets[:, 0] = IGNORE
            inputs = {name: tensor.flatten(0, 1)[None] for name, tensor in inputs.items()}
            starts = torch.nonzero(inputs["position_ids"][0] == 0)[:, 0]
            bounds = torch.cat([starts, torch.tensor([inputs["position_ids"].shape[1]])]).int()
            longest = int(bounds.diff().max())  # an int, so that no layer waits for the device
            ends = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        several = packed and bool((inputs["position_ids"].diff() != 1).any())
        return Batch({**inputs, **ends}, num_targets, num_tokens, len(rows) * width, indices, packed=several)


@dataclass
class ExampleCollator:
    """Pad rows on the right and stack their labels: one label per sample, a class (int64), a number (float32), or
    0 or 1 for each class (float32): then labels are (B, classes).

    Samples with `tags` have a class per word, which stands at the word's first token: their labels are (B, T).
    Samples with `sizes` hold several rows, one per choice. Their inputs are (B, C, T): C is the largest number of
    choices, a missing choice is a row of one token.
    """

    fillers: dict[str, int]  # {column of a sample that the model reads: value that pads it}
    width: int | None = None  # pad every batch to this many tokens; None: to its longest row
    multiple: int = 1  # widths are rounded up to a multiple of this
    class_weights: list[float] | None = None  # the weight of a target (an example or a word) of each class; None: 1

    def __call__(self, samples: IndexedSamples) -> Batch:
        indices = [index for _, index in samples]
        sizes = [sample.get("sizes", [len(sample["input_ids"])]) for sample, _ in samples]
        rows = []
        max_choices = max(map(len, sizes))
        for (sample, _), lengths in zip(samples, sizes):
            parts = {name: np.split(sample[name], np.cumsum(lengths)[:-1]) for name in self.fillers}
            rows += [{name: parts[name][place] for name in parts} for place in range(len(lengths))]
            missing = {name: np.array([filler]) for name, filler in self.fillers.items()}
            rows += [missing] * (max_choices - len(lengths))
        lengths = [len(row["input_ids"]) for row in rows]
        width = self.width or round_up(max(lengths), self.multiple)
        inputs = {name: stack(rows, name, width, filler) for name, filler in self.fillers.items()}
        inputs["attention_mask"] = padding_mask(lengths, width)
        if "sizes" in samples[0][0]:
            inputs = {name: tensor.view(len(samples), max_choices, -1) for name, tensor in inputs.items()}
        if "tags" in samples[0][0]:  # each word's tag stands at its first token
            labels = torch.full((len(samples), width), IGNORE)
            for row, (sample, _) in zip(labels, samples):
                is_read = sample["starts"] >= 0
                row[sample["starts"][is_read]] = torch.from_numpy(sample["tags"][is_read])
        else:
            labels = torch.from_numpy(np.stack([sample["label"] for sample, _ in samples]))
        labels[~is_sample(indices)] = IGNORE if labels.dtype == torch.int64 else torch.nan
        tokens = total_length([len(sample["input_ids"]) for sample, _ in samples], indices)  # missing choices: none
        targets = labels[:, 0] if labels.is_floating_point() and labels.dim() == 2 else labels
        targets = targets[(targets != IGNORE) & ~targets.isnan()]
        num_targets: float = len(targets)
        if self.class_weights is not None:
            num_targets = sum(self.class_weights[label] for label in targets.tolist())
        return Batch(inputs, num_targets, tokens, len(rows) * width, indices, labels)


@dataclass
class PairCollator:
    """Pad sources and targets on the right; a target's padding is not trained on. `widths`: pad every batch to these
    numbers of source and target tokens; None: to its longest rows."""

    pad_id: int  # fills sources
    widths: tuple[int, int] | None = None
    multiple: int = 1  # widths are rounded up to a multiple of this

    def __call__(self, samples: IndexedSamples) -> Batch:
        rows = [sample for sample, _ in samples]
        indices = [index for _, index in samples]
        sources, targets = ([len(row[name]) for row in rows] for name in ("input_ids", "labels"))
        widths = self.widths or tuple(round_up(max(lengths), self.multiple) for lengths in (sources, targets))
        inputs = {
            "input_ids": stack(rows, "input_ids", widths[0], self.pad_id),
            "attention_mask": padding_mask(sources, widths[0]),
            "labels": stack(rows, "labels", widths[1], IGNORE),
        }
        inputs["labels"][~is_sample(indices)] = IGNORE
        tokens = total_length(sources, indices) + total_length(targets, indices)
        return Batch(inputs, int((inputs["labels"] != IGNORE).sum()), tokens, len(rows) * sum(widths), indices)


@dataclass
class PreferenceCollator:
    """Two rows a pair, the chosen answer and then the rejected one, padded on the right; a batch's targets are pairs.
    `pad_id`: the token that pads rows. `multiple`: widths are rounded up to a multiple of this."""

    pad_id: int
    multiple: int = 1

    def __call__(self, samples: IndexedSamples) -> Batch:
        indices = [index for _, index in samples]
        rows = [
            {"input_ids": sample[ids], "labels": sample[labels]}
            for sample, _ in samples
            for ids, labels in (("input_ids", "labels"), ("rejected_ids", "rejected_labels"))
        ]
        lengths = [len(row["input_ids"]) for row in rows]
        width = round_up(max(lengths), self.multiple)
        inputs = {
            "input_ids": stack(rows, "input_ids", width, self.pad_id),
            "attention_mask": padding_mask(lengths, width),
            "labels": stack(rows, "labels", width, IGNORE),
        }
        reference = torch.from_numpy(np.stack([sample["reference"] for sample, _ in samples]))  # (B, 2)
        reference[~is_sample(indices)] = torch.nan
        tokens = total_length([chosen + rejected for chosen, rejected in zip(lengths[::2], lengths[1::2])], indices)
        return Batch(inputs, int(is_sample(indices).sum()), tokens, len(rows) * width, indices, reference)


@dataclass
class PromptCollator:
    """Pad the inputs of generation: prompts of a decoder on the left, sources of an encoder on the right."""

    pad_id: int  # pads rows; attention does not see it
    left: bool  # pad on the left
    multiple: int = 1  # widths are rounded up to a multiple of this

    def __call__(self, samples: IndexedSamples) -> Batch:
        rows = [sample for sample, _ in samples]
        indices = [index for _, index in samples]
        lengths = [len(row["input_ids"]) for row in rows]
        width = round_up(max(lengths), self.multiple)
        ids = stack(rows, "input_ids", width, self.pad_id)
        is_token = padding_mask(lengths, width)
        if self.left:
            moved = (torch.arange(width)[None] + torch.tensor(lengths)[:, None]) % width
            ids = ids.gather(1, moved)
            is_token = is_token.gather(1, moved)
        return Batch(
            {"input_ids": ids, "attention_mask": is_token}, 0, total_length(lengths, indices), ids.numel(), indices
        )


def multiple_for(device: torch.device, config: Any) -> int:
    """Return the multiple for row lengths on a device: 1, or a power of two that divides the model's positions."""
    if device.type == "cpu":
        return 1
    return math.gcd(GPU_MULTIPLE, usable_positions(config) or GPU_MULTIPLE)


def round_up(length: Lengths, multiple: int) -> Lengths:
    """Round a length, or each length of an array, up: to a multiple of `multiple` from 512 tokens on, below to a
    smaller power of two, at most an eighth of the length or 8, which is what the matrix units of GPUs ask for.

    An epoch then has a few dozen widths, and not hundreds: a GPU's attention and torch.compile make a plan or a graph
    for each (docs/measurements/counts.md). Short rows are not padded to 64.
    """
    step = np.minimum(multiple, 8 * (1 + (length >= 128) + 2 * (length >= 256) + 4 * (length >= 512)))
    rounded = -(-length // step) * step
    return rounded if isinstance(length, np.ndarray) else int(rounded)


def is_sample(indices: list[int]) -> torch.Tensor:
    """Return (B,) whether a row is a sample, not FILLER."""
    return torch.tensor(indices) != FILLER


def total_length(lengths: list[int], indices: list[int]) -> int:
    """Return the sum of the lengths of rows that are samples."""
    return sum(length for length, index in zip(lengths, indices) if index != FILLER)


def padding_mask(lengths: list[int], width: int) -> torch.Tensor:
    """Return (B, width) 1 where a row has a token, 0 where it has padding."""
    return (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()


def document_mask(documents: torch.Tensor) -> torch.Tensor:
    """Return (B, 1, T, T) whether a position attends to another: itself or an earlier one of the same document.
    `documents`: (B, T) the number of each position's document."""
    same_document = documents[:, None, :, None] == documents[:, None, None, :]
    return same_document & torch.ones(same_document.shape[-2:], dtype=torch.bool, device=same_document.device).tril()


def stack(rows: list[Sample], name: str, width: int, filler: int) -> torch.Tensor:
    """Return (B, width) one column of the rows, padded on the right; (B, width, K) of K values each."""
    return torch.from_numpy(np.stack([_padded(row[name], width, filler) for row in rows]))


def _padded(values: np.ndarray, width: int, filler: int) -> np.ndarray:
    if len(values) == width:
        return values
    return np.pad(values, [(0, width - len(values)), *[(0, 0)] * (values.ndim - 1)], constant_values=filler)


class _Epoch(NamedTuple):
    samples: np.ndarray  # (samples,) in the order in which they are trained on
    ends: np.ndarray  # (updates,) where each ends in it


class TokenUpdates:
    """The order of a run with tokens_per_batch, and the samples of each of its updates. `widths`: (samples, 1) tokens
    of each row; (samples, 2) of source and target, which are padded by themselves. `row_tokens`: of a full row; no row
    has more. `full_rows`: G, of an update."""

    def __init__(self, widths: np.ndarray, row_tokens: int, full_rows: int, seed: int):
        self.widths = widths
        self.row_tokens = row_tokens
        self.full_rows = full_rows
        self.seed = seed
        self._padded = round_up(widths, GPU_MULTIPLE)
        self._laid_out: dict[int, _Epoch] = {}  # the latest two epochs
        self._updates_before = [0]  # number of updates before each epoch

    @property
    def num_samples(self) -> int:
        return len(self.widths)

    def consumed(self, updates: int) -> int:
        """Return the number of samples in the first `updates` updates."""
        while self._updates_before[-1] < updates:
            self._epoch(len(self._updates_before) - 1)
        epoch = int(np.searchsorted(self._updates_before, updates, side="right")) - 1
        done = updates - self._updates_before[epoch]
        return epoch * self.num_samples + (int(self._epoch(epoch).ends[done - 1]) if done else 0)

    def num_updates(self, samples: int) -> int:
        """Return the number of updates that consume this number of samples; the last may be incomplete."""
        epochs, remaining = divmod(samples, self.num_samples)
        for epoch in range(len(self._updates_before) - 1, epochs):
            self._epoch(epoch)
        begun = int(np.searchsorted(self._epoch(epochs).ends, remaining)) + 1 if remaining else 0
        return self._updates_before[epochs] + begun

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the sample indices at places [start, stop) of the run, of one update."""
        epoch, offset = divmod(start, self.num_samples)
        return self._epoch(epoch).samples[offset : offset + stop - start]

    def describe(self) -> str:
        """Describe the updates of the first epoch, for the log."""
        sizes = np.diff(self._epoch(0).ends, prepend=0)
        return (
            f"batch     {sizes.min():,} to {sizes.max():,} samples of similar length, at most "
            f"{self.row_tokens * self.full_rows:,} tokens; {len(sizes):,} updates an epoch"
        )

    def _epoch(self, number: int) -> _Epoch:
        if number in self._laid_out:
            return self._laid_out[number]
        rng = np.random.default_rng([self.seed, number])
        drawn = rng.permutation(self.num_samples)
        updates = []
        waiting = np.zeros(0, dtype=np.int64)
        size = max(1, int(SORTED_UPDATES * self.full_rows * self.row_tokens / self.widths.sum(axis=1).mean()))
        for start in range(0, self.num_samples, size):
            pool = np.concatenate([waiting, drawn[start : start + size]])
            longest_first = pool[np.lexsort(-self.widths[pool].T[::-1])]  # by the first column, then the next
            from_above = self._cut(longest_first)
            kept_rows = from_above[: rng.integers(len(from_above) + 1)]
            remaining = longest_first[sum(map(len, kept_rows)) :]
            kept_rows += [rows[::-1] for rows in self._cut(remaining[::-1])]
            waiting = remaining[: len(longest_first) - sum(map(len, kept_rows))]
            updates += [kept_rows[place] for place in rng.permutation(len(kept_rows))]
        times = -(-len(waiting) // self.full_rows)
        if times > 1 and int(self._padded[waiting].max(axis=0).sum()) * times > self.row_tokens:
            num_complete = (times - 1) * self.full_rows  # the rows that are left at the end do not fit one update
            updates += [waiting[-num_complete:], waiting[:-num_complete]]
        elif times:
            updates.append(waiting)
        laid_out = _Epoch(np.concatenate(updates), np.cumsum([len(rows) for rows in updates]))
        self._laid_out = {old: self._laid_out[old] for old in sorted(self._laid_out)[-1:]} | {number: laid_out}
        if number == len(self._updates_before) - 1:
            self._updates_before.append(self._updates_before[-1] + len(updates))
        return laid_out

    def _cut(self, samples: np.ndarray) -> list[np.ndarray]:
        """Cut sorted samples into updates, in their order; samples that fill no update are left out."""
        widths = self._padded[samples]
        updates = []
        start = 0
        while start + self.full_rows <= len(samples):
            max_rows = self.full_rows * max(1, self.row_tokens // max(1, int(widths[start, 0])))
            longest = np.maximum.accumulate(widths[start : start + max_rows], axis=0).sum(axis=1)  # (rows,)
            needed = longest[self.full_rows - 1 :: self.full_rows]  # widths of an update of 1, 2, ... times G rows
            fits = needed * np.arange(1, len(needed) + 1) <= self.row_tokens
            times = max(1, int(fits.sum()))
            if times == len(fits) and len(longest) < max_rows:
                break  # all remaining samples fit: with more samples the update would be larger
            updates.append(samples[start : start + times * self.full_rows])
            start += times * self.full_rows
        return updates


def updates_by_tokens(
    samples: SampleSet | None, row_tokens: int | None, full_rows: int | None, seed: int
) -> TokenUpdates | None:
    """Return the updates that tokens_per_batch makes of the training samples; None without that option. Raises
    UserError: all rows have the same length. `row_tokens`: of a full row. `full_rows`: of an update."""
    if samples is None or row_tokens is None or full_rows is None:
        return None
    if samples.lengths is None:
        raise UserError("tokens_per_batch: all rows have the same length here. Set global_batch_size")
    widths = getattr(samples, "widths", samples.lengths[:, None])
    return TokenUpdates(widths, row_tokens, full_rows, seed)
