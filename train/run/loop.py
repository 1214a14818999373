"""The loop of every task and every strategy: one update after another, each of them written down."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from train.data.collate import Batch
from train.data.order import LengthGroups, MicroBatches, SampleOrder, loader, samples_of_run
from train.run.best import Best
from train.run.checkpoints import ASKED, CLOCK, LEAVING
from train.run.evaluate import timed_evaluation
from train.run.faults import Fault
from train.run.job import Job
from train.run.meters import MemoryMeter, ThroughputMeter
from train.run.progress import Bar, Progress, rounded
from train.run.saving import Saver
from train.run.sentinel import IN_A_ROW, Sentinel
from train.run.stopping import FAULT, SAVE_FAILED, Stop
from train.strategy.batches import Batches
from train.strategy.devices import pins_memory


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
    """The length of the run in samples and updates."""
    total = samples_of_run(recipe, num_samples, batches.global_batch)
    return Plan(num_samples, total, math.ceil(total / batches.global_batch), batches)


@dataclass
class Hooks:
    """What the loop calls. `keep` and `record` are called by all ranks together.

    Args:
        write: takes each line of the record: update 0 (held-out figures before training), then one line an update.
        record: takes the update and, on the main process, each rank's sample indices; None where nobody asks.
        started: called once, when the first update is done.
        keep: called where the weights may be wanted later, with why a checkpoint is due (None: it is not), whether the
            evaluation is the best so far, and its held-out figures (empty: none taken).
        fault: called by all ranks with what is known of an update that must not reach the weights.
        phase: takes what is being done, and in which update.
        saves: what becomes of the checkpoints that are being written.
    """

    write: Callable[[dict], None]
    record: Callable[[int, list[list[int]] | None], None] | None
    started: Callable[[], None]
    keep: Callable[[str | None, bool, dict], None]
    fault: Callable[[Fault], None]
    phase: Callable[[str, int], None]
    saves: Saver


def fit(
    job: Job,
    engine,
    plan: Plan,
    meter: ThroughputMeter,
    best: Best,
    hooks: Hooks,
    done: Progress,
    sentinel: Sentinel,
    stop: Stop,
) -> dict[str, Any]:
    """Train from the first update that is not done to the last, or until there is a reason to leave earlier.

    Args:
        best: is shown every evaluation.
        done: of the run that goes on; it is kept up to date.
        sentinel: judges each update before the weights move.
        stop: says that the run is to be left early; then a checkpoint is due.

    Returns: the first and the last held-out figures, under `before` and `after` (empty where nothing is held out), the
        number of `updates` made, the share of `padding` in all positions, and why it `stopped` early (a code of
        stopping.py; 0: it did not).
    """
    recipe = job.recipe
    memory = MemoryMeter(engine.device)
    if job.evaluate is not None and recipe.eval_on_start and not done.updates:
        hooks.phase("evaluate", 0)
        done.before, clock = timed_evaluation(job, engine)
        done.after = done.before
        meter.evaluations.append(clock)
        hooks.write({"update": 0, "epoch": 0.0, "consumed_samples": 0, **done.before, **clock})
    bar = Bar(plan.num_updates, recipe.logging_steps, engine.is_main, done.updates)
    engine.model.train()
    shares = _shares(job, engine, plan, done.updates)
    share, first, stopped = next(shares, None), done.updates + 1, 0
    memory.reset()
    for update in range(first, plan.num_updates + 1):
        begun = time.perf_counter()
        torch.manual_seed(_seed_of(recipe.seed, update, engine.accelerator.process_index))  # dropout, and only that
        consumed = plan.consumed(update)
        line = {"update": update, "epoch": consumed / plan.num_samples, "consumed_samples": consumed}
        if update in done.left_out:
            rate = engine.schedule(update - 1)
            outcome = Outcome({**_NOTHING, "learning_rate": rate, "fault": "left out"}, positions=0)
            line |= outcome.figures
            share = next(shares, None)
        else:
            if hooks.record is not None:
                samples = [index for batch in share.batches for index in batch.samples]
                hooks.record(update, engine.gather_objects(samples))
            outcome = one_update(job, engine, share, update, memory, sentinel, stop, hooks, shares)
            line |= outcome.figures
            share = outcome.following
            seconds = time.perf_counter() - begun
            line |= meter.of_update(line["tokens"], consumed - plan.consumed(update - 1), seconds)
            line["seconds"] = seconds
        if outcome.fault is not None:
            line["fault"] = outcome.fault.reason
            hooks.fault(outcome.fault)
            bar.note(f"fault     update {update}: {outcome.fault.reason}. {ACTIONS[recipe.on_fault]}")
            done.faults_in_a_row += 1
            if recipe.on_fault != "skip" or done.faults_in_a_row >= IN_A_ROW:
                stopped = FAULT
                break
        else:
            done.faults_in_a_row = 0
        is_best, figures = False, {}
        if job.evaluate is not None and _evaluation_is_due(recipe, plan, update):
            hooks.phase("evaluate", update)
            figures, clock = timed_evaluation(job, engine)
            done.after = figures
            meter.evaluations.append(clock)
            line |= {**figures, **clock}
            bar.note(f"update {update}: held-out " + ", ".join(f"{k[5:]} {rounded(v, 4)}" for k, v in figures.items()))
            is_best = best.is_best(update, figures)
            memory.reset()
        done.updates = update
        done.tokens, done.positions = done.tokens + line["tokens"], done.positions + outcome.positions
        hooks.write(line)
        bar.update(line, shown="fault" not in line)
        is_last = update == plan.num_updates
        why = _why_saved(recipe, plan, update, outcome, is_last)
        if why or is_best:
            hooks.phase("save", update)
            hooks.keep(why, is_best, figures)
            memory.reset()
        if outcome.save_failed and hooks.saves.settle() and recipe.on_save_failure == "stop":
            stopped = SAVE_FAILED
        hooks.saves.look()
        while hooks.saves.news:
            bar.note(hooks.saves.news.pop(0))
        if update == first:
            hooks.started()
        if outcome.heard and not is_last:
            stopped = outcome.heard
        if stopped:
            break
        if best.is_exhausted:
            bar.note(f"update {update}: {best.worse_in_a_row} evaluations without a better {best.metric}: the end")
            break
    bar.close()
    padding = 1.0 - done.tokens / done.positions if done.positions else 0.0
    held_out = {"before": done.before, "after": done.after}
    return {**held_out, "updates": done.updates, "padding": padding, "stopped": stopped}


_NOTHING = {"loss": math.nan, "grad_norm": math.nan, "targets": 0, "tokens": 0, "padding": 0.0, "tokens_per_s": 0.0}
ACTIONS = {
    "stop": "The weights are as they were before it",
    "skip": "It is left out",
    "rewind": "Back to the last checkpoint, and on without it",
}


@dataclass
class Share:
    """This rank's micro-batches of one update.

    Args:
        totals: trained tokens, tokens and positions (tokens and padding) of all ranks together; None until the ranks
            have told each other.
    """

    batches: list[Batch]
    totals: list[float] | None = None

    @property
    def counts(self) -> list[int]:
        """The same of this rank alone."""
        counts = ((batch.num_targets, batch.num_tokens, batch.num_positions) for batch in self.batches)
        return [sum(column) for column in zip(*counts)]


@dataclass
class Outcome:
    """What came of one update, the same on every rank but for what is this rank's own: `following`."""

    figures: dict[str, float]
    positions: float  # tokens and padding
    following: Share | None = None  # of the next update, its totals known
    fault: Fault | None = None
    heard: int = 0  # the number of the reason to stop that some rank has heard
    clock: bool = False  # it is time for a checkpoint
    save_failed: bool = False  # some rank could not write its share


