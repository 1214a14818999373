"""Parts of the product that ask what kind of device they have. test_device.py runs this on a simulated one."""

import pytest
import torch
from unit.test_saving import Alone

from zerofit.checkpoint.directory import CheckpointDirectory, SaveReason
from zerofit.checkpoint.writer import AsyncCheckpointWriter

DEVICE = torch.device("simgpu", 0)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_copies_of_a_save_are_pinned_while_they_are_needed(tmp_path, asynchronous):
    """And take little more of the host than what is copied: torch rounds each pinned block up to a power of two."""
    engine, before = Alone(width=28_000, device=DEVICE), torch.simgpu.pinned_bytes()  # 1.4 MiB: by itself it takes 2
    engine.train(range(1))
    copied = 3 * sum(parameter.nbytes for parameter in engine.module.parameters())  # weights and two moments
    saver = AsyncCheckpointWriter(CheckpointDirectory(tmp_path), engine, asynchronous=asynchronous)
    saver.save(1, SaveReason.REQUESTED, lambda folder, weights: None, dict, {"updates": 1}, is_best=False)
    pinned = torch.simgpu.pinned_bytes() - before
    assert not saver.wait()
    if asynchronous:
        assert copied <= pinned < 1.25 * copied
    else:
        assert pinned == 0
