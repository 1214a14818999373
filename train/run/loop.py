"""The loop of every task and every strategy: one update after another, each of them written down."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from train.data.collate import Batch
from train.data.order import FILLER, LengthGroups, MicroBatches, SampleOrder, loader
from train.run.best import Best
from train.run.job import Job
from train.run.meters import MemoryMeter, ThroughputMeter
from train.run.progress import Bar, Progress
from train.run.stopping import REASONS, Stop
from train.strategy.batches import Batches


@dataclass(frozen=True)
class Plan:
    """How long the run is. Counts are samples and updates."""

    num_samples: int  # in the training set
    total_samples: int  # seen over the whole run
    num_updates: int
    batches: Batches

    def consumed(self, updates: int) -> int:
        """Samples seen after this many updates."""
        return min(updates * self.batches.global_batch, self.total_samples)

    def ends_an_epoch(self, update: int) -> bool:
        """Whether some epoch was completed by this update (counted from 1)."""
        return self.consumed(update) // self.num_samples > self.consumed(update - 1) // self.num_samples


def make_plan(recipe, num_samples: int, batches: Batches) -> Plan:
    """num_train_epochs, or max_train_steps which overrides it, in samples and updates."""
    size = batches.global_batch
    total = max(1, round(recipe.num_train_epochs * num_samples))
    if recipe.max_train_steps is not None:
        total = recipe.max_train_steps * size
    return Plan(num_samples, total, math.ceil(total / size), batches)


def fit(
    job: Job,
    engine,
    plan: Plan,
    meter: ThroughputMeter,
    best: Best,
    write: Callable[[dict], None],
    record: Callable[[int, list[list[int]] | None], None],
    started: Callable[[], None],
    keep: Callable[[Progress, bool, bool, dict], None],
    done: Progress,
    stop: Stop,
) -> dict[str, Any]:
    """Train from the first update that is not done to the last, or until there was nothing better for too long.

    Args:
        best: is shown every evaluation.
        write: takes each line of the record: update 0 (held-out figures before training), then one line an update.
        record: takes, where samples are recorded, the update and on the main process each rank's sample indices.
        started: called once, when the first update is done.
        keep: called by all ranks after an update whose weights may be wanted later, with the progress, whether a
            checkpoint is due, whether its evaluation is the best so far, and its held-out figures (empty: none taken).
        done: of the run that goes on; it is kept up to date.
        stop: says that the run is to be left early; then `keep` is called as if a checkpoint were due.

    Returns: the first and the last held-out figures, under `before` and `after` (empty where nothing is held out), the
        number of `updates` made, the share of `padding` in all positions, and why it `stopped` early (empty: not).
    """
    recipe, accumulation = job.recipe, plan.batches.accumulation
    memory = MemoryMeter(engine.device)
    if job.evaluate is not None and recipe.eval_on_start and not done.updates:
        done.before = done.after = job.evaluate(engine)
        write({"update": 0, "epoch": 0.0, "consumed_samples": 0, **done.before})
    bar = Bar(plan.num_updates, recipe.logging_steps, engine.is_main, done.updates)
    engine.model.train()
    micro_batches = _micro_batches(job, engine, plan, plan.consumed(done.updates))
    first, stopped = done.updates + 1, ""
    for update in range(first, plan.num_updates + 1):
        begun = time.perf_counter()
        torch.manual_seed(_seed_of(recipe.seed, update, engine.accelerator.process_index))  # dropout
        memory.reset()
        batches = [next(micro_batches) for _ in range(accumulation)]
        line = {
            "update": update,
            "epoch": plan.consumed(update) / plan.num_samples,
            "consumed_samples": plan.consumed(update),
        }
        if recipe.record_samples:
            record(update, engine.gather_objects([i for batch in batches for i in batch.indices if i != FILLER]))
        figures_of_update, heard = one_update(job, engine, batches, update - 1, memory, stop)
        line |= figures_of_update
        seconds = time.perf_counter() - begun
        line |= meter.of_update(line["tokens"], plan.consumed(update) - plan.consumed(update - 1), seconds)
        line["seconds"] = seconds
        is_due, is_best, figures = _is_due(recipe.save_strategy, recipe.save_steps, plan, update), False, {}
        if job.evaluate is not None and _evaluation_is_due(recipe, plan, update):
            figures = done.after = job.evaluate(engine)
            line |= figures
            bar.note(f"update {update}: held-out " + ", ".join(f"{k[5:]} {v:.4g}" for k, v in figures.items()))
            is_best = best.is_best(update, figures)
        done.updates, done.tokens = update, done.tokens + line["tokens"]
        done.positions += line["tokens"] / (1.0 - line["padding"])
        write(line)
        bar.update(line)
        is_last = update == plan.num_updates
        if is_due or is_best or (heard and not is_last):
            keep(done, is_due or bool(heard), is_best, figures)
        if update == first:
            started()
        if heard and not is_last:
            stopped = REASONS[heard]
            break
        if best.is_exhausted:
            bar.note(f"update {update}: {best.worse_in_a_row} evaluations without a better {best.metric}: the end")
            break
    bar.close()
    padding = 1.0 - done.tokens / done.positions
    held_out = {"before": done.before, "after": done.after}
    return {**held_out, "updates": done.updates, "padding": padding, "stopped": stopped}


def one_update(
    job: Job, engine, batches: list[Batch], number: int, memory: MemoryMeter, stop: Stop
) -> tuple[dict[str, float], int]:
    """Forward and backward over this rank's micro-batches, then one step of the optimizer.

    The loss of the update is the sum over all trained tokens of the global batch divided by their number. No rank
    knows that number alone, so it is summed first; the engine averages gradients over ranks, hence the world size.

    Returns: the figures of the update, and the number of the reason to stop that some rank has heard (0: none).
    """
    counts = [(batch.num_targets, batch.num_tokens, batch.num_positions) for batch in batches]
    targets, tokens, positions = engine.sum_over_ranks(map(sum, zip(*counts)))
    scale = engine.world_size / max(targets, 1.0)
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    for index, batch in enumerate(batches):
        summed = job.loss_sum(engine.model, batch.to(engine.device))
        loss += summed.detach().float()
        engine.backward(summed * scale, last=index == len(batches) - 1)
    grad_norm = engine.update(number)
    ranks = engine.per_rank([loss.item(), memory.peak_bytes(), stop.code()])
    figures = {
        "loss": sum(rank[0] for rank in ranks) / max(targets, 1.0),
        "grad_norm": grad_norm,
        "learning_rate": engine.learning_rate,
        "targets": int(targets),
        "tokens": int(tokens),
        "padding": 1.0 - tokens / positions,
        "peak_memory_bytes": int(max(rank[1] for rank in ranks)),
    }
    return figures, int(max(rank[2] for rank in ranks))


def _seed_of(seed: int, update: int, rank: int) -> int:
    """The seed of an update's dropout: the same in every run and after every resume, another on every rank."""
    return int(np.random.SeedSequence([seed, update, rank]).generate_state(1)[0])


