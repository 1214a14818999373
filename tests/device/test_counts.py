"""What an update exchanges and waits for, counted as benchmarks/counts.py does it, with two depths."""

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import counts

EXPECTED = (4 * counts.LAYER, 2 * counts.LAYER)  # bytes of a layer's gradients, once an update, in fp32 or bf16


@pytest.fixture(scope="module")
def server(device):
    return counts.rank_server()


def test_collectives_and_waits_of_an_update(server):
    """Under DDP: one all-reduce of the gradients for both micro-batches, and nothing that the host waits for."""
    sums = []
    for layers in (2, 4):
        ranks = counts.launch(server, "ddp", layers, 2)
        found = {key: each for key, each in counts.collectives(ranks[0], len(ranks)).items() if key[0] != "update"}
        assert {key: number for key, (number, _) in found.items()} == {("backward", "all-reduce"): 1}
        sums.append(found["backward", "all-reduce"][1])
        assert not [key for key in counts.waits(ranks) if key[0] != "update"]
    assert (sums[1] - sums[0]) / 2 in EXPECTED
