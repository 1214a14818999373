"""The part of a parameter that a rank holds, and the places of its elements in the whole parameter."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share each layer, and the place of this one among them."""

    group: Any  # torch.distributed.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Cut:
    """A share: of dimension `dim` of a parameter of shape `shape`, the indices within `ranges`."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Elements of the share."""
        width = sum(stop - start for start, stop in self.ranges)
        return math.prod(self.shape) // self.shape[self.dim] * width

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Copy this rank's share of a whole parameter."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def put(self, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Write the share, in any shape, to its place in the whole parameter."""
        width, at = sum(stop - start for start, stop in self.ranges), 0
        share = share.view(*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(share.narrow(self.dim, at, stop - start))
            at += stop - start

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (first elements in the flattened whole, lengths) of what is contiguous there and in the flattened
        share. Both are in the same order: the share's elements lie in it one run after the other."""
        inner = math.prod(self.shape[self.dim + 1 :])
        starts, stops = (np.array(edge, dtype=np.int64) for edge in zip(*self.ranges))
        rows = np.arange(math.prod(self.shape[: self.dim]), dtype=np.int64)[:, None] * self.shape[self.dim]
        return ((rows + starts) * inner).ravel(), np.tile((stops - starts) * inner, len(rows))


def cut_for(shape: Sequence[int], dim: int, rank: int, size: int, parts: int = 1) -> Cut:
    """The share of rank `rank` of `size`. `parts`: matrices side by side along `dim`, each of which is cut."""
    width = shape[dim] // parts
    inside = width * rank // size, width * (rank + 1) // size
    ranges = tuple((part * width + inside[0], part * width + inside[1]) for part in range(parts))
    return Cut(tuple(shape), dim, ranges)


def cut_parameter(parameter: torch.nn.Parameter, cut: Cut) -> None:
    """Keep a share of a parameter; what is left of it remembers the cut."""
    parameter.data = cut.of(parameter.data)
    # tensor_model_parallel is DeepSpeed's mark: its norm counts what is not marked on one rank only.
    vars(parameter).update(cut=cut, tensor_model_parallel=True)


def shard_rows(count: int, rank: int, size: int) -> tuple[int, int]:
    """[first, last + 1) of `count` rows, as torch.chunk cuts them: later ranks have fewer, or none."""
    rows = -(-count // size)
    return min(rank * rows, count), min((rank + 1) * rows, count)


def keep_rows(model: torch.nn.Module, rank: int, size: int) -> None:
    """Keep this rank's rows of all parameters."""
    for parameter in model.parameters():
        vars(parameter)["ds_shape"] = parameter.shape  # where peft looks for the whole shape of GPT-2's layers
        cut_parameter(parameter, Cut(tuple(parameter.shape), 0, (shard_rows(parameter.shape[0], rank, size),)))


@torch.no_grad()
def join_shares(share: torch.Tensor, cut: Cut, tensor: TensorGroup) -> torch.Tensor:
    """The whole parameter of which this rank has a share. All ranks of the group call it together, and get it."""
    cuts = [cut_for(cut.shape, cut.dim, rank, tensor.size, len(cut.ranges)) for rank in range(tensor.size)]
    own = share.new_zeros(max(each.numel for each in cuts))
    own[: share.numel()] = share.reshape(-1)
    parts = [torch.empty_like(own) for _ in cuts]
    torch.distributed.all_gather(parts, own, group=tensor.group)
    whole = share.new_empty(cut.shape)
    for each, part in zip(cuts, parts):
        each.put(whole, part[: each.numel])
    return whole
