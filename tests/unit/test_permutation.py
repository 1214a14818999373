"""The permutation that is computed place by place: a permutation, and a random one."""

import time

import numpy as np
import pytest

from zerofit.data.order import LARGEST_DRAWN, SampleOrder
from zerofit.data.permutation import KeyedPermutation


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 333, 4096, 100_003])
def test_every_number_once(size):
    for seed in range(3):
        assert np.array_equal(np.sort(KeyedPermutation(size, [seed, 0])(np.arange(size))), np.arange(size))


def test_a_place_is_the_same_alone_and_among_others():
    permutation = KeyedPermutation(1001, [7, 2])
    row = permutation(np.arange(1001))
    assert [int(permutation(np.array([place]))[0]) for place in (0, 1, 500, 1000)] == row[[0, 1, 500, 1000]].tolist()


def test_the_seed_decides_and_the_epoch_too():
    first, other, next_epoch = (KeyedPermutation(1000, seed)(np.arange(1000)) for seed in ([1, 0], [2, 0], [1, 1]))
    assert (first == other).mean() < 0.02
    assert (first == next_epoch).mean() < 0.02


def chi_square(counts: np.ndarray) -> float:
    """The statistic of counts that should all be equal, in standard deviations from its mean."""
    expected, degrees = counts.mean(), counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def test_every_number_has_the_same_chance_of_every_place():
    """20 x 20 cells of (number, place) over 500 seeds, beside numpy's own shuffle held to the same bounds."""
    size, seeds = 200, 500
    for shuffle in (
        lambda seed: KeyedPermutation(size, [seed, 0])(np.arange(size)),
        lambda seed: np.random.default_rng([seed, 0]).permutation(size),
    ):
        cells = np.zeros((20, 20))
        for seed in range(seeds):
            np.add.at(cells, (shuffle(seed) // 10, np.arange(size) // 10), 1)
        assert abs(chi_square(cells)) < 4


def test_neighbours_are_not_neighbours_afterwards():
    """Differences of successive numbers, modulo the size, are spread evenly; so are pairs of successive numbers."""
    size = 2**27 + 12_345
    row = KeyedPermutation(size, [3, 0])(np.arange(10**6, 10**6 + 200_000))
    differences = (np.diff(row) % size) * 100 // size
    assert abs(chi_square(np.bincount(differences, minlength=100).astype(float))) < 4
    tenths = row * 10 // size
    pairs = np.bincount(tenths[:-1] * 10 + tenths[1:], minlength=100)
    assert abs(chi_square(pairs.astype(float))) < 4


def test_a_run_over_ten_billion_samples_starts_at_once():
    order, began = SampleOrder(10**10, seed=1), time.process_time()
    assert order.num_samples > LARGEST_DRAWN
    first, far = order.places(0, 1024), order.places(3 * 10**10 - 512, 3 * 10**10 + 512)
    assert time.process_time() - began < 1
    assert len(np.unique(first)) == 1024
    assert 0 <= far.min() < far.max() < 10**10
    assert order.places(3 * 10**10, 3 * 10**10 + 512).tolist() == far[512:].tolist()
