"""From samples to the tensors of a micro-batch."""

from dataclasses import dataclass

import numpy as np
import torch

from train.data.pack import Sample
from train.model.loss import IGNORE

PAD_TO = 8  # lengths are rounded up to a multiple that tensor cores like


@dataclass
class Batch:
    """A micro-batch: the model's inputs, how many tokens it trains on, and how many it holds beside padding."""

    inputs: dict[str, torch.Tensor]  # each (B, T)
    num_targets: int
    num_tokens: int

    def to(self, device: torch.device) -> "Batch":
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.num_targets, self.num_tokens)

    def pin_memory(self) -> "Batch":
        return Batch({k: v.pin_memory() for k, v in self.inputs.items()}, self.num_targets, self.num_tokens)


@dataclass
class CausalCollator:
    """Stack blocks, or pad rows of different lengths on the right.

    Args:
        pad_id: the token that fills rows; its label is ignored and attention does not see it.
        flatten: lay the micro-batch out as one row (1, B * T). FlashAttention finds document boundaries in
            position_ids only in that form.
    """

    pad_id: int
    flatten: bool = False

    def __call__(self, samples: list[tuple[Sample, bool]]) -> Batch:
        """`samples` are (sample, counts): one that does not count fills a place, and nothing is trained on it."""
        rows = [sample for sample, _ in samples]
        lengths = [len(row["input_ids"]) for row in rows]
        packed = "position_ids" in rows[0]
        width = max(lengths) if len(set(lengths)) == 1 else -(-max(lengths) // PAD_TO) * PAD_TO
        inputs = {
            name: torch.from_numpy(np.stack([_padded(row[name], width, filler) for row in rows]))
            for name, filler in (("input_ids", self.pad_id), ("labels", IGNORE), ("position_ids", 0))
            if name in rows[0]
        }
        counts = torch.tensor([counted for _, counted in samples])
        inputs["labels"][~counts] = IGNORE
        if not packed and len(set(lengths)) > 1:
            inputs["attention_mask"] = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
        num_targets = int((inputs["labels"][:, 1:] != IGNORE).sum())
        num_tokens = sum(length for length, counted in zip(lengths, counts.tolist()) if counted)
        if self.flatten and packed:
            inputs["labels"][:, 0] = IGNORE  # else the last token of a row would be trained on the next row's first
            inputs = {name: tensor.reshape(1, -1) for name, tensor in inputs.items()}
        return Batch(inputs, num_targets, num_tokens)


def _padded(values: np.ndarray, width: int, filler: int) -> np.ndarray:
    return np.pad(values, (0, width - len(values)), constant_values=filler) if len(values) < width else values
