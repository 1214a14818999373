"""The parameters of the full model, in elements, and their layout over the ranks under ZeRO-1 and 2."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from zerofit.strategy.optimizers import state_bytes

# An NF4 weight with double quantisation: 4 bits and 0.127 bits of scales. Source: Dettmers et al. 2023, QLoRA.
NF4_BYTES = (4 + 0.127) / 8

# Bytes per element to compute a gradient's norm: DeepSpeed casts each gradient to fp64 (runtime/zero/utils.py,
# get_norm_dtype), and so does zerofit/strategy/engines.py on a CPU.
NORM_BYTES = 8

# Adam: two moments in fp32, and under DeepSpeed a copy of the weights in fp32. Source: Rajbhandari et al. 2020, ZeRO.
MOMENTS_BYTES = 8
MASTER_BYTES = 4
AVERAGE_BYTES = 4  # per element of the mean of the weights, with ema_decay

# Temporaries of Adafactor's step per element: the squared gradient, or the update and its negative. Source:
# transformers/optimization.py 5.23, Adafactor.step, where `update` stays alive while the next one is made.
ADAFACTOR_BYTES = 2 * 4

END_GROUPS = "ends"  # stands for a stack's name in the place of an end, such as the embedding
LayerPlace = tuple[str, int]  # (stack, number of the layer)
FLAT_ALIGNMENT = 2  # elements per process, in the flat weights of ZeRO-1 and 2 (nccl_start_alignment_factor)


@dataclass(frozen=True)
class Weight:
    """A parameter of the model, or a rank's part of it."""

    name: str
    size: int  # in elements
    trained: bool = True
    group: int = 0  # number of its parameter group in the optimizer
    rows: int = 1  # size of its first dimension
    shape: tuple[int, ...] = ()  # shape of the full parameter
    takes_muon: bool = False
    is_averaged: bool = False  # True if ema_decay keeps a mean of it

    @property
    def moments_bytes(self) -> int:
        """The bytes per element of moments and mean, under optimizers that can update a shard of a parameter."""
        return (MOMENTS_BYTES // 2 if self.takes_muon else MOMENTS_BYTES) + (AVERAGE_BYTES if self.is_averaged else 0)

    @property
    def sides(self) -> tuple[int, int, int]:
        """(number of matrices, shorter side, longer side): each expert is a separate matrix."""
        *experts, rows, columns = self.shape
        return math.prod(experts), min(rows, columns), max(rows, columns)

    def padded(self, world_size: int) -> int:
        """Return the number of elements, with rows padded so that each rank has the same number."""
        return -(-self.rows // world_size) * world_size * (self.size // self.rows)


@dataclass(frozen=True)
class Weights:
    """All parameters, in the model's order."""

    all: tuple[Weight, ...]
    stacks: tuple[str, ...] = ()  # names of the stacks of layers: weights of layer 3 are called STACK.3.SOMETHING
    head: str = ""  # name of the output embeddings' weight; empty: it is tied, or there is none
    # {name: 0 for the embedding, 1 for final norm and head} where FSDP2 gathers these as separate groups
    ends: Mapping[str, int] = field(default_factory=dict)
    quantised: int = 0  # elements of frozen matrices that are stored in 4 bits

    @cached_property
    def sizes(self) -> dict[str, int]:
        """{name: elements} of the trained weights."""
        return {weight.name: weight.size for weight in self.all if weight.trained}

    @property
    def trained(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def frozen(self) -> int:
        return sum(weight.size for weight in self.all if not weight.trained)

    def state_bytes(self, optim: str) -> int:
        """Return the bytes that an optimizer keeps for all trained parameters, if they are not sharded."""
        fallback = "adamw" if optim == "muon" else optim
        return sum(
            state_bytes(optim if weight.takes_muon else fallback, weight.shape or (weight.size,))
            + (AVERAGE_BYTES * weight.size if weight.is_averaged else 0)
            for weight in self.all
            if weight.trained
        )

    @property
    def matrices(self) -> list[Weight]:
        """The weights that Muon updates."""
        return [weight for weight in self.all if weight.trained and weight.takes_muon]

    def muon_workspace(self, half: bool, is_split: bool) -> int:
        """Return the temporary bytes of Muon's step for the largest matrix, without gradients: the input and output of
        an iteration, two products of its shorter side, and the matrix itself if it is not a view of the gradient.
        `is_split`: all ranks send their parts of it, and receive as much."""
        copies = 2 + (2 if is_split else int(half))
        sides = (weight.sides for weight in self.matrices)
        largest = max((count * short * (copies * long + 2 * short) for count, short, long in sides), default=0)
        return (2 if half else 4) * largest

    def late_states(self, elements_of: Callable[[Weight], int]) -> tuple[int, ...]:
        """Return the bytes of each tensor of moments that torch's AdamW allocates in its first step; Muon has one per
        weight. With averages all are allocated before the first pass. `elements_of`: (weight) -> its elements on a
        rank."""
        late = [weight for weight in self.all if weight.trained and not weight.is_averaged]
        moments = [(elements_of(weight), 1 if weight.takes_muon else 2) for weight in late]
        return tuple(MOMENTS_BYTES // 2 * size for size, number in moments for _ in range(number))

    @cached_property
    def largest(self) -> int:
        """The number of elements of the largest trained parameter."""
        return max(self.sizes.values(), default=0)

    @cached_property
    def groups(self) -> list[list[Weight]]:
        """The trained weights of each of the optimizer's parameter groups."""
        trained = [weight for weight in self.all if weight.trained]
        numbers = sorted({weight.group for weight in trained})
        return [[weight for weight in trained if weight.group == number] for number in numbers]

    def shared(self, shares: dict[str, int]) -> "Weights":
        """Return the weights of one rank of a tensor-parallel group. `shares`: {name: elements on a rank}, which may
        come from a model with fewer layers: its last layer is repeated."""
        last_layers = {
            stack: max(layer_number(name, stack) for name in shares if name.startswith(f"{stack}."))
            for stack in self.stacks
        }

        def share_of(weight: Weight) -> int:
            place = self.place_of(weight.name)
            if place is None:
                return shares[weight.name]
            stack, number = place
            suffix = weight.name.removeprefix(f"{stack}.{number}.")
            return shares[f"{stack}.{min(number, last_layers[stack])}.{suffix}"]

        return replace(self, all=tuple(replace(weight, size=share_of(weight)) for weight in self.all))

    def place_of(self, name: str) -> "LayerPlace | None":
        """Return the layer of a weight; None: it is in no layer."""
        stack = next((stack for stack in self.stacks if name.startswith(f"{stack}.")), None)
        return None if stack is None else (stack, layer_number(name, stack))

    def group_of(self, name: str) -> "LayerPlace | None":
        """Return the group in which FSDP2 gathers a weight: its layer, or an end; None: the remaining weights."""
        return (END_GROUPS, self.ends[name]) if name in self.ends else self.place_of(name)

    def frozen_bytes(self, dtype: torch.dtype) -> int:
        return int((self.frozen - self.quantised) * dtype.itemsize + self.quantised * NF4_BYTES)


def layer_number(name: str, stack: str) -> int:
    """Return the number of the layer that a weight belongs to."""
    return int(name[len(stack) + 1 :].partition(".")[0])


class FlatGroup:
    """A parameter group of the optimizer, flattened and cut into one partition per rank (stage_1_and_2.py).

    Attributes:
        partition: number of elements of a rank's partition.
        moments_bytes: bytes of moments per element.
        parts: {name of a weight: [(rank, elements of it that are in the rank's partition)]}.
    """

    def __init__(self, group: list[Weight], world_size: int):
        self.moments_bytes = group[0].moments_bytes
        total = sum(weight.size for weight in group)
        aligned = -(-total // (FLAT_ALIGNMENT * world_size)) * FLAT_ALIGNMENT * world_size
        self.partition = aligned // world_size
        self.parts = {}
        begin = 0
        for weight in group:
            end = begin + weight.size
            ranks = range(begin // self.partition, -(-end // self.partition))
            borders = [max(begin, rank * self.partition) for rank in ranks] + [end]
            self.parts[weight.name] = [(rank, borders[i + 1] - borders[i]) for i, rank in enumerate(ranks)]
            begin = end


def kept_by_rank(groups: list[FlatGroup], sizes: dict[str, int]) -> dict[int, int]:
    """Return {rank: elements of the gradients that it keeps}: a rank keeps the whole gradient of a weight, even if its
    partition has only a part of the weight."""
    kept: dict[int, int] = {0: 0}
    for group in groups:
        for name, parts in group.parts.items():
            for rank, _ in parts:
                kept[rank] = kept.get(rank, 0) + sizes[name]
    return kept
