"""A model of what FSDP2 holds during the passes: torch's fully_shard, a group for each block, two for ends that
are not tied (the embedding; final norm and head), and one for what is in none.

A group's weights are gathered as its forward pass begins; the flat tensor that they arrive in is kept until the next
group has arrived. In the backward pass each group fetches the one before it ahead. An embedding is forgotten after its
forward pass, and its gradient needs none of it; final norm and head stay until their backward pass, what is in none
of these until the end of all. Experts that ranks divide (`ep`) are in no group: none of them is gathered, and their
gradients, of all ranks' tokens, stay where the backward pass has made them.

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
    """FSDP2's settings."""

    # the forward pass forgets the weights of blocks that it has gathered; a number: a group of this many ranks shares
    # them until the backward pass
    reshards: bool | int
    syncs: bool = True  # gradients are reduced in each micro-batch; else a rank keeps full ones until the last
    divided: frozenset[str] = frozenset()  # weights of experts, of which each rank has its own and gathers none
    reduce_width: int = MASTER_BYTES  # bytes of an element of gradients that travel

    @property
    def reshard_group(self) -> int:
        """Ranks that share a block's weights between its passes; 0: all, or nobody shares them."""
        return 0 if isinstance(self.reshards, bool) else self.reshards


EMBEDDING_GROUP = (END_GROUPS, 0)
LAST_GROUP = (END_GROUPS, 1)


@dataclass(frozen=True)
class ShardedGroup:
    """Sizes of what is gathered, and reduced, together; in bytes."""

    # all of its weights as they are computed with, filled up to as many rows for each rank; the flat tensor that they
    # arrive in has this size, too
    full: int
    cast: int  # of a rank's shards in the dtype that is gathered
    reduced: int  # of the gradients, as they are brought together
    shard: int  # of a rank's part of them, in fp32