def one_update(
    job: Job,
    engine,
    share: Share,
    update: int,
    memory: MemoryMeter,
    sentinel: Sentinel,
    stop: Stop,
    hooks: Hooks,
    shares: Iterator[Share],
) -> Outcome:
    """Forward and backward over this rank's micro-batches, then one step of the optimizer, if nothing is wrong.

    The loss of the update is the sum over all trained tokens of the global batch divided by their number. No rank
    knows that number alone; the engine averages gradients over ranks, hence the world size.
    Whatever ranks have to tell each other goes round once, between the gradients and the step: the counts of the next
    update, too, so that it can begin while the device is still at work on this one.

    Args:
        shares: what comes after `share`.
    """
    if share.totals is None:  # the first one, or the one before was left out
        share.totals = engine.sum_over_ranks(share.counts)
    targets, tokens, positions = share.totals
    scale = engine.world_size / max(targets, 1.0)
    loss, parts = torch.zeros((), dtype=torch.float32, device=engine.device), []
    for index, batch in enumerate(share.batches):
        with engine.accumulate(last=index == len(share.batches) - 1):
            hooks.phase("forward", update)
            summed = job.loss_sum(engine.model, batch.to(engine.device))
            parts.append(summed.detach().float())
            loss += parts[-1]
            hooks.phase("backward", update)
            engine.backward(summed * scale)
    hooks.phase("data", update)
    outcome = Outcome({}, positions, following=next(shares, None))

    def judge(grad_norm: float) -> bool:
        said = [loss.item(), grad_norm, memory.peak_bytes(), stop.code(), stop.clock(), hooks.saves.has_failed]
        memory.reset()
        counts = outcome.following.counts if outcome.following else []
        ranks = engine.per_rank(map(float, [*said, *counts]))
        losses, norms, peaks, codes, clocks, failures, *counts = zip(*ranks)
        if outcome.following:
            outcome.following.totals = [sum(column) for column in counts]
        figures = {"loss": sum(losses) / max(targets, 1.0), "grad_norm": norms[0]}
        reason = sentinel.fault(figures)
        if reason:
            outcome.fault = Fault(update, reason, figures, share.batches, [float(part) for part in parts])
        outcome.heard, outcome.clock, outcome.save_failed = int(max(codes)), bool(max(clocks)), bool(max(failures))
        outcome.figures = {**figures, "peak_memory_bytes": int(max(peaks))}
        return reason is None

    hooks.phase("update", update)
    engine.update(update - 1, judge)
    outcome.figures |= {
        "learning_rate": engine.learning_rate,
        "targets": int(targets),
        "tokens": int(tokens),
        "padding": 1.0 - tokens / positions,
    }
    return outcome


