"""The parallel layout, with made-up degrees: places of ranks, and the seeds of their dropout."""

from zerofit.strategy.layout import ParallelLayout


def test_places_are_deepspeeds():
    """DeepSpeed's PipeModelDataParallelTopology numbers its axes pipe, data, model, the last one fastest."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    for rank in range(8):
        layout, place = ParallelLayout(8, rank, tensor=2, pipeline=2), topology.get_coord(rank)
        assert (layout.data_rank, layout.pipeline_stage) == (place.data, place.pipe)


def test_each_rank_draws_numbers_of_its_own():
    """Heads of a layer and parts of a row differ too."""
    for degrees in ({}, {"tensor": 2}, {"pipeline": 4}, {"sequence": 2}):
        keys = [ParallelLayout(4, rank, **degrees).dropout_seed_key for rank in range(4)]
        assert len(set(keys)) == 4
        assert degrees or keys == [(0,), (1,), (2,), (3,)]
