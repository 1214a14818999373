"""Copies of tensors in the host's memory, made again and again in the same place.

What a device copies to by itself must be page-locked, and torch takes page-locked memory in blocks of powers of two
(ATen/core/CachingHostAllocator.h: PowerOf2Ceil): one by one, tensors take up to twice the memory that they need. So
many tensors share few blocks, which they fill.
"""

import torch

from zerofit.strategy.devices import pins_memory

ALIGNMENT = 64  # bytes
SMALLEST = 2**16

Places = dict[str, tuple[int, int]]  # {tensor: (block, first byte in it)}


def lay_out(sizes: dict[str, int]) -> tuple[list[int], Places]:
    """Lay tensors of these bytes into blocks of powers of two. Returns the bytes of each block, and the places.

    Each block is the largest that what is left could fill, and takes the largest tensors first.
    """
    rounded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    left = sorted(rounded, key=rounded.__getitem__, reverse=True)
    blocks, places = list[int](), Places()
    while left:
        total = sum(rounded[name] for name in left)
        block = max(1 << total.bit_length() >> 1, 1 << (rounded[left[0]] - 1).bit_length(), SMALLEST)
        taken = 0
        for name in left:
            if taken + rounded[name] <= block:
                places[name] = len(blocks), taken
                taken += rounded[name]
        blocks.append(block)
        left = [name for name in left if name not in places]
    return blocks, places


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
            pinned = {name: tensor.nbytes for name, tensor in tensors.items() if pins_memory(tensor.device)}
            sizes, places = lay_out(pinned)
            blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            for name, tensor in tensors.items():
                if name in places:
                    block, start = places[name]
                    flat = blocks[block][start : start + tensor.nbytes].view(tensor.dtype)
                    self._room[name] = flat.view(tensor.shape)
                else:
                    self._room[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._kinds = kinds
        return {name: self._room[name].copy_(tensor.detach()) for name, tensor in tensors.items()}
