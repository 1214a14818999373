"""A permutation of any size that takes no memory: each place is computed when it is asked for."""

from collections.abc import Sequence

import numpy as np

MULTIPLIER = np.uint64(0xD2B74407B1CE6E93)  # of Philox-2x64 (Salmon et al. 2011); odd, so a product can be undone
ROUNDS = 24
FEWEST_BITS = 4


class KeyedPermutation:
    """A permutation of range(size), from `seed` alone.

    A Feistel network with Philox's round is a bijection of all numbers of so many bits; a number beyond the size goes
    through it again until it is within (cycle walking). Source: VariablePhilox of Mitchell, Stokes, Frank and Holmes
    2021, Bandwidth-Optimal Random Shuffling for GPUs (arXiv 2106.06161), with their 24 rounds.
    """

    def __init__(self, size: int, seed: Sequence[int]):
        self.size = size
        bits = max(FEWEST_BITS, (size - 1).bit_length())
        self._left_bits, self._right_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
        self._left_mask, self._right_mask = (np.uint64((1 << int(n)) - 1) for n in (self._left_bits, self._right_bits))
        self._keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint32).astype(np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """What stands at these places (int64, each below `size`)."""
        numbers = self._bijection(places.astype(np.uint64))
        while (beyond := np.flatnonzero(numbers >= self.size)).size:
            numbers[beyond] = self._bijection(numbers[beyond])
        return numbers.astype(np.int64)

    def _bijection(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._right_bits, numbers & self._right_mask
        for key in self._keys:
            product = MULTIPLIER * left  # modulo 2**64
            low = (product & np.uint64(0xFFFFFFFF)) << (self._right_bits - self._left_bits)
            mixed = ((product >> np.uint64(32)) ^ key ^ right) & self._left_mask
            left, right = mixed, (low | right >> self._left_bits) & self._right_mask
        return left << self._right_bits | right
