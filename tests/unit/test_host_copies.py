"""Copies of tensors on the host: how much page-locked memory they take, and that they are copies."""

import random

import pytest
import torch

from zerofit.checkpoint.host_copies import SMALLEST, HostCopies, lay_out


@pytest.mark.parametrize("seed", range(8))
def test_tensors_lie_side_by_side_and_never_take_more_than_one_by_one(seed):
    rng = random.Random(seed)
    sizes = {str(index): int(10 ** rng.uniform(0, 8)) for index in range(rng.randint(1, 40))}
    blocks, places = lay_out(sizes)
    assert all(block & (block - 1) == 0 for block in blocks), "powers of two"
    one_by_one = sum(1 << max(size - 1, 0).bit_length() for size in sizes.values())
    assert sum(blocks) <= one_by_one + SMALLEST + 64 * len(sizes)
    ends = dict.fromkeys(range(len(blocks)), 0)
    for name, (block, start) in sorted(places.items(), key=lambda place: place[1]):
        assert start >= ends[block]
        assert start % 64 == 0
        ends[block] = start + sizes[name]
        assert ends[block] <= blocks[block]


def test_copies_are_copies_in_the_same_place_each_time():
    tensors = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(5, dtype=torch.bfloat16), "d": torch.tensor(7)}
    copies = HostCopies()
    first = copies.of(tensors)
    assert all(torch.equal(first[name], tensor) and first[name].is_contiguous() for name, tensor in tensors.items())
    tensors["a"].fill_(0)
    assert first["a"].sum() == 15, "a copy"
    again = copies.of(tensors)
    assert [copy.data_ptr() for copy in again.values()] == [copy.data_ptr() for copy in first.values()]
    assert again["a"].sum() == 0
