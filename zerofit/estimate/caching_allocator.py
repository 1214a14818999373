"""A model of torch's caching allocator: the memory of a GPU that it holds beyond the tensors that are alive.

It takes memory of the driver in segments and does not give them back: a block is cut from the smallest free one that
is large enough, and a free one joins its neighbours of the same segment. Source: torch 2.13, c10/cuda/
CUDACachingAllocator.cpp (get_free_block, should_split, get_allocation_size), whose blocks of at most 1 MiB lie in
segments of their own. A stream has its own blocks, which no other stream gets.
"""

import bisect
import functools
import itertools
from typing import NamedTuple

MIB = 2**20
SMALL = MIB  # and all smaller blocks
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB  # below the first, segments are as large as the second
ROUNDING = 2 * MIB  # of larger segments


class Block:
    """A part of a segment, between two others."""

    __slots__ = ("following", "is_free", "number", "previous", "size")

    def __init__(self, size: int, previous: "Block | None" = None, following: "Block | None" = None):
        self.size, self.previous, self.following, self.is_free, self.number = size, previous, following, False, 0

    @property
    def is_segment(self) -> bool:
        return self.previous is None and self.following is None


class CachingAllocator:
    """The blocks above 1 MiB of one stream. Sizes are in bytes.

    Attributes:
        held: taken of the driver.
        alive: of the tensors.
        idle: in segments of which no block is taken: they go back to the driver before memory runs out.
        most_alive, most_needed: the largest `alive` and `held - idle`.
    """

    def __init__(self) -> None:
        self.held = self.alive = self.idle = self.most_alive = self.most_needed = 0
        self._free: list[tuple[int, int, Block]] = []  # by size
        self._numbers = itertools.count()
        self._taken: dict[int, list[Block]] = {}

    def take(self, size: int) -> None:
        at = bisect.bisect_left(self._free, (size,))
        if at < len(self._free):
            block = self._free.pop(at)[2]
            block.is_free = False
            self.idle -= block.size if block.is_segment else 0
        else:
            block = Block(MIDDLE_SEGMENT if size < MIDDLE else -(-size // ROUNDING) * ROUNDING)
            self.held += block.size
        if block.size - size > SMALL:
            rest = Block(block.size - size, block, block.following)
            if block.following:
                block.following.previous = rest
            block.following, block.size = rest, size
            self._put(rest)
        self.alive += size
        self.most_alive = max(self.most_alive, self.alive)
        self.most_needed = max(self.most_needed, self.held - self.idle)
        self._taken.setdefault(size, []).append(block)

    def release(self, size: int) -> None:
        """Give back the block of that size that was taken last: a backward pass releases what was saved last first."""
        blocks = self._taken.get(size)
        if not blocks:
            return
        block = blocks.pop()
        self.alive -= size
        if block.previous and block.previous.is_free:
            self._join(block, block.previous)
            block.previous = block.previous.previous
            if block.previous:
                block.previous.following = block
        if block.following and block.following.is_free:
            self._join(block, block.following)
            block.following = block.following.following
            if block.following:
                block.following.previous = block
        self.idle += block.size if block.is_segment else 0
        self._put(block)

    def _join(self, block: Block, neighbour: Block) -> None:
        del self._free[bisect.bisect_left(self._free, (neighbour.size, neighbour.number))]
        block.size += neighbour.size

    def _put(self, block: Block) -> None:
        block.is_free, block.number = True, next(self._numbers)
        bisect.insort(self._free, (block.size, block.number, block))


class Unused(NamedTuple):
    """Bytes that the allocator holds beside the most that is alive: of all, and of what it cannot give back."""

    held: int
    needed: int


@functools.lru_cache(maxsize=256)
def unused_bytes(blocks: tuple[int, ...], before: tuple[int, ...] = (), between: tuple[int, ...] = ()) -> Unused:
    """Return what the allocator holds beyond the peak after a pass that is like the one before it.

    Args:
        blocks: bytes that a pass takes, and (negative) gives back, in order.
        before: blocks that were taken before, and stay.
        between: that were taken after the first pass, and stay.
    """
    allocator = CachingAllocator()
    for size in (*before, *blocks, *between, *blocks):
        if size > SMALL:
            allocator.take(size)
        elif size < -SMALL:
            allocator.release(-size)
    return Unused(allocator.held - allocator.most_alive, allocator.most_needed - allocator.most_alive)
