"""Counts the bytes of tensors that are alive while a model runs on fake tensors, segment by segment.

A fake tensor has a shape, a dtype and a storage of the right size that holds no memory, so the count takes
milliseconds and no GPU. Fake tensors must be on "cpu": those on "cuda" have no backward pass in a CPU build of torch.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofit.compat import replaced
from zerofit.compat.torch import DispatchMode
from zerofit.estimate.module_visits import Visit
from zerofit.estimate.operations import BY_FLOPS, MATRIX, Operation, operation_of, tensors_in


@dataclass
class Segment:
    """One part of a pass. All sizes are in bytes; `start` and `end` are what is alive then.

    Attributes:
        peak: the most that is alive in it.
        completed: the name of the parameter whose gradient is completed at its end, and released; empty: none is.
        gradient: bytes of that gradient.
        operations: what is computed in it, in order.
        visit: the visit of a module that it begins with; None: it begins with another thing.
        offloaded: bytes that leave for the host.
        blocks: bytes of each storage that is made in it, in order; of one that is released, negative.
    """

    name: Hashable
    start: int
    peak: int = 0
    end: int = 0
    completed: str = ""
    gradient: int = 0
    operations: list[Operation] = field(default_factory=list)
    visit: Visit | None = None
    offloaded: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def delta(self) -> int:
        """Bytes that stay alive after it, or (negative) that it has released."""
        return self.end - self.start

    @property
    def rise(self) -> int:
        """Bytes by which the peak is above the start."""
        return self.peak - self.start


class AllocationTracker(DispatchMode):
    """Follows every storage that an operation makes, from its first tensor to the release of its last one.

    Args:
        rounding: an allocation takes a multiple of this (512 for CUDA's caching allocator).
        thin_masks: dropout keeps a byte an element, as torch's fused one does on devices other than a CPU. There it
            keeps a mask in the dtype of its input (aten/src/ATen/native/Dropout.cpp).
        tied: shapes of weights that several modules have. Autograd adds the gradients of such a weight in the place of
            the first (torch/csrc/autograd/input_buffer.cpp).

    Attributes:
        multiplied: the storages that have gone into matrix products and attention, or came out of them. In float8 a
            product's inputs are rounded copies, so that these are made again in the backward pass from what is kept.
        counts: whether what is made now is counted.
    """

    def __init__(
        self,
        rounding: int = 1,
        thin_masks: bool = False,
        tied: frozenset[torch.Size] = frozenset(),
        is_float8: bool = False,
    ):
        super().__init__()
        self.is_float8 = is_float8
        self.rounding, self.thin_masks, self.live, self.peak = rounding, thin_masks, 0, 0
        self.tied = tied
        self.segments: list[Segment] = []
        self.multiplied: set[int] = set()
        self.counts = True
        self._known: dict[int, int] = {}

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count these: weights, which are accounted for elsewhere."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), 0)

    def include(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these, which were there before: inputs."""
        for tensor in tensors:
            self._follow(tensor.untyped_storage(), self._rounded(tensor.untyped_storage().nbytes()))

    def storages(self) -> set[int]:
        """Return the keys of all storages that are alive."""
        return set(self._known)

    def mark(self, name: Hashable) -> None:
        """Begin a segment of this name."""
        self._close()
        self.segments.append(Segment(name, self.live, self.live))

    def visit(self, visit: Visit) -> None:
        """Begin another segment of the same name, since a module is met."""
        self.mark(self.segments[-1].name)
        self.segments[-1].visit = visit

    def gradient_completed(self, name: str, parameter: torch.Tensor) -> None:
        """A gradient is complete: it is released here, and what follows is another segment of the same name."""
        segment, before = self.segments[-1], self.live
        parameter.grad = None
        segment.completed, segment.gradient = name, before - self.live
        self.mark(segment.name)

    def offloaded(self, size: int) -> None:
        """Record that `size` bytes leave for the host."""
        self.segments[-1].offloaded += size

    def close(self) -> list[Segment]:
        self._close()
        return self.segments

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":  # a question, such as on which device a tensor is: two of three calls
            return result
        if function is torch.ops.aten.add.Tensor and result.shape in self.tied:
            self._resize(args[0].untyped_storage(), 0)  # under this mode autograd does not add in place
        for tensor in tensors_in((result,)):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                self._follow(storage, self._rounded(storage.nbytes()) if self.counts else 0)
        if self.thin_masks and function is torch.ops.aten.bernoulli_.float:
            self._resize(result.untyped_storage(), self._rounded(result.numel()))
        operation = operation_of(function, args, kwargs or {}, result)
        if operation and operation.kind in BY_FLOPS:
            multiplied = result if self.is_float8 and operation.kind == MATRIX else (args, result)
            self.multiplied.update(id(tensor.untyped_storage()) for tensor in tensors_in(multiplied))
        self.note(operation)
        return result

    def note(self, operation: Operation | None) -> None:
        """An operation was computed now; None: one that costs nothing."""
        if operation and self.segments:
            self.segments[-1].operations.append(operation)

    def some_chunks(self, num_rows: int, rows: int) -> Iterator[int]:
        """The first row of the first, the second and the last chunk: those between do what the second one does."""
        starts = range(0, num_rows, rows)
        yield from starts[:1]
        operations = self.segments[-1].operations
        before = len(operations)
        yield from starts[1:2]
        operations += operations[before:] * max(0, len(starts) - 3)
        yield from starts[2:][-1:]

    def _rounded(self, size: int) -> int:
        return -(-size // self.rounding) * self.rounding

    def _follow(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key in self._known:
            return
        self._known[key] = size
        weakref.finalize(storage, self._release, key)
        self._change(size)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        self._change(-self._known[id(storage)])
        self._known[id(storage)] = size
        self._change(size)

    def _release(self, key: int) -> None:
        self.multiplied.discard(key)
        self._change(-self._known.pop(key, 0))

    def _change(self, size: int) -> None:
        """So many bytes are taken, or (negative) given back."""
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.segments and size:
            segment = self.segments[-1]
            segment.peak = max(segment.peak, self.live)
            segment.blocks.append(size)

    def _close(self) -> None:
        if self.segments:
            self.segments[-1].end = self.live


@dataclass
class _Saved:
    """A tensor for the backward pass, or, once it was given up, how to make one like it."""

    tensor: torch.Tensor | None
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]


class FusedLayers:
    """Hooks for a layer's forward pass: what a layer that is compiled keeps for its backward pass.

    torch.compile fuses operations on single elements, and computes them again in the backward pass
    (torch/_functorch/partitioners.py, min_cut_rematerialization_partition). What has to be in memory in any case is
    kept: what goes into a matrix product or attention, and what comes out. So in the trace of a layer all else that
    autograd would keep is given up at the layer's end, and is back, at no cost, where the backward pass asks for it.
    """

    def __init__(self, ledger: AllocationTracker):
        self.ledger = ledger
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self.saved: list[_Saved] = []
        self.before: set[int] = set()

    def watch(self, layer: torch.nn.Module) -> list[Any]:
        """Returns handles to be removed."""
        return [layer.register_forward_pre_hook(self._enter), layer.register_forward_hook(self._leave)]

    def _enter(self, *_: Any) -> None:
        self.saved, self.before = [], self.ledger.storages()
        self.hooks.__enter__()

    def _leave(self, *_: Any) -> None:
        self.hooks.__exit__(None, None, None)
        kept = self.before | self.ledger.multiplied
        for saved in self.saved:
            assert saved.tensor is not None  # no backward pass has begun
            if id(saved.tensor.untyped_storage()) not in kept:
                saved.tensor = None
        self.saved = []

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor, (tensor.shape, tensor.stride(), tensor.dtype))
        self.saved.append(saved)
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.tensor is not None:
            return saved.tensor
        shape, stride, dtype = saved.layout
        with replaced(self.ledger, "counts", False):
            return torch.empty_strided(shape, stride, dtype=dtype)
