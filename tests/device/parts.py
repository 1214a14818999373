"""Parts of the product that ask what kind of device they have. test_device.py runs this on a simulated one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Samples, check_offloaded_inputs, tiny_model
from unit.test_saving import Alone

from zerofit.checkpoint.directory import ASKED, CheckpointDirectory
from zerofit.checkpoint.writer import AsyncCheckpointWriter
from zerofit.data.collate import Batch, CausalCollator
from zerofit.health.slow_ranks import RankClock
from zerofit.record.environment import describe_environment
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.optimizers import adamw
from zerofit.training.evaluation import eval_batches
from zerofit.training.stream import RunLength, micro_batches

DEVICE = torch.device("simgpu", 0)
ROWS = Samples({"input_ids": np.arange(4) + index, "labels": np.arange(4) + index} for index in range(8))


def is_pinned(batch: Batch) -> bool:
    assert len(batch.inputs) >= 2
    return all(tensor.is_pinned() for tensor in batch.inputs.values())


def test_batches_of_training_are_pinned():
    recipe = SimpleNamespace(dataloader_num_workers=0, seed=0)
    data, length = SimpleNamespace(train=ROWS, order=None), RunLength(8, 8, 2, BatchSizes(2, 2, 1))
    batches = list(micro_batches(data, CausalCollator(0), Alone(device=DEVICE), length, recipe=recipe))
    assert len(batches) == 4
    assert all(map(is_pinned, batches))
    assert batches[0].to(DEVICE).inputs["input_ids"].device == DEVICE


def test_batches_of_evaluation_are_pinned(monkeypatch):
    seen, to = [], Batch.to
    monkeypatch.setattr(Batch, "to", lambda batch, device: seen.append(is_pinned(batch)) or to(batch, device))
    batches = list(eval_batches(Alone(device=DEVICE), ROWS, CausalCollator(0), 2))
    assert seen == [True] * len(batches) == [True] * 4
    assert batches[0].inputs["input_ids"].device == DEVICE


@pytest.mark.parametrize("asynchronous", [True, False])
def test_copies_of_a_save_are_pinned_while_they_are_needed(tmp_path, asynchronous):
    """And take little more of the host than what is copied: torch rounds each pinned block up to a power of two."""
    engine, before = Alone(width=28_000, device=DEVICE), torch.simgpu.pinned_bytes()  # 1.4 MiB: by itself it takes 2
    engine.train(range(1))
    copied = 3 * sum(parameter.nbytes for parameter in engine.module.parameters())  # weights and two moments
    saver = AsyncCheckpointWriter(CheckpointDirectory(tmp_path), engine, asynchronous=asynchronous)
    saver.save(1, ASKED, lambda folder, weights: None, dict, {"updates": 1}, False)
    pinned = torch.simgpu.pinned_bytes() - before
    assert not saver.wait()
    if asynchronous:
        assert copied <= pinned < 1.25 * copied
    else:
        assert pinned == 0


def test_the_clock_of_a_rank_waits_for_no_device():
    model, clock = tiny_model("llama").to(DEVICE), RankClock(DEVICE, alone=True)
    rows = torch.arange(32, device=DEVICE).view(2, 16)

    def waits(phase) -> list[str]:
        found = []
        torch.simgpu.observe(lambda what, *_: found.append(what))
        phase("forward")
        loss = model(input_ids=rows, labels=rows).loss
        phase("backward")
        loss.backward()
        phase("data")
        phase("update")
        torch.simgpu.observe(None)
        return found

    alone = waits(lambda name: None)
    assert waits(clock.phase) == alone
    clock.read(32)
    assert 0 < clock.latest.own == clock.latest.forward < clock.latest.total
    assert clock.latest.positions == 32


def test_the_record_names_the_devices():
    assert describe_environment([], DEVICE)["hardware"]["gpus"] == ["simulated device 0"]


def test_adamw_is_fused_where_torch_has_it():
    recipe = SimpleNamespace(weight_decay=0.1, learning_rate=1.0, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8)
    assert adamw(torch.nn.Linear(2, 2).to(DEVICE), recipe, DEVICE).defaults["fused"] is True


def test_inputs_of_recomputed_layers_wait_on_the_host():
    check_offloaded_inputs(DEVICE)
