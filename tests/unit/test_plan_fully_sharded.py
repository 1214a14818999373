"""`zerofit plan`: what FSDP2 holds, counted by hand from torch's fully_shard."""

import torch

from zerofit.estimate.fully_sharded import FullyShardedMemory, fully_sharded_states
from zerofit.estimate.traced_steps import TracedStep
from zerofit.estimate.weights import Weight, Weights

ENDS, LAYER = 4 * 80, 4 * 48  # bytes of the weights in no block, and of a block's


def weights(rows: int = 6) -> Weights:
    layers = [Weight(f"layers.{number}.w", rows * 8, rows=rows) for number in range(2)]
    return Weights((Weight("embed", 80, rows=10), *layers), ("layers",))


def at(phase: str, layer: int | None = None) -> TracedStep:
    return TracedStep(phase, "", None if layer is None else ("layers", layer), 0, 0, 0, 0)


def test_two_blocks_are_there_at_once_and_a_flat_copy_of_one():
    engine = FullyShardedMemory(weights(), 4, 2, reshards=True)
    engine.begin(first=True, last=True)
    assert engine.enter(at("forward")) == 2 * ENDS
    assert engine.enter(at("forward", 0)) == 2 * ENDS + LAYER, "the flat copy before is kept until this one is there"
    assert engine.enter(at("forward", 1)) == engine.gathered == ENDS + 2 * LAYER
    engine.enter(at("loss"))
    assert engine.gathered == ENDS + LAYER
    engine.enter(at("backward"))
    assert engine.gathered == ENDS + LAYER, "the last block is fetched ahead"
    assert engine.enter(at("backward", 1)) == engine.gathered == ENDS + 2 * LAYER
    engine.complete("layers.1.w")
    shard = LAYER // 2
    arriving = ENDS + 2 * LAYER + LAYER + shard  # with the flat gradients of the block after it
    assert engine.enter(at("backward", 0)) == arriving
    assert engine.by_kind == (ENDS + LAYER, shard, LAYER)
    engine.complete("layers.0.w")
    engine.enter(at("backward"))
    assert engine.by_kind == (ENDS, 2 * shard, LAYER)
    engine.complete("embed")
    assert engine.finish() == 2 * ENDS + 2 * LAYER
    assert engine.by_kind == (0, ENDS // 2 + LAYER, 0)


def test_rows_are_filled_up():
    """Of 3 rows, two ranks have 2 each, as torch counts them."""
    assert weights(3).all[1].padded(2) == 4 * 8
    states = fully_sharded_states(weights(3), 2, torch.float32, on_gpu=True, reshards=True)
    assert states.weights == 4 * (40 + 2 * 16)