def _why_saved(recipe, plan: Plan, update: int, outcome: Outcome, is_last: bool) -> str | None:
    """Why a checkpoint is due after this update; None if it is not."""
    if _is_due(recipe.save_strategy, recipe.save_steps, plan, update):
        return ASKED
    if outcome.heard and not is_last:
        return LEAVING
    return CLOCK if outcome.clock and not is_last else None


def _seed_of(seed: int, update: int, rank: int) -> int:
    """The seed of an update's dropout: the same in every run and after every resume, another on every rank."""
    return int(np.random.SeedSequence([seed, update, rank]).generate_state(1)[0])


def _shares(job: Job, engine, plan: Plan, done: int) -> Iterator[Share]:
    """This rank's share of each update after the first `done` ones."""
    batches = _micro_batches(job, engine, plan, plan.consumed(done))
    for _ in range(done, plan.num_updates):
        yield Share([next(batches) for _ in range(plan.batches.accumulation)])


def _micro_batches(job: Job, engine, plan: Plan, consumed: int) -> Iterator[Batch]:
    recipe, b = job.recipe, plan.batches
    samples, grouping = job.train_set, job.grouping
    groups = LengthGroups(samples.lengths, b.global_batch) if grouping == "window" else None
    sort_key = samples.sort_key if grouping != "none" else None
    order = job.order or SampleOrder(plan.num_samples, recipe.seed, groups)
    rank = engine.accelerator.process_index
    sampler = MicroBatches(
        order, plan.total_samples, consumed, b.micro_batch, b.accumulation, b.world_size, rank, sort_key
    )
    return iter(loader(samples, sampler, job.collate, recipe.dataloader_num_workers, pins_memory(engine.device)))


def _evaluation_is_due(recipe, plan: Plan, update: int) -> bool:
    if update == plan.num_updates:
        return True
    return _is_due("steps" if recipe.eval_steps else "epoch", recipe.eval_steps, plan, update)


def _is_due(strategy: str | None, steps: int | None, plan: Plan, update: int) -> bool:
    """Whether something that happens at the end of each epoch, or every so many updates, happens after this one."""
    if strategy == "epoch":
        return plan.ends_an_epoch(update)
    return update % steps == 0 if steps else False
