"""A scheduler block of a DeepSpeed JSON: filled in from the recipe, and compared with the recipe's own curve."""

import copy
from dataclasses import replace
from typing import Any

import torch

from zerofit.recipe.errors import UserError, nearest
from zerofit.recipe.schedule import Schedule, warmup_updates
from zerofit.strategy.option_resolver import OptionResolver
from zerofit.strategy.strategy import Strategy

SCHEDULERS = {  # DeepSpeed's names -> the recipe's
    "WarmupDecayLR": ("linear",),
    "WarmupLR": ("constant", "constant_with_warmup"),
    "WarmupCosineLR": ("cosine",),
}
LEAST_WARMUP = 2  # of each of them (deepspeed/runtime/lr_schedules.py): 0 is an error there, and 1 becomes 2


def adopt_scheduler(config: dict[str, Any], source: str, recipe: Any) -> None:
    """Take shape and warm-up from a scheduler block where the recipe leaves them open.

    Raises:
        UserError: the block names a schedule that DeepSpeed does not have, or another than the recipe.
    """
    scheduler = config.get("scheduler")
    if not scheduler:
        return
    kind, shape = scheduler.get("type"), recipe.lr_scheduler_type
    if kind not in SCHEDULERS or (shape not in SCHEDULERS[kind] and recipe.source("lr_scheduler_type")):
        close = nearest(str(kind), SCHEDULERS) if kind not in SCHEDULERS else None
        raise UserError(
            f"{source} says scheduler.type = {kind!r}{f' (did you mean {close}?)' if close else ''}, and "
            f"lr_scheduler_type = {shape!r} ({recipe.source('lr_scheduler_type') or 'default'}). "
            "Make them agree, or remove the block: then the recipe's schedule is used"
        )
    if shape not in SCHEDULERS[kind]:
        recipe.adopt("lr_scheduler_type", SCHEDULERS[kind][-1], source)
    warmup = scheduler.setdefault("params", {}).get("warmup_num_steps", "auto")
    if warmup != "auto" and recipe.source("num_warmup_steps") is None and recipe.warmup_ratio is None:
        recipe.adopt("num_warmup_steps", warmup, source)


def with_schedule(strategy: Strategy, recipe: Any, schedule: Schedule) -> tuple[Strategy, list[str]]:
    """The strategy with the recipe's schedule in its scheduler block, if it has one; and notes for the log.

    Raises:
        UserError: DeepSpeed's schedule is not the recipe's.
    """
    if strategy.deepspeed is None:
        return strategy, []
    warmup = warmup_updates(recipe, schedule.num_updates)
    config, notes = resolve_scheduler(strategy.deepspeed, strategy.source, recipe, schedule.num_updates, warmup)
    check_deepspeed_schedule(config, strategy.source, schedule)
    return replace(strategy, deepspeed=config), notes


def resolve_scheduler(
    config: dict[str, Any], source: str, recipe: Any, num_updates: int, warmup: int
) -> tuple[dict[str, Any], list[str]]:
    """The configuration with its scheduler block filled in from the recipe, counted in updates; and notes.

    Raises:
        UserError: they disagree.
    """
    scheduler = config.get("scheduler")
    if not scheduler:
        return config, []
    config = copy.deepcopy(config)
    resolver, kind = OptionResolver(config, source, recipe), scheduler["type"]
    resolver.fill("scheduler.params.warmup_num_steps", warmup, "num_warmup_steps")
    resolver.fill("scheduler.params.warmup_type", "linear", "the recipe's warm-up")
    if kind == "WarmupCosineLR":
        resolver.fill("scheduler.params.warmup_min_ratio", 0, "the recipe's warm-up start")
        resolver.fill("scheduler.params.cos_min_ratio", recipe.min_lr_ratio, "min_lr_ratio")
    else:
        resolver.fill("scheduler.params.warmup_min_lr", 0, "the recipe's warm-up start")
        resolver.fill("scheduler.params.warmup_max_lr", recipe.learning_rate, "learning_rate")
    if kind != "WarmupLR":
        decays = recipe.lr_decay_steps or num_updates
        resolver.fill("scheduler.params.total_num_steps", decays, "lr_decay_steps or else the number of updates")
    resolver.raise_problems()
    if warmup >= LEAST_WARMUP:
        return config, []
    del config["scheduler"]
    return config, [
        f"{source}: DeepSpeed's {kind} warms up for at least {LEAST_WARMUP} updates, and this run for {warmup}: the "
        f"learning rate follows the recipe's own curve ({recipe.lr_scheduler_type}), and the block is not used"
    ]


def check_deepspeed_schedule(config: dict[str, Any], source: str, schedule: Schedule) -> None:
    """Run DeepSpeed's scheduler over the whole run without a model, and hold it against the recipe's curve.

    Raises:
        UserError: the first update at which the two differ, with both values.
    """
    if "scheduler" not in config:
        return
    import deepspeed.runtime.lr_schedules as lr_schedules

    block = config["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=schedule.peak)
    scheduler = getattr(lr_schedules, block["type"])(optimizer, **block["params"])
    stride = max(1, schedule.num_updates // 20_000)
    for update in [*range(min(2000, schedule.num_updates)), *range(2000, schedule.num_updates, stride)]:
        scheduler.step(update)
        theirs, ours = optimizer.param_groups[0]["lr"], schedule(update)
        if abs(theirs - ours) > 1e-6 * schedule.peak:
            raise UserError(
                f"{source}: at update {update + 1} scheduler {block['type']} gives a learning rate of {theirs:g}, "
                f"and the recipe ({schedule.shape}, {schedule.num_warmup} warm-up updates of {schedule.num_updates}) "
                f"states {ours:g}. Remove the scheduler block: then the recipe's schedule is used"
            )