def _micro_batches(job: Job, engine, plan: Plan, consumed: int) -> Iterator[Batch]:
    recipe, b = job.recipe, plan.batches
    samples, grouping = job.train_set, job.grouping
    groups = LengthGroups(samples.lengths, b.global_batch) if grouping == "window" else None
    sort_key = samples.sort_key if grouping != "none" else None
    order = SampleOrder(plan.num_samples, recipe.seed, groups)
    rank = engine.accelerator.process_index
    sampler = MicroBatches(
        order, plan.total_samples, consumed, b.micro_batch, b.accumulation, b.world_size, rank, sort_key
    )
    workers, pin = recipe.dataloader_num_workers, engine.device.type == "cuda"
    return iter(loader(samples, sampler, job.collate, workers, pin))


def _evaluation_is_due(recipe, plan: Plan, update: int) -> bool:
    if update == plan.num_updates:
        return True
    return _is_due("steps" if recipe.eval_steps else "epoch", recipe.eval_steps, plan, update)


def _is_due(strategy: str | None, steps: int | None, plan: Plan, update: int) -> bool:
    """Whether something that happens at the end of each epoch, or every so many updates, happens after this one."""
    if strategy == "epoch":
        return plan.ends_an_epoch(update)
    return update % steps == 0 if steps else False
