"""A model of the memory that FSDP2 holds in the passes: torch's fully_shard, with one group per block, two for ends
that are not tied (the embedding; final norm and head), and one for the remaining weights.

A group's weights are gathered at the start of its forward pass; the flat tensor that they are received in is kept
until the next group has been received. In the backward pass each group prefetches the one before it. The embedding is
released after its forward pass, and its gradient does not need it; final norm and head stay until their backward pass,
the remaining weights until the end of the pass. Experts that are divided over ranks (`ep`) are in no group: they are
never gathered, and their gradients, for the tokens of all ranks, stay where the backward pass allocated them.

Sources: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param_group.py (unshard, wait_for_unshard, post_backward),
_fsdp_collectives.py (foreach_all_gather, foreach_reduce) and _fsdp_state.py; zerofit/strategy/engines.py.
"""

from dataclasses import dataclass

import torch

from zerofit.estimate.model_states import GradientMemory, ModelStates
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import END_GROUPS, MASTER_BYTES, NORM_BYTES, LayerPlace, Weight, Weights


@dataclass(frozen=True)
class Fsdp2Settings:
    """The settings of FSDP2."""

    # True: the forward pass releases the gathered weights of a block after it; a number: groups of this many ranks
    # share them until the backward pass
    reshards: bool | int
    syncs: bool = True  # gradients are reduced in each micro-batch; False: each rank keeps full ones until the last
    divided: frozenset[str] = frozenset()  # names of the weights of experts: each rank has some, and gathers none
    reduce_width: int = MASTER_BYTES  # bytes of an element of gradients that are reduced

    @property
    def reshard_group(self) -> int:
        """The number of ranks that share a block's weights between its passes; 0: all, or they are not shared."""
        return 0 if isinstance(self.reshards, bool) else self.reshards


EMBEDDING_GROUP = (END_GROUPS, 0)
LAST_GROUP = (END_GROUPS, 1)


@dataclass(frozen=True)
class ShardedGroup:
    """The sizes of a group of weights that FSDP2 gathers, and whose gradients it reduces, together; in bytes."""

    # all weights in the dtype of the computation, padded to the same number of rows per rank; the flat tensor that
    # receives them has the same size
    full: int
    cast: int  # a rank's shards in the dtype that is gathered
    reduced: int  # gradients in the dtype that is reduced
    shard: int  # a rank's part of the gradients, in fp32


