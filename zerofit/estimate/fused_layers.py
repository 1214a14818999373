"""What a layer that is compiled keeps for its backward pass.

torch.compile fuses operations on single elements, and computes them again in the backward pass
(torch/_functorch/partitioners.py, min_cut_rematerialization_partition). What has to be in memory in any case is kept:
what goes into a matrix product or attention, and what comes out. So in the trace of a layer all else that autograd
would keep is given up at the layer's end, and is back, at no cost, where the backward pass asks for it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from zerofit.estimate.allocations import AllocationTracker
from zerofit.strategy.layout import replaced


@dataclass
class _Saved:
    """A tensor for the backward pass, or, once it was given up, how to make one like it."""

    tensor: torch.Tensor | None
    layout: tuple[torch.Size, tuple[int, ...], torch.dtype]


class FusedLayers:
    """Hooks for a layer's forward pass."""

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
            if saved.tensor.untyped_storage()._cdata not in kept:
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
