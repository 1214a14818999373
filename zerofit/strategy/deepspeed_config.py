"""The DeepSpeed configuration of a run: its "auto" filled in from the recipe, contradictions refused."""

import json
import os
from typing import Any

from zerofit.recipe.errors import Problems
from zerofit.strategy.batches import BatchSizes, resolve_batches
from zerofit.strategy.deepspeed_schedule import adopt_scheduler
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.option_resolver import OptionResolver

ADAM_NAMES = ("adam", "adamw")
HIERARCHY = "zero_hpz_partition_size"


def resolve_config(
    config: dict[str, Any], source: str, recipe: Any, layout: ParallelLayout
) -> tuple[dict[str, Any], BatchSizes]:
    """Fill every "auto" that the recipe owns, in a copy.

    The number of updates and so the scheduler's own "auto" are not known yet: see `resolve_scheduler`.

    Raises:
        UserError: every statement of the configuration that the recipe contradicts, both values and sources named.
    """
    config = json.loads(json.dumps(config))
    resolver = OptionResolver(config, source, recipe)
    resolver.resolve("per_device_train_batch_size", "train_micro_batch_size_per_gpu")
    accumulation = config.get("gradient_accumulation_steps", "auto")
    if recipe.global_batch_size is None and recipe.gradient_accumulation_steps is None and accumulation == "auto":
        resolver.resolve("global_batch_size", "train_batch_size", default="auto")  # the accumulation follows from it
    if recipe.global_batch_size is None:
        resolver.resolve("gradient_accumulation_steps", "gradient_accumulation_steps", default=1)
    resolver.resolve("max_grad_norm", "gradient_clipping")
    _resolve_optimizer(resolver)
    if config["zero_optimization"].get("stage") not in (1, 2, 3):
        stage = json.dumps(config["zero_optimization"].get("stage"))
        resolver.problems.append(
            f"{source}: zero_optimization.stage = {stage}: it must be 1, 2 or 3. For 0 use ddp.yaml"
        )
    of_schedule = Problems()
    with of_schedule.collected():
        adopt_scheduler(config, source, recipe)
    resolver.problems += of_schedule.found
    resolver.raise_problems()

    batches = resolve_batches(recipe, layout.data_size, layout.replica_size)
    resolver.fill("train_micro_batch_size_per_gpu", batches.micro_batch, "per_device_train_batch_size")
    resolver.fill("gradient_accumulation_steps", batches.accumulation, "gradient_accumulation_steps")
    resolver.fill("train_batch_size", batches.global_batch, "micro-batch * accumulation * processes")
    resolver.fill("gradient_clipping", recipe.max_grad_norm, "max_grad_norm")
    zero = config["zero_optimization"]
    if zero.get("stage") == 3:
        resolver.fill(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
            "saving the model, else its tensors are empty",
        )
    _resolve_hierarchy(resolver, zero, layout.world_size)
    resolver.raise_problems()
    config.setdefault("steps_per_print", 2**31)
    config.setdefault("timers", {"throughput": {"enabled": False}})  # it waits for the device in each forward pass
    return config, batches


def _resolve_hierarchy(resolver: OptionResolver, zero: dict[str, Any], world_size: int) -> None:
    """ZeRO++'s partitions within a machine: "auto" is as many processes as a machine has."""
    if zero.get(HIERARCHY) == "auto":
        zero[HIERARCHY] = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    size = zero.get(HIERARCHY) or 1
    if isinstance(size, int) and world_size % size:
        resolver.problems.append(
            f"{resolver.source}: zero_optimization.{HIERARCHY} = {size} does not divide {world_size} processes. "
            'Write "auto", which is the processes of a machine'
        )


def _resolve_optimizer(resolver: OptionResolver) -> None:
    optimizer = resolver.config.get("optimizer")
    if not optimizer:
        return
    if str(optimizer.get("type", "")).lower() not in ADAM_NAMES:
        known = "the recipe's optimizer is AdamW. Name AdamW, or remove the block: then the recipe's own is used"
        resolver.problems.append(f"{resolver.source}: optimizer.type = {optimizer.get('type')!r}: {known}")
        return
    params = optimizer.setdefault("params", {})
    for key in ("lr", "weight_decay", "betas", "eps"):
        params.setdefault(key, "auto")
    if params["betas"] != "auto" and not (isinstance(params["betas"], list) and len(params["betas"]) == 2):
        resolver.problems.append(
            f"{resolver.source}: optimizer.params.betas = {params['betas']!r}: expected two numbers"
        )
        return
    if params["betas"] != "auto":
        resolver.resolve_value("adam_beta1", "optimizer.params.betas[0]", params["betas"][0])
        resolver.resolve_value("adam_beta2", "optimizer.params.betas[1]", params["betas"][1])
    params["betas"] = [resolver.recipe.adam_beta1, resolver.recipe.adam_beta2]
    resolver.resolve("learning_rate", "optimizer.params.lr")
    resolver.resolve("weight_decay", "optimizer.params.weight_decay")
    resolver.resolve("adam_epsilon", "optimizer.params.eps")
