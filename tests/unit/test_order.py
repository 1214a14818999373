"""The global order: every sample once an epoch, drawn or in batches of similar length, the same in update k however
the run is laid out, and of updates that grow."""

import numpy as np
import pytest

from zerofit.data.collate import CausalCollator
from zerofit.data.order import SampleOrder, first_tokens, rank_batches
from zerofit.recipe.data_options import Warmup
from zerofit.strategy.batches import BatchSizes

LAYOUTS = [
    (micro, 8 // micro // world, world)
    for micro, world in ((8, 1), (4, 1), (2, 1), (1, 1), (4, 2), (2, 2), (1, 4), (2, 4))
]


def warmup_batches(layout: tuple, updates: int, consumed_updates: int = 0) -> list[list[int]]:
    """What all ranks together see in each update, which grow from 8 to 24 samples in four updates."""
    micro, accumulation, world = layout
    sizes = BatchSizes(micro, 3 * accumulation, world, Warmup(8, 24, 4))
    warmup = [sizes.accumulation_of(update) for update in range(consumed_updates + 1, 5)]
    order, total, consumed = SampleOrder(37, 3), sizes.consumed(updates), sizes.consumed(consumed_updates)
    rows = [
        rank_batches(order, total, consumed, micro, 3 * accumulation, num_replicas=world, rank=rank, warmup=warmup)
        for rank in range(world)
    ]
    batches = []
    for update in range(consumed_updates + 1, updates + 1):
        passes = [[next(row) for row in rows] for _ in range(sizes.accumulation_of(update))]
        batches.append([sample for ranks in passes for micro_batch in ranks for sample in micro_batch])
    assert all(next(row, None) is None for row in rows)
    return batches


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_that_grow_see_the_same_samples_in_every_layout(layout):
    batches = warmup_batches(layout, 7)
    assert [len(batch) for batch in batches] == [8, 8, 16, 16, 24, 24, 24]
    assert [sample for batch in batches for sample in batch] == SampleOrder(37, 3).indices(0, 120).tolist()
    assert warmup_batches(layout, 7, consumed_updates=3) == batches[3:]


def test_samples_are_cut_with_all_that_belongs_to_their_tokens():
    sample = {"input_ids": np.arange(8), "labels": np.arange(8), "position_ids": np.arange(8), "num_tokens": 6}
    rows = [((first_tokens(sample, 5), 0)), (first_tokens({**sample, "num_tokens": 3}, 5), 1)]
    batch = CausalCollator(pad_id=0)(rows)
    assert (batch.num_targets, batch.num_tokens, batch.num_positions) == (8, 8, 10)
    assert {tuple(tensor.shape) for tensor in batch.inputs.values()} == {(2, 5)}


def test_each_micro_batch_has_the_length_of_its_update():
    lengths = [2, 4, 6, 6, 8]
    cut = rank_batches(SampleOrder(37, 3), 16, 0, 4, 2, num_replicas=1, rank=0, warmup=[1, 1], lengths=lengths)
    assert [(len(batch), {length for _, length in batch}) for batch in cut] == [(4, {2}), (4, {4}), (4, {6}), (4, {6})]
    assert [Warmup(2, 8, 6)(update) for update in range(1, 9)] == [2, 2, 4, 4, 6, 6, 8, 8]


def test_sizes_of_updates_that_grow():
    sizes = BatchSizes(2, 6, 2, Warmup(4, 24, 10))
    assert [sizes.samples_in_update(update) for update in range(1, 13)] == [4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24]
    assert [sizes.consumed(updates) for updates in (0, 1, 3, 10, 12)] == [0, 4, 16, 120, 168]
    for samples in range(1, 200):
        needed = sizes.num_updates(samples)
        assert sizes.consumed(needed - 1) < samples <= sizes.consumed(needed)
    plain = BatchSizes(2, 6, 2)
    assert [plain.num_updates(samples) for samples in (1, 24, 25)] == [1, 1, 2]
    assert [plain.consumed(updates) for updates in (0, 3)] == [0, 72]


G = 8  # of all layouts
SAMPLES = 333  # divided by nothing
LENGTHS = np.random.default_rng(0).integers(1, 500, SAMPLES)


def order(seed: int = 3, samples: int = SAMPLES, batch: int = G, window: int = 16) -> SampleOrder:
    return SampleOrder(samples, seed, LENGTHS[:samples] if window else None, batch, window)


def global_batches(order: SampleOrder, total: int, layout: tuple = (G, 1, 1), consumed: int = 0, lengths=None):
    """(updates, accumulation, world, micro-batch): what each rank sees, as it sees it."""
    micro, accumulation, world = layout
    ranks = [
        list(
            rank_batches(order, total, consumed, micro, accumulation, num_replicas=world, rank=rank, sort_key=lengths)
        )
        for rank in range(world)
    ]
    return np.array(ranks).reshape(world, -1, accumulation, micro).transpose(1, 2, 0, 3)


@pytest.mark.parametrize(("samples", "batch"), [(333, 8), (64, 8), (37, 8), (8, 8), (5, 8), (333, 1), (129, 128)])
@pytest.mark.parametrize("window", [0, 1, 16])
def test_every_sample_once_an_epoch(samples, batch, window):
    """Also where the epoch does not divide by the global batch, or is smaller than one."""
    row = order(samples=samples, batch=batch, window=window).indices(0, 5 * samples).reshape(5, samples)
    assert all(sorted(epoch) == list(range(samples)) for epoch in row.tolist())
    if samples > 8:
        assert row[0].tolist() != row[1].tolist()


@pytest.mark.parametrize("window", [0, 16], ids=["drawn", "grouped"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_does_not_depend_on_the_layout(layout, window):
    """An update sees the same samples however it is cut, with its micro-batches sorted by length and without."""
    expected = global_batches(order(window=window), 1000).reshape(-1, G)
    assert global_batches(order(window=window), 1000, layout).reshape(-1, G).tolist() == expected.tolist()
    rearranged = global_batches(order(window=window), 1000, layout, lengths=LENGTHS).reshape(-1, G)
    assert np.sort(rearranged).tolist() == np.sort(expected).tolist()


@pytest.mark.parametrize("consumed", range(0, 1000, 208))
def test_seeking_lands_on_the_next_sample(consumed):
    whole = global_batches(order(), 1000, (2, 2, 2), lengths=LENGTHS)
    rest = global_batches(order(), 1000, (2, 2, 2), consumed, lengths=LENGTHS)
    assert rest.tolist() == whole[consumed // G :].tolist()
    other = global_batches(order(), 1000, (4, 1, 2), consumed).reshape(-1, G)
    assert other.tolist() == global_batches(order(), 1000)[consumed // G :].reshape(-1, G).tolist()


def spread(batches: np.ndarray) -> float:
    """The mean difference between the longest and the shortest sample of a batch."""
    lengths = LENGTHS[batches]
    return float((lengths.max(axis=1) - lengths.min(axis=1)).mean())


def test_an_updates_samples_are_of_similar_length():
    total = 5 * SAMPLES // G * G
    grouped = order().indices(0, total).reshape(-1, G)
    drawn = SampleOrder(SAMPLES, 3).indices(0, total).reshape(-1, G)
    assert spread(grouped) < spread(drawn) / 4
    wide = order(window=64).indices(0, total).reshape(-1, G)
    assert spread(wide) < spread(grouped)  # the more there is to choose from, the more alike
