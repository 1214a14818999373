"""Held-out loss: every sample once, whatever the number of processes and the size of the last batch."""

import math

import torch

from train.data.order import MicroBatches, SampleOrder, loader
from train.run.job import Job


@torch.no_grad()
def evaluate_loss(engine, job: Job) -> dict[str, float]:
    """Loss (nats a token) and perplexity over the whole held-out set. Logits are never gathered, only two sums are."""
    recipe, samples = job.recipe, job.eval_set
    order = SampleOrder(len(samples), seed=0, shuffle=False)
    micro_batches = MicroBatches(
        order,
        len(samples),
        0,
        recipe.per_device_eval_batch_size,
        1,
        engine.world_size,
        engine.accelerator.process_index,
    )
    engine.model.eval()
    loss, targets = torch.zeros((), dtype=torch.float32, device=engine.device), 0
    for batch in loader(samples, micro_batches, job.collate, 0, pin=engine.device.type == "cuda"):
        loss += job.loss_sum(engine.model, batch.to(engine.device)).float()
        targets += batch.num_targets
    engine.model.train()
    total, count = engine.sum_over_ranks([loss.item(), targets])
    mean = total / max(count, 1)
    return {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0)) if mean == mean else mean}
