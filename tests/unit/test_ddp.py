"""DDP, seen from its communication: what two processes tell each other, when, and where gradients lie in memory."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import forked

MICRO_BATCHES, UPDATES, REFUSED = 3, 4, 2  # the update of index REFUSED does not reach the weights
RANKS = 2


class Model(torch.nn.Module):
    """Three layers of 1.4 MB, so that DDP makes more than one bucket, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(3)))
        self.register_buffer("mask", torch.ones(600))

    def forward(self, rows):
        return self.layers(rows * self.mask).square().sum()


def rows_of(rank: int, update: int, micro_batch: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(100 * rank + 10 * update + micro_batch)
    return torch.randn(2, 600, generator=rng)


def engine_of(rank: int, world_size: int):
    """The product's engine on the CPU."""
    from zerofit.recipe import ClmRecipe
    from zerofit.recipe.schedule import make_schedule
    from zerofit.strategy.batches import BatchSizes
    from zerofit.strategy.launch import Launch
    from zerofit.strategy.prepare import prepare_engine
    from zerofit.strategy.processes import start_processes
    from zerofit.strategy.strategy import Strategy

    recipe = ClmRecipe(learning_rate=1e-3, lr_scheduler_type="constant", max_grad_norm=0.0)
    launch = Launch(world_size, rank, deepspeed=False, precision=None, json_path=None, config_file=None)
    strategy = Strategy(launch, BatchSizes(2, MICRO_BATCHES, world_size), "fp32", None, "a test")
    accelerator, _ = start_processes(strategy)
    return prepare_engine(strategy, accelerator, Model(), recipe, make_schedule(recipe, UPDATES)[0])


def storages(tensors) -> dict[int, int]:
    held = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in held}


def train(rank: int, folder: str) -> None:
    """What each process does."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    engine, seen, buckets = engine_of(rank, RANKS), [], {}

    def count(state, bucket):
        seen.append(bucket.index())
        buckets[bucket.index()] = bucket.buffer()
        return allreduce_hook(None, bucket)

    engine.model.register_comm_hook(None, count)
    found = {"reduced": [], "bytes": [], "norms": [], "broadcasts_buffers": engine.model.will_sync_module_buffers()}
    for update in range(UPDATES):
        for micro_batch in range(MICRO_BATCHES):
            before = len(seen)
            with engine.accumulate(last=micro_batch == MICRO_BATCHES - 1):
                loss = engine.model(rows_of(rank, update, micro_batch))
                engine.backward(loss * (float("nan") if update == REFUSED else 1.0))
            found["reduced"].append(seen[before:])
            gradients = [parameter.grad for parameter in engine.module.parameters()]
            found["bytes"].append(sum(storages([*gradients, *buckets.values()]).values()))
        engine.set_learning_rate(update)
        found["norms"].append(engine.gradient_norm())
        (engine.discard if update == REFUSED else engine.apply)()
    found["weights"] = [float(p.detach().double().square().sum()) for p in engine.module.parameters()]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    os._exit(0)  # the group is left as it is: see zerofit/strategy/engine.py


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ddp")
    forked(__file__, folder, processes=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_ranks_meet_in_the_last_micro_batch_of_an_update_only(ranks):
    for found in ranks:
        assert len(found["reduced"]) == UPDATES * MICRO_BATCHES
        for number, reduced in enumerate(found["reduced"]):
            last = number % MICRO_BATCHES == MICRO_BATCHES - 1
            assert reduced == ([0, 1] if last else []), f"micro-batch {number}"


def test_gradients_lie_in_the_buckets_and_nowhere_else(ranks):
    parameters = sum(parameter.numel() for parameter in Model().parameters())
    held = [size for found in ranks for size in found["bytes"]]
    assert held == [4 * parameters] * len(held)
    assert not any(found["broadcasts_buffers"] for found in ranks)


def test_two_ranks_train_as_one_process_does_also_after_a_refused_update(ranks):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    norms = []
    for update in range(UPDATES):
        for rank in range(RANKS):
            for micro_batch in range(MICRO_BATCHES):
                (model(rows_of(rank, update, micro_batch)) / RANKS).backward()
        norms.append(sum(p.grad.double().square().sum() for p in model.parameters()).sqrt().item())
        if update != REFUSED:
            optimizer.step()
        optimizer.zero_grad()
    weights = [float(p.detach().double().square().sum()) for p in model.parameters()]
    for found in ranks:
        assert found["norms"][REFUSED] != found["norms"][REFUSED], "a NaN on both ranks"
        good = [update for update in range(UPDATES) if update != REFUSED]
        assert [found["norms"][update] for update in good] == pytest.approx([norms[u] for u in good], rel=1e-6)
        assert found["weights"] == pytest.approx(weights, rel=1e-6)


if __name__ == "__main__":
    train(int(os.environ["RANK"]), sys.argv[1])
