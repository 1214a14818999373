"""The global order, drawn or in batches of similar length: every sample once an epoch, the same in update k however
the run is laid out, and fair."""

import numpy as np
import pytest
from test_order import LAYOUTS

from zerofit.data.order import SampleOrder, rank_batches

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
