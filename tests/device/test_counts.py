"""What an update exchanges and waits for, counted as benchmarks/counts.py does it, with two depths of two pairs."""

import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import counts

EXPECTED = {  # bytes of a layer: DDP's gradients once an update, fp32 or bf16; ZeRO-3's of each micro-batch, of two
    "ddp": {"all-reduce": (4 * counts.LAYER, 2 * counts.LAYER)},
    "zero3": {
        "all-gather": (2 * 2 * 2 * (counts.LAYER - 2 * counts.HIDDEN),),
        "reduce-scatter": (2 * 2 * counts.LAYER,),
    },
}
ONCE_A_MICRO_BATCH = {"ddp": {}, "zero3": {("backward", "synchronize stream"): 2}}  # DeepSpeed's, where gradients end


@pytest.fixture(scope="module")
def server(device):
    return counts.rank_server()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero3", marks=pytest.mark.long)])
def test_collectives_and_waits_of_an_update(server, strategy):
    runs = [counts.launch(server, strategy, layers, 2) for layers in (2, 4)]
    sums = []
    for ranks in runs:
        found = counts.collectives(ranks[0], len(ranks))
        passes = {phase: {kind for at, kind in found if at == phase} for phase in ("forward", "backward")}
        if strategy == "ddp":
            assert found["backward", "all-reduce"][0] == 1, "one bucket, for both micro-batches"
            assert passes == {"forward": set(), "backward": {"all-reduce"}}
        sums.append({kind: sum(size for (phase, each), (_, size) in found.items()
                               if each == kind and phase != "update") for kind in EXPECTED[strategy]})  # fmt: skip
        waited = {key: count for key, (count, _) in counts.waits(ranks).items() if key[0] != "update"}
        assert waited == ONCE_A_MICRO_BATCH[strategy]
    for kind, expected in EXPECTED[strategy].items():
        assert (sums[1][kind] - sums[0][kind]) / 2 in expected
