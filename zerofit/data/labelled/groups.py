"""Fixed groups of pairs for the contrastive loss: which records lie together, and the tensors of a micro-batch.

A record has an anchor, its positive and perhaps a hard negative, one after another; `sizes` are their lengths.
"""

from dataclasses import dataclass

import numpy as np
import torch

from zerofit.data.collate import Batch, Samples, counted, mask, round_up, stack, total
from zerofit.data.pack import Sample, SampleSet
from zerofit.model.embedding import NEGATIVE, POSITIVE
from zerofit.model.loss import IGNORE


class PairGroups:
    """Groups of `size` records, one sample a group; some have one record less where `size` does not divide all. Which
    records lie together depends on the seed alone, and is the same in each epoch.

    Args:
        records: samples with `sizes`, one record each.
    """

    def __init__(self, records: SampleSet, size: int, seed: int):
        self.records, self.stats = records, records.stats
        places = np.random.default_rng(seed).permutation(len(records))
        self.groups = np.array_split(places, -(-len(records) // size))
        assert records.lengths is not None, "rows differ in length"
        self.lengths = self.sort_key = np.array([records.lengths[group].sum() for group in self.groups])

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> Sample:
        """The columns of its records, joined; `sizes` (records, rows a record)."""
        rows = [self.records[int(place)] for place in self.groups[index]]
        names = rows[0].keys() - {"sizes", "label"}
        joined = {name: np.concatenate([row[name] for row in rows]) for name in names}
        return {**joined, "sizes": np.stack([row["sizes"] for row in rows])}


@dataclass
class GroupCollator:
    """Rows of B groups, padded on the right: inputs (B, N + C, T), a group's N anchors, then its C candidates: the N
    positives, then the N negatives. Labels are what each candidate is to each anchor (B, N, C): IGNORE where it
    reads the same as the anchor's positive, or is missing in a smaller group.

    Args:
        fillers: {column of a sample that the model reads: value that pads it}.
        width: pad every batch to this many tokens; None: to its longest row.
        multiple: widths are rounded up to a multiple of this.
    """

    fillers: dict[str, int]
    width: int | None = None
    multiple: int = 1

    def __call__(self, samples: Samples) -> Batch:
        indices = [index for _, index in samples]
        num_anchors = max(len(sample["sizes"]) for sample, _ in samples)
        missing = {name: np.array([filler]) for name, filler in self.fillers.items()}
        rows, relations = [], []
        for sample, _ in samples:
            of_record = _rows(sample, list(self.fillers))
            columns = [[*column, *[missing] * (num_anchors - len(column))] for column in zip(*of_record)]
            rows += [row for column in columns for row in column]
            relations.append(_relations(columns, len(of_record)))
        lengths = [len(row["input_ids"]) for row in rows]
        width = self.width or round_up(max(lengths), self.multiple)
        inputs = {name: stack(rows, name, width, filler) for name, filler in self.fillers.items()}
        inputs["attention_mask"] = mask(lengths, width)
        inputs = {name: tensor.view(len(samples), -1, width) for name, tensor in inputs.items()}
        labels = torch.from_numpy(np.stack(relations))
        labels[~counted(indices)] = IGNORE
        tokens = total([len(sample["input_ids"]) for sample, _ in samples], indices)
        return Batch(inputs, int((labels == POSITIVE).sum()), tokens, len(rows) * width, indices, labels)


def _rows(sample: Sample, names: list[str]) -> list[list[Sample]]:
    """The rows of each record: [anchor, positive, perhaps a negative]."""
    ends = np.cumsum(sample["sizes"])[:-1]
    parts = {name: np.split(sample[name], ends) for name in names}
    rows = [{name: parts[name][place] for name in names} for place in range(sample["sizes"].size)]
    per_record = sample["sizes"].shape[1]
    return [rows[start : start + per_record] for start in range(0, len(rows), per_record)]


def _relations(columns: list[list[Sample]], num_records: int) -> np.ndarray:
    """(N, C) of one group, whose anchors are the first column."""
    anchors, *others = columns
    texts = [tuple(row["input_ids"]) for column in others for row in column]
    relations = np.full((len(anchors), len(texts)), IGNORE)
    present = np.tile(np.arange(len(anchors)) < num_records, len(others))
    for anchor in range(num_records):
        other = np.array([text != texts[anchor] for text in texts])
        relations[anchor, other & present] = NEGATIVE
        relations[anchor, anchor] = POSITIVE
    return relations
