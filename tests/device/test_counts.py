"""What an update exchanges and waits for, counted as benchmarks/counts.py does it."""

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import counts

WEIGHTS = 2 * counts.LAYER + 2 * counts.VOCABULARY * counts.HIDDEN + counts.HIDDEN  # embedding, head and last norm too


@pytest.fixture(scope="module")
def server(device):
    return counts.rank_server()


def test_collectives_and_waits_of_an_update(server):
    """Under DDP: one all-reduce of the gradients for both micro-batches, and nothing that the host waits for."""
    ranks = counts.launch(server, "ddp", 2, 2)
    found = {key: each for key, each in counts.collectives(ranks[0], len(ranks)).items() if key[0] != "update"}
    assert found in ({("backward", "all-reduce"): [1, size * WEIGHTS]} for size in (2, 4)), "in bf16 or in fp32"
    assert not [key for key in counts.waits(ranks) if key[0] != "update"]