def fully_sharded_states(
    weights: Weights, world_size: int, dtype: torch.dtype, on_gpu: bool, fsdp: Fsdp2Settings
) -> ModelStates:
    """The states of a rank under FSDP2. `dtype`: that weights are gathered in, and frozen ones are stored in; those
    that are trained are stored in fp32."""

    def shard_of(trained: bool) -> int:
        return sum(one.padded(world_size) // world_size for one in weights.all if one.trained is trained)

    trained = shard_of(True)
    largest = max((one.padded(world_size) for one in weights.all if one.trained), default=0)
    held = MASTER_BYTES * trained + dtype.itemsize * shard_of(False)
    return ModelStates(
        weights=held,
        optimizer=sum(one.moments_bytes * one.padded(world_size) // world_size for one in weights.all if one.trained),
        engine=lambda: FullyShardedMemory(weights, dtype.itemsize, world_size, fsdp),
        step={"gradients": MASTER_BYTES * trained, "workspace": 0 if on_gpu else NORM_BYTES * largest // world_size},
        load=held,
        late=weights.late_states(lambda weight: weight.padded(world_size) // world_size),
    )


class FullyShardedMemory(GradientMemory):
    """FSDP2's groups, on one rank."""

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
        for place, several in members.items():
            full = width * sum(one.padded(world_size) for one in several)
            trained = sum(one.padded(world_size) for one in several if one.trained)
            cast = full // world_size if width < MASTER_BYTES else 0
            shard = MASTER_BYTES * trained // world_size
            self.groups[place] = ShardedGroup(full, cast, fsdp.reduce_width * trained, shard)
        self.kept = 0  # shards of gradients
        self.full: dict[LayerPlace | None, int] = {}  # full gradients, until the last micro-batch

    @property
    def gathered(self) -> int:
        """Weights of other ranks, and what they arrive in."""
        kept = sum(self.groups[place].full for place in self.shared) // max(1, self.fsdp.reshard_group)
        return sum(self.groups[place].full for place in self.here) + kept + self.arrived + self.arriving

    def begin(self, first: bool, last: bool) -> None:
        if first:
            self.kept = 0
            self.full = {}
        self.first = first
        self.last = last
        self.gradients = self.kept + sum(self.full.values())
        self.buffers = 0
        self.here: set[LayerPlace | None] = set()
        self.shared: set[LayerPlace | None] = set()  # among some ranks, until the backward pass
        self.arrived = self.arriving = 0  # flat tensors: of the group that came last, and of the one that comes next
        self.next: LayerPlace | None = None  # which is on its way
        self.order: list[LayerPlace] = []  # of the forward pass
        self.completed: dict[LayerPlace | None, int] = {}  # gradients that are not reduced yet
        self.place: LayerPlace | None = None
        self.backward = False

    def enter(self, step: TracedStep) -> int:
        backward = step.phase == "backward"
        most = self.held
        end = LAST_GROUP if step.phase == "loss" or step.name == "backward of after" else EMBEDDING_GROUP
        place = next((each for each in (step.place, end) if each and each in self.groups), None)
        if not self.here:  # the pass begins
            most = self._gather(None)
        if (place, backward) == (self.place, self.backward):
            return most
        most = max(most, self._leave())
        if backward and not self.backward:
            self.arrived = 0
            most = max(most, self._fetch_ahead(len(self.order)))
        self.place = place
        self.backward = backward
        if place is None:
            return most
        if place == EMBEDDING_GROUP:  # its gradient is computed without it
            return most if backward else max(most, self._gather(place))
        if not backward:
            self.order.append(place)
            return max(most, self._gather(place))
        return max(most, self._wait(place))

    def _gather(self, place: LayerPlace | None) -> int:
        """Gather a group for its forward pass. Returns the most that is held meanwhile, in bytes."""
        group = self.groups[place]
        most = self.held + group.cast + group.full
        self.arrived = group.full
        self.here.add(place)
        return max(most, self.held)

    def _wait(self, place: LayerPlace) -> int:
        """Wait for a group that the backward pass fetched ahead, then fetch the next one. Returns bytes, likewise."""
        group = self.groups[place]
        most = self.held
        if place not in self.here:
            if self.next != place:
                most = max(most, self.held + group.cast + group.full)
                self.arriving = group.full
            self.here.add(place)
            most = max(most, self.held)
            self.arriving = 0
            self.shared.discard(place)
        return max(most, self._fetch_ahead(self.order.index(place)))

    def _fetch_ahead(self, place: int) -> int:
        """Fetch the group before this place of the order. Returns bytes, likewise."""
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
        elif self.first:  # of the rank's own experts, in fp32 as they are stored
            size = MASTER_BYTES * self.sizes[name] // self.world_size
            self.kept += size
        else:  # it is added to the first one
            return self.held
        self.gradients += size
        return self.held - size  # it stays where backward has made it

    def _reduce(self, place: LayerPlace | None) -> int:
        """A group's gradients; those of the group before it are free now. Without an exchange they stay in full, in
        fp32, and later ones are added to the first."""
        group = self.groups[place]
        self.here.discard(place)
        if not (self.fsdp.syncs or self.last):
            made = self.completed.pop(place, 0)
            cast = MASTER_BYTES * made // self.width
            if place not in self.full and self.width < MASTER_BYTES:
                self.gradients += cast
            most = self.held
            if place in self.full or self.width < MASTER_BYTES:
                self.gradients -= made
            self.full.setdefault(place, cast)
            return most
        self.buffers = group.reduced
        most = self.held
        self.gradients -= self.completed.pop(place, 0) + self.full.pop(place, 0)
        most = max(most, self.held + group.shard)
        if self.first or not self.fsdp.syncs:
            self.kept += group.shard
            self.gradients += group.shard
        return most

    def finish(self) -> int:
        most = self._leave()
        for place in [*self.here]:  # what is in no block, and blocks into which no gradient goes back
            most = max(most, self._reduce(place))
        self.arrived = self.arriving = self.buffers = 0
        self.place = None
        return most