def fully_sharded_states(
    weights: Weights, world_size: int, dtype: torch.dtype, on_gpu: bool, fsdp: Fsdp2Settings
) -> ModelStates:
    """Return the states of a rank under FSDP2. `dtype`: that weights are gathered in, and that frozen weights
    are stored in; trained weights are stored in fp32."""

    def shard_of(trained: bool) -> int:
        return sum(weight.padded(world_size) // world_size for weight in weights.all if weight.trained is trained)

    trainable = [weight for weight in weights.all if weight.trained]
    trained = shard_of(True)
    largest = max((weight.padded(world_size) for weight in trainable), default=0)
    weight_bytes = MASTER_BYTES * trained + dtype.itemsize * shard_of(False)
    return ModelStates(
        weights=weight_bytes,
        optimizer=sum(weight.moments_bytes * weight.padded(world_size) // world_size for weight in trainable),
        engine=lambda: FullyShardedMemory(weights, dtype.itemsize, world_size, fsdp),
        step={"gradients": MASTER_BYTES * trained, "workspace": 0 if on_gpu else NORM_BYTES * largest // world_size},
        load=weight_bytes,
        late=weights.late_states(lambda weight: weight.padded(world_size) // world_size),
    )


class FullyShardedMemory(GradientMemory):
    """The memory of FSDP2's groups on one rank: gathered weights, and gradients until they are reduced."""

    def __init__(self, weights: Weights, width: int, world_size: int, fsdp: Fsdp2Settings):
        super().__init__(weights, width)
        self.fsdp = fsdp
        self.place_of = weights.group_of
        self.world_size = world_size
        members: dict[LayerPlace | None, list[Weight]] = {None: []}
        for weight in weights.all:
            if weight.name not in fsdp.divided:
                members.setdefault(self.place_of(weight.name), []).append(weight)
        self.groups: dict[LayerPlace | None, ShardedGroup] = {}
        for place, group in members.items():
            full = width * sum(weight.padded(world_size) for weight in group)
            trained = sum(weight.padded(world_size) for weight in group if weight.trained)
            cast = full // world_size if width < MASTER_BYTES else 0
            shard = MASTER_BYTES * trained // world_size
            self.groups[place] = ShardedGroup(full, cast, fsdp.reduce_width * trained, shard)
        self.kept = 0  # bytes of the shards of gradients
        self.full: dict[LayerPlace | None, int] = {}  # bytes of full gradients, until the last micro-batch

    @property
    def gathered(self) -> int:
        """The bytes of other ranks' weights, and of the flat tensors that receive them."""
        kept_elements = sum(self.groups[place].full for place in self.shared) // max(1, self.fsdp.reshard_group)
        return sum(self.groups[place].full for place in self.here) + kept_elements + self.arrived + self.arriving

    def begin(self, first: bool, last: bool) -> None:
        if first:
            self.kept = 0
            self.full = {}
        self.first = first
        self.last = last
        self.gradients = self.kept + sum(self.full.values())
        self.buffers = 0
        self.here: set[LayerPlace | None] = set()
        self.shared: set[LayerPlace | None] = set()  # groups that some ranks share until the backward pass
        self.arrived = self.arriving = 0  # flat tensors: of the last group that was received, and of the next one
        self.next: LayerPlace | None = None  # the group that is being received
        self.order: list[LayerPlace] = []  # in the order of the forward pass
        self.completed: dict[LayerPlace | None, int] = {}  # bytes of gradients that are not reduced yet
        self.place: LayerPlace | None = None
        self.backward = False

    def enter(self, step: TracedStep) -> int:
        backward = step.phase == "backward"
        peak = self.held
        end = LAST_GROUP if step.phase == "loss" or step.name == "backward of after" else EMBEDDING_GROUP
        place = next((known for known in (step.place, end) if known and known in self.groups), None)
        if not self.here:  # the pass begins
            peak = self._gather(None)
        if (place, backward) == (self.place, self.backward):
            return peak
        peak = max(peak, self._leave())
        if backward and not self.backward:
            self.arrived = 0
            peak = max(peak, self._fetch_ahead(len(self.order)))
        self.place = place
        self.backward = backward
        if place is None:
            return peak
        if place == EMBEDDING_GROUP:  # an embedding's gradient is computed without its weight
            return peak if backward else max(peak, self._gather(place))
        if not backward:
            self.order.append(place)
            return max(peak, self._gather(place))
        return max(peak, self._wait(place))

    def _gather(self, place: LayerPlace | None) -> int:
        """Gather a group for its forward pass. Returns the peak bytes held while it runs."""
        group = self.groups[place]
        peak = self.held + group.cast + group.full
        self.arrived = group.full
        self.here.add(place)
        return max(peak, self.held)

    def _wait(self, place: LayerPlace) -> int:
        """Wait for a group that the backward pass prefetched, then prefetch the next one. Returns the peak bytes held
        meanwhile."""
        group = self.groups[place]
        peak = self.held
        if place not in self.here:
            if self.next != place:
                peak = max(peak, self.held + group.cast + group.full)
                self.arriving = group.full
            self.here.add(place)
            peak = max(peak, self.held)
            self.arriving = 0
            self.shared.discard(place)
        return max(peak, self._fetch_ahead(self.order.index(place)))

    def _fetch_ahead(self, place: int) -> int:
        """Prefetch the group before this place of the order. Returns the peak bytes held while it runs."""
        if place == 0 or self.order[place - 1] in self.here:
            return self.held
        self.next = self.order[place - 1]
        group = self.groups[self.next]
        self.arriving = group.full
        return self.held + group.cast

    def _leave(self) -> int:
        if self.place is None:
            return self.held
        if self.backward:
            return self._reduce(self.place)
        if self.fsdp.reshards and self.place != LAST_GROUP:
            self.here.discard(self.place)
            if self.fsdp.reshard_group and self.place != EMBEDDING_GROUP:
                self.shared.add(self.place)
        return self.held

    def complete(self, name: str) -> int:
        if name not in self.fsdp.divided:
            place = self.place_of(name)
            size = self.width * self.sizes[name]
            self.completed[place] = self.completed.get(place, 0) + size
        elif self.first:  # gradients of this rank's experts, in fp32 as the experts are stored
            size = MASTER_BYTES * self.sizes[name] // self.world_size
            self.kept += size
        else:  # it is added to the gradient of the first micro-batch
            return self.held
        self.gradients += size
        return self.held - size  # it stays where the backward pass allocated it

    def _reduce(self, place: LayerPlace | None) -> int:
        """Reduce a group's gradients, which frees those of the previous group. Without an exchange they stay in full,
        in fp32, and later micro-batches are added to the first. Returns the peak bytes held while it runs."""
        group = self.groups[place]
        self.here.discard(place)
        if not (self.fsdp.syncs or self.last):
            completed = self.completed.pop(place, 0)
            cast = MASTER_BYTES * completed // self.width
            if place not in self.full and self.width < MASTER_BYTES:
                self.gradients += cast
            peak = self.held
            if place in self.full or self.width < MASTER_BYTES:
                self.gradients -= completed
            self.full.setdefault(place, cast)
            return peak
        self.buffers = group.reduced
        peak = self.held
        self.gradients -= self.completed.pop(place, 0) + self.full.pop(place, 0)
        peak = max(peak, self.held + group.shard)
        if self.first or not self.fsdp.syncs:
            self.kept += group.shard
            self.gradients += group.shard
        return peak

    def finish(self) -> int:
        peak = self._leave()
        for place in [*self.here]:  # weights that are in no block, and blocks that get no gradient
            peak = max(peak, self._reduce(place))
        self.arrived = self.arriving = self.buffers = 0
        self.place = None
        return peak
