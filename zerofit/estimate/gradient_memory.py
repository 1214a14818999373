"""What an engine holds while gradients are completed one after another, and its temporaries as it exchanges them.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py (reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, copy_grads_in_partition) and stage3.py (__add_grad_to_ipg_bucket, __reduce_and_partition_ipg_grads);
zerofit/strategy/torch_engine.py. All sizes are in bytes of one process.
"""

from typing import Any

from zerofit.estimate.memory_constants import MASTER_BYTES, NORM_BYTES
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import FlatGroup, Weights, kept_by_rank


class GradientMemory:
    """Gradients as a single process has them: backward makes them, and later micro-batches are added to them.

    Attributes:
        gradients: held of completed gradients.
        buffers: held for their exchange.
        gathered: held of other ranks' weights.
    """

    gathered = 0

    def __init__(self, weights: Weights, width: int):
        self.sizes, self.width = weights.sizes, width
        self.gradients = self.buffers = 0

    @property
    def held(self) -> int:
        return self.gradients + self.buffers + self.gathered

    @property
    def by_kind(self) -> tuple[int, int, int]:
        """(gathered, gradients, buffers)."""
        return self.gathered, self.gradients, self.buffers

    def begin(self, first: bool, last: bool) -> None:
        """A backward pass begins: of the first, and the last, micro-batch of an update."""
        self.first, self.last = first, last
        if first:
            self.gradients = 0

    def enter(self, step: TracedStep) -> int:
        """A step of the pass begins. Returns the most that is held at a moment meanwhile."""
        return self.held

    def complete(self, name: str) -> int:
        """The gradient of a weight is complete: until here the backward pass holds it, and from here on the engine.

        Returns: the most that is held at a moment meanwhile, temporaries included.
        """
        if self.first:
            self.gradients += self.width * self.sizes[name]
        return self.held

    def finish(self) -> int:
        """The backward pass has ended. Returns as `complete` does."""
        return self.held


class DdpGradients(GradientMemory):
    """DDP: the buckets of all gradients are there all the time, and gradients are views of them."""

    def begin(self, first, last):
        self.first, self.gradients = False, self.width * sum(self.sizes.values())


class BucketGradients(GradientMemory):
    """Gradients that are collected in a bucket and exchanged when the next one does not fit into it."""

    def __init__(self, weights: Weights, zero: Any, width: int, offloads: bool):
        super().__init__(weights, width)
        self.capacity, self.contiguous = int(zero.reduce_bucket_size), bool(zero.contiguous_gradients or offloads)
        self.offloads, self.elements = offloads, 0
        self.bucket: list[str] = []
        self.own: dict[str, int] = {}  # gradients in the bucket that lie where backward has made them

    def _put(self, name: str) -> None:
        """Into the bucket's buffer, where it has room."""
        size = self.sizes[name]
        if not self.contiguous or not self._has_room(size):
            self.own[name] = self.width * size
            self.gradients += self.width * size
        self.bucket.append(name)
        self.elements += size

    def _has_room(self, size: int) -> bool:
        raise NotImplementedError

    def _release(self, name: str) -> None:
        self.gradients -= self.own.pop(name, 0)

    def _empty(self) -> None:
        self.bucket, self.elements = [], 0


