"""The parallel layout, with made-up degrees: who reads which samples, and what is counted once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zerofit.data.order import MicroBatches, SampleOrder
from zerofit.strategy.engine import Engine
from zerofit.strategy.layout import ParallelLayout

DEGREES = {
    "dp 4": {}, "dp 2 x tp 2": {"tensor": 2}, "dp 1 x pp 4": {"pipeline": 4},
    "pp 2 x tp 2": {"tensor": 2, "pipeline": 2}, "dp 2 x sp 2": {"sequence": 2}, "dp 2 x pp 2": {"pipeline": 2},
}  # fmt: skip


def layouts(name: str, world_size: int = 4) -> list[ParallelLayout]:
    return [ParallelLayout(world_size, rank, **DEGREES[name]) for rank in range(world_size)]


def test_places_are_deepspeeds():
    """DeepSpeed's PipeModelDataParallelTopology numbers its axes pipe, data, model, the last one fastest."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    for rank in range(8):
        layout, place = ParallelLayout(8, rank, tensor=2, pipeline=2), topology.get_coord(rank)
        assert (layout.data_rank, layout.stage) == (place.data, place.pipe)


@pytest.mark.parametrize("name", DEGREES)
def test_ranks_of_a_replica_read_the_same_samples_and_replicas_all(name):
    order, seen = SampleOrder(24, seed=7), {}
    for layout in layouts(name):
        size = layout.data_size
        rows = list(MicroBatches(order, 24, 0, 2, 4 // size, size, layout.data_rank))
        assert seen.setdefault(layout.data_rank, rows) == rows
    assert sorted(index for rows in seen.values() for row in rows for index in row) == list(range(24))


@pytest.mark.parametrize("name", DEGREES)
def test_the_loss_is_divided_by_what_is_trained_on_and_not_by_what_was_reported_twice(name):
    """Each replica's ranks report the same sums, those before the last stage no loss: the totals are the data's."""
    tokens = np.arange(1, 9)
    reports = []
    for layout in layouts(name):
        own = tokens.reshape(layout.data_size, -1)[layout.data_rank]
        has_loss = layout.stage == layout.pipeline - 1
        reports.append([float(own.sum()), 2.0 * own.sum() if has_loss else 0.0])
    for layout in layouts(name):
        engine = SimpleNamespace(layout=layout, _gathered=lambda values: torch.tensor(reports))
        count, loss = Engine.sum_over_replicas(engine, reports[layout.rank])
        assert (count, loss / count) == (tokens.sum(), 2.0)
        assert len(layout.loss_ranks) == layout.data_size


def test_each_rank_draws_numbers_of_its_own():
    assert [layout.dropout_seed_key for layout in layouts("dp 4")] == [(0,), (1,), (2,), (3,)]
    for name in ("dp 2 x tp 2", "dp 1 x pp 4", "dp 2 x sp 2"):
        assert len({layout.dropout_seed_key for layout in layouts(name)}) == 4, "heads and parts of a row differ too"
