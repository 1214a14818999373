"""What an engine holds while gradients are completed one after another, and its temporaries as it exchanges them.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py (reduce_ipg_grads) and stage3.py (__add_grad_to_ipg_bucket);
zerofit/strategy/torch_engine.py. All sizes are in bytes of one process.
"""

from collections.abc import Callable
from typing import Any

from zerofit.estimate.memory_constants import MASTER_BYTES, NORM_BYTES
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import Weights


class GradientMemory:
    """Gradients as a single process has them: backward makes them, and later micro-batches are added to them.

    Attributes:
        gradients: held of completed gradients.
        buffers: held for their exchange.
        gathered: held of other ranks' weights.
    """

    def __init__(self, weights: Weights, width: int):
        self.sizes, self.width = weights.sizes, width
        self.gradients = self.buffers = 0

    @property
    def gathered(self) -> int:
        return 0

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

    def begin(self, first: bool, last: bool) -> None:
        self.first, self.gradients = False, self.width * sum(self.sizes.values())


class BucketGradients(GradientMemory):
    """ZeRO: gradients are collected in a bucket, which is reduced when the next one does not fit into it.

    A closed form of what DeepSpeed does weight by weight: a bucket of several gradients is copied as a whole to be
    reduced; whatever rank a gradient belongs to, ZeRO-1 keeps one that is larger than the bucket until the pass ends.

    Args:
        zero: DeepSpeed's own DeepSpeedZeroConfig.
        kept: bytes of the gradients that this rank keeps of a micro-batch, from its first reduction on; 0: they are
            among the states, or offloaded.
        part_of: (elements of a gradient) -> elements of the part that goes to this rank's share of the host's; None:
            gradients are not offloaded.
    """

    def __init__(
        self, weights: Weights, zero: Any, width: int, kept: int, part_of: Callable[[int], int] | None = None
    ):
        super().__init__(weights, width)
        self.stage, self.kept, self.part_of = int(zero.stage), kept, part_of
        self.capacity = width * int(zero.reduce_bucket_size)
        self.contiguous = bool(zero.contiguous_gradients or (part_of and self.stage < 3))
        has_buffer = self.contiguous and self.stage < 3  # that of ZeRO-3 is among the states
        self.buffer = self.capacity * (2 if zero.overlap_comm else 1) if has_buffer else 0

    def begin(self, first: bool, last: bool) -> None:
        self.first, self.last = first, last
        earlier = {1: self.width * sum(self.sizes.values()), 2: self.kept}  # of the micro-batches before
        self.gradients = 0 if first else earlier.get(self.stage, 0)
        self.buffers = 0 if first else self.buffers
        self.filled = self.count = self.largest = 0  # bytes, gradients, and elements of the largest in the bucket
        self.own = 0  # bytes of gradients that do not lie in its buffer
        self.is_kept = False

    def complete(self, name: str) -> int:
        size, self.buffers = self.width * self.sizes[name], self.buffer
        if self.stage == 1 and not self.last:
            self.gradients += size * self.first
            return self.held
        if self.stage == 1 and not self.first:
            self.gradients -= size  # it goes into the bucket with what was accumulated
        most = self._reduce() if self.filled and self.filled + size > self.capacity else self.held
        if self.part_of and self.stage < 3 and size > self.capacity:
            most = max(most, self.held + size)  # it is cloned
        if not self.contiguous or size > self.capacity:
            self.own += size
            self.gradients += size
        self.filled, self.count = self.filled + size, self.count + 1
        self.largest = max(self.largest, self.sizes[name])
        return max(most, self.held)

    def finish(self) -> int:
        if self.stage == 1 and not self.last:
            return self.held
        most = self._reduce()
        self._release()
        self.buffers = 0
        return most

    def _reduce(self) -> int:
        if not self.is_kept:
            self.is_kept, self.gradients = True, self.gradients + self.kept
        copied = self.filled if self.count > 1 else 0
        most = self.held + copied
        if self.part_of:  # on its way to the host
            wide = max(NORM_BYTES, MASTER_BYTES if self.width != MASTER_BYTES else 0) * self.last
            beside = self.width * self.part_of(self.largest) + copied if self.stage == 3 else 0
            most = max(most, self.held + beside + wide * self.part_of(self.largest))
        if self.stage > 1 or not self.contiguous:
            self._release()
        self.filled = self.count = self.largest = 0
        return most

    def _release(self) -> None:
        self.gradients, self.own = self.gradients - self.own, 0