class Zero12Gradients(BucketGradients):
    """ZeRO-1 and 2, on one rank."""

    def __init__(self, weights: Weights, zero: Any, groups: list[FlatGroup], rank: int, width: int, offloads: bool):
        super().__init__(weights, zero, width, offloads)
        self.shards_gradients, self.num_buffers = int(zero.stage) == 2, 2 if zero.overlap_comm else 1
        self.parts = {name: parts for group in groups for name, parts in group.parts.items()}
        self.rank, self.kept_elements = rank, kept_by_rank(groups, self.sizes).get(rank, 0)
        self.kept = 0  # of the gradients in this rank's partition, of this micro-batch
        self.earlier = 0  # of the micro-batches before it
        self.whole: dict[str, int] = {}  # ZeRO-1: gradients of earlier micro-batches, not exchanged yet

    def begin(self, first, last):
        self.first, self.last = first, last
        if first:
            self.earlier, self.whole, self.buffers = 0, {}, 0
        elif self.shards_gradients and not self.offloads:
            self.earlier = self.width * self.kept_elements
        self.kept, self.own, self.gradients = 0, {}, self.earlier + sum(self.whole.values())
        self._empty()

    def complete(self, name):
        size = self.sizes[name]
        if self.contiguous:
            self.buffers = self.num_buffers * self.width * self.capacity
        if not self.shards_gradients and not self.last:
            if name not in self.whole:
                self.whole[name] = self.width * size
                self.gradients += self.width * size
            return self.held
        most = self.held
        if self.elements + size > self.capacity:
            most = max(most, self._reduce())
        if self.offloads and size > self.capacity:
            most = max(most, self.held + self.width * size)  # it is cloned
        self.gradients -= self.whole.pop(name, 0)
        self._put(name)
        return max(most, self.held)

    def finish(self):
        if not self.shards_gradients and not self.last:
            return self.held
        most = max(self.held, self._reduce())
        self.gradients -= sum(self.own.values())
        self.own, self.buffers = {}, 0
        return most

    def _has_room(self, size):
        return size <= self.capacity

    def _reduce(self) -> int:
        most = self.held + self.width * self._copied()
        for name in self.bucket:
            part = dict(self.parts[name]).get(self.rank)
            if part is None:
                if self.shards_gradients or not self.contiguous:
                    self._release(name)
            elif not self.offloads:
                if not self.kept:  # grads_in_partition
                    self.kept = self.width * self.kept_elements
                    self.gradients += self.kept
                most = max(most, self.held)
                self._release(name)
            elif self.last:
                copy = MASTER_BYTES if self.width != MASTER_BYTES else 0
                most = max(most, self.held + part * max(NORM_BYTES, copy))
                self._release(name)
        self._empty()
        return most

    def _copied(self) -> int:
        """Elements of the largest flat copy of a bucket (allreduce_and_scatter): neighbours that go to the same rank
        are one slice of it, and a single slice is not copied."""
        slices: list[list[int]] = []
        for name in self.bucket:
            for rank, size in self.parts[name]:
                if slices and slices[-1][0] == rank:
                    slices[-1][1] += size
                else:
                    slices.append([rank, size])
        most = size = count = 0
        for place, (_, elements) in enumerate(slices):
            size, count = size + elements, count + 1
            if size > self.capacity or place == len(slices) - 1:
                most = max(most, size if count > 1 else 0)
                size = count = 0
        return most


class Zero3Gradients(BucketGradients):
    """ZeRO-3. Shards of gradients, and a bucket's buffer, are among the states."""

    def __init__(self, weights: Weights, zero: Any, world_size: int, width: int, offloads: bool):
        super().__init__(weights, zero, width, offloads)
        self.world_size = world_size

    def begin(self, first, last):
        self.last = last

    def complete(self, name):
        most = self.held
        if self.elements and self.elements + self.sizes[name] > self.capacity:
            most = self._reduce()
        self._put(name)
        return max(most, self.held)

    def finish(self):
        return self._reduce()

    def _has_room(self, size):
        return self.elements + size <= self.capacity

    def _reduce(self) -> int:
        """reduce_scatter_coalesced copies what is not a single gradient, and pads it."""
        parts = {name: -(-self.sizes[name] // self.world_size) for name in self.bucket}
        is_single = len(parts) == 1 and self.sizes[self.bucket[0]] % self.world_size == 0
        copy = 0 if is_single else self.width * self.world_size * sum(parts.values())
        most = self.held + copy
        for name, part in parts.items():
            if self.offloads:
                wide = MASTER_BYTES if self.width != MASTER_BYTES else 0
                workspace = self.width + (max(NORM_BYTES, wide) if self.last else 0)
                most = max(most, self.held + copy + part * workspace)
            self._release(name)
        self._empty()
        return most
