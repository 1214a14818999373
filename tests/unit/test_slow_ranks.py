"""Which rank is said to be slow, by the seconds that ranks tell each other."""

import numpy as np
import pytest

from zerofit.health.slow_ranks import RankSeconds, SlowRanks
from zerofit.strategy.layout import ParallelLayout


def seconds(data: float = 0.01, own: float = 0.5, positions: float = 512, total: float = 1.0) -> RankSeconds:
    return RankSeconds(total, data, own / 3, 2 * own / 3, total - data - own, own, positions)


def said(layout: ParallelLayout, updates: list[list[RankSeconds]]) -> list[str]:
    slow = SlowRanks(layout, 1, lambda rank: f"machine {rank // 2} (node), GPU {rank % 2}", "forward")
    for update, ranks in enumerate(updates, 1):
        slow.add(update, ranks)
    return slow.messages()


def test_a_slow_rank_is_told_once_and_once_more_when_it_is_no_longer():
    place = "slow      rank 3 on machine 1 (node), GPU 1: since update"
    healthy, late = [seconds()] * 4, [seconds()] * 3 + [seconds(own=0.7)]
    updates = [healthy] * 20 + [late] * 100 + [healthy] * 50 + [late] * 20  # the last do not suffice
    first, second = said(ParallelLayout(4), updates)
    assert first == (f"{place} 20 computing (forward) takes 1.40 times as long as on other ranks, which wait 0.2 s "
                     "an update for it")  # fmt: skip
    assert second == f"{place} 120 computing (forward) is as fast as on other ranks"
    assert said(ParallelLayout(4), [healthy] * 20 + [late] * 29) == []


def test_a_rank_that_waits_for_its_data():
    updates = [[seconds(data=0.3), *[seconds()] * 7]] * 40
    (line,) = said(ParallelLayout(8), updates)
    assert "rank 0 on machine 0" in line
    assert "an update waits 0.3 s for its data, 0.01 s on other ranks" in line
    assert said(ParallelLayout(8), [[seconds(data=0.1), *[seconds()] * 7]] * 40) == [], "a tenth of the update"


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_other_lengths_are_no_slowness(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(6, 0.6, (400, 8))
    updates = [[seconds(own=each / 1000, positions=each) for each in row] for row in lengths]
    assert said(ParallelLayout(8), updates) == []


def test_stages_of_a_pipeline_do_other_work():
    layout = ParallelLayout(4, pipeline=2)
    assert said(layout, [[seconds(), seconds(), seconds(own=0.9), seconds(own=0.9)]] * 40) == []
    (line,) = said(layout, [[seconds(), seconds(own=0.8), seconds(own=0.9), seconds(own=0.9)]] * 40)
    assert "rank 1 on" in line
