"""The parameters of the full model, in elements, and how ZeRO-1 and 2 lay them out over the ranks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from zerofit.strategy.optimizers import state_bytes

# An NF4 weight with double quantisation: 4 bits and 0.127 bits of scales. Source: Dettmers et al. 2023, QLoRA.
NF4_BYTES = (4 + 0.127) / 8

# Bytes of a gradient's norm, element by element: DeepSpeed turns each gradient to fp64 (runtime/zero/utils.py,
# get_norm_dtype), and so does zerofit/strategy/engines.py on a CPU.
NORM_BYTES = 8

# Adam: two moments in fp32, and under DeepSpeed a copy of the weights in fp32. Source: Rajbhandari et al. 2020, ZeRO.
MOMENTS_BYTES = 8
MASTER_BYTES = 4
AVERAGE_BYTES = 4  # of the mean of the weights, with ema_decay

# What a step of Adafactor makes of each parameter on its way: its squared gradient, or the update and its negative.
# Source: transformers/optimization.py 5.23, Adafactor.step, where `update` lives on while the next one is made.
ADAFACTOR_BYTES = 2 * 4

END_GROUPS = "ends"
LayerPlace = tuple[str, int]  # (stack, number of the layer)
FLAT_ALIGNMENT = 2  # elements and process: of the flat weights of ZeRO-1 and 2 (nccl_start_alignment_factor)


@dataclass(frozen=True)
class Weight:
    """A parameter."""

    name: str
    size: int  # in elements
    trained: bool = True
    group: int = 0  # the number of the group that the optimizer has it in
    rows: int = 1  # of its first dimension
    shape: tuple[int, ...] = ()  # of the full parameter
    takes_muon: bool = False
    is_averaged: bool = False  # with ema_decay

    @property
    def moments_bytes(self) -> int:
        """Bytes of moments for each element, and of its mean, under the optimizers that shards are enough for."""
        return (MOMENTS_BYTES // 2 if self.takes_muon else MOMENTS_BYTES) + (AVERAGE_BYTES if self.is_averaged else 0)

    @property
    def sides(self) -> tuple[int, int, int]:
        """Return (matrices, the shorter side, the longer one): experts are matrices of their own."""
        *experts, rows, columns = self.shape
        return math.prod(experts), min(rows, columns), max(rows, columns)

    def padded(self, world_size: int) -> int:
        """Number of elements with rows filled up, so that each rank has as many."""
        return -(-self.rows // world_size) * world_size * (self.size // self.rows)


@dataclass(frozen=True)
class Weights:
    """All parameters, in the model's order."""

    all: tuple[Weight, ...]
    stacks: tuple[str, ...] = ()  # of layers: the weights of their layer 3 are called STACK.3.SOMETHING
    head: str = ""  # the output embeddings' weight where no other module has it; empty: it is shared, or none
    # {name: 0 of the embedding, 1 of final norm and head} where FSDP2 gathers these for themselves
    ends: Mapping[str, int] = field(default_factory=dict)
    quantised: int = 0  # elements of frozen matrices that are held in 4 bits

    @cached_property
    def sizes(self) -> dict[str, int]:
        """{name: elements} of those that are trained."""
        return {weight.name: weight.size for weight in self.all if weight.trained}

    @property
    def trained(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def frozen(self) -> int:
        return sum(weight.size for weight in self.all if not weight.trained)

    def state_bytes(self, optim: str) -> int:
        """Bytes that an optimizer keeps of all that is trained, of parameters that are not sharded."""
        rest = "adamw" if optim == "muon" else optim
        return sum(
            state_bytes(optim if weight.takes_muon else rest, weight.shape or (weight.size,))
            + (AVERAGE_BYTES * weight.size if weight.is_averaged else 0)
            for weight in self.all
            if weight.trained
        )

    @property
    def matrices(self) -> list[Weight]:
        """The weights that Muon updates."""
        return [weight for weight in self.all if weight.trained and weight.takes_muon]

    def muon_workspace(self, half: bool, is_split: bool) -> int:
        """Bytes that Muon's step takes beside gradients, of the largest matrix: what an iteration begins and ends
        with, two products of its shorter side, and the matrix itself where it is not a view of the gradient.
        `is_split`: parts of it come from all ranks, and each sends as much."""
        copies = 2 + (2 if is_split else int(half))
        sides = (weight.sides for weight in self.matrices)
        largest = max((count * short * (copies * long + 2 * short) for count, short, long in sides), default=0)
        return (2 if half else 4) * largest

    def late_states(self, held_of: Callable[[Weight], int]) -> tuple[int, ...]:
        """Bytes of the moments that torch's AdamW makes in its first step, tensor by tensor; Muon makes one. With
        averages all are made before the first pass. `held_of`: (weight) -> elements of it that a rank has."""
        late = [weight for weight in self.all if weight.trained and not weight.is_averaged]
        held = [(held_of(weight), 1 if weight.takes_muon else 2) for weight in late]
        return tuple(MOMENTS_BYTES // 2 * size for size, number in held for _ in range(number))

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter that is trained."""
        return max(self.sizes.values(), default=0)

    @cached_property
    def groups(self) -> list[list[Weight]]:
        """The optimizer's groups of what is trained."""
        trained = [weight for weight in self.all if weight.trained]
        numbers = sorted({weight.group for weight in trained})
        return [[weight for weight in trained if weight.group == number] for number in numbers]

    def shared(self, shares: dict[str, int]) -> "Weights":
        """Return the weights of one rank of several that share each layer. `shares`: {name: elements}, also of a model
        with fewer layers: the last one stands for those that follow."""
        most = {
            stack: max(layer_number(name, stack) for name in shares if name.startswith(f"{stack}."))
            for stack in self.stacks
        }

        def share_of(weight: Weight) -> int:
            place = self.place_of(weight.name)
            if place is None:
                return shares[weight.name]
            stack, number = place
            rest = weight.name.removeprefix(f"{stack}.{number}.")
            return shares[f"{stack}.{min(number, most[stack])}.{rest}"]

        return replace(self, all=tuple(replace(weight, size=share_of(weight)) for weight in self.all))

    def place_of(self, name: str) -> "LayerPlace | None":
        """Return the layer of a weight; None: it is in no layer."""
        stack = next((stack for stack in self.stacks if name.startswith(f"{stack}.")), None)
        return None if stack is None else (stack, layer_number(name, stack))

    def group_of(self, name: str) -> "LayerPlace | None":
        """Return the group in which FSDP2 gathers a weight: its layer, or an end; None: the rest."""
        return (END_GROUPS, self.ends[name]) if name in self.ends else self.place_of(name)

    def frozen_bytes(self, dtype: torch.dtype) -> int:
        return int((self.frozen - self.quantised) * dtype.itemsize + self.quantised * NF4_BYTES)


def layer_number(name: str, stack: str) -> int:
    """Return the number of the layer that a weight belongs to."""
    return int(name[len(stack) + 1 :].partition(".")[0])


class FlatGroup:
    """A group of the optimizer, flat and cut into one partition a rank (stage_1_and_2.py).

    Attributes:
        partition: elements of a rank's part.
        moments_bytes: of each.
        parts: {name of a weight: [(rank, elements of it that are in the rank's part)]}.
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
            self.parts[weight.name] = [(rank, borders[at + 1] - borders[at]) for at, rank in enumerate(ranks)]
            begin = end


def kept_by_rank(groups: list[FlatGroup], sizes: dict[str, int]) -> dict[int, int]:
    """{rank: elements of the gradients that it keeps}: whole weights, although the rank may have a part of them."""
    kept: dict[int, int] = {0: 0}
    for group in groups:
        for name, parts in group.parts.items():
            for rank, _ in parts:
                kept[rank] = kept.get(rank, 0) + sizes[name]
    return kept
