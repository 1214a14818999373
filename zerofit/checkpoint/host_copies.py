"""Copies of tensors in the host's memory, made again and again in the same place.

What a device copies to by itself must be page-locked, and torch takes page-locked memory in blocks of powers of two
(ATen/core/CachingHostAllocator.h: PowerOf2Ceil): one by one, tensors take up to twice the memory that they need. So
many tensors share few blocks, which they fill.
"""

from collections.abc import Iterable

import torch

from zerofit.strategy.devices import pins_memory

ALIGNMENT = 64  # bytes
SMALLEST = 2**16
WELL_FILLED = 0.99

Places = dict[str, tuple[int, int]]  # {tensor: (block, first byte in it)}


def lay_out(sizes: dict[str, int]) -> tuple[list[int], Places]:
    """Lay tensors of these bytes into blocks of powers of two. Returns the bytes of each block, and the places.

    One block after another, each time the largest that what is left fills well, the largest tensors first.
    """
    rounded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    left = sorted(rounded, key=rounded.__getitem__, reverse=True)
    blocks, places = list[int](), Places()
    while left:
        min_bytes, max_bytes = (
            max(_power_of_two(size), SMALLEST) for size in (rounded[left[0]], sum(map(rounded.__getitem__, left)))
        )
        candidates = [min_bytes << shift for shift in range((max_bytes // min_bytes).bit_length())]
        fillings = [(block, _fill(block, left, rounded)) for block in candidates]
        filled = {block: sum(rounded[name] for name in starts) / block for block, starts in fillings}
        block, starts = max(fillings, key=lambda filling: (min(filled[filling[0]], WELL_FILLED), filling[0]))
        places |= {name: (len(blocks), start) for name, start in starts.items()}
        blocks.append(block)
        left = [name for name in left if name not in starts]
    return blocks, places


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _fill(block: int, names: Iterable[str], sizes: dict[str, int]) -> dict[str, int]:
    """The first bytes of those that a block of this size takes, each where there is still room for it."""
    starts, taken = {}, 0
    for name in names:
        if taken + sizes[name] <= block:
            starts[name], taken = taken, taken + sizes[name]
    return starts


class HostCopies:
    """Room for the copies of some tensors: made for the first ones, and used again for others of the same shapes."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self._room: dict[str, torch.Tensor] = {}

    def of(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors on the CPU, contiguous; the next call writes over them."""
        kinds = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}
        if kinds != self._kinds:
            self._kinds, self._room = {}, {}  # what there was is given back first
            self._room, self._kinds = _make_room(tensors), kinds
        return {name: self._room[name].copy_(tensor.detach()) for name, tensor in tensors.items()}


def _make_room(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    pinned = {name: tensor for name, tensor in tensors.items() if pins_memory(tensor.device)}
    sizes, places = lay_out({name: tensor.nbytes for name, tensor in pinned.items()})
    blocks = [_page_locked(size) for size in sizes]
    others = {name: tensor for name, tensor in tensors.items() if name not in pinned}
    room = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in others.items()}
    for name, tensor in pinned.items():
        block, start = places[name]
        room[name] = blocks[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return room


def _page_locked(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
