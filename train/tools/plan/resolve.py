"""A strategy pair as a run of so many processes would resolve it, without a launcher and without processes."""

import copy
import os
from dataclasses import dataclass
from typing import Any

from train.recipe.errors import UserError
from train.strategy.buckets import fill_bucket_size
from train.strategy.read import read_strategy
from train.strategy.strategy import Strategy
from train.tools.plan.states import States, deepspeed_states, offload_device, torch_states
from train.tools.plan.subject import Subject
from train.tools.rank_environment import environment_of_a_rank, without_launcher

BY_HIDDEN_SIZE = {  # what accelerate makes of "auto" under stage 3 (accelerator.py, _prepare_deepspeed)
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


@dataclass(frozen=True)
class Resolved:
    """A strategy with nothing left open. `zero` is DeepSpeed's own object of its configuration; None without it."""

    name: str
    world_size: int
    precision: str
    zero: Any

    @property
    def sharded_stages(self) -> tuple[int, int]:
        """How much is sharded and offloaded: what fits with less of it is faster."""
        if self.zero is None:
            return 0, 0
        offloads = sum(
            offload_device(part) != "none" for part in (self.zero.offload_optimizer, self.zero.offload_param)
        )
        return offloads, int(self.zero.stage)

    def states(self, subject: Subject, accumulates: bool) -> States:
        trained, frozen = subject.dtypes(self.precision, self.zero is not None)
        if self.zero is None:
            return torch_states(subject.weights, self.world_size, trained, frozen, subject.on_gpu)
        return deepspeed_states(
            subject.weights, self.zero, self.world_size, trained, accumulates, subject.on_gpu, subject.keeps_layers
        )


def resolve(name: str, recipe, subject: Subject, world_size: int, gpus_per_node: int) -> Resolved:
    """The strategy as read_strategy has it in a process of such a launch.

    Raises:
        UserError: no such strategy, a contradiction between recipe, YAML and JSON, no such batch; a
            strategy that is not predicted.
    """
    recipe = recipe.draft()
    # A GPU that is here and that torch does not see is no matter.
    base = without_launcher(os.environ) | {"ACCELERATE_USE_CPU": "true"}
    with environment_of_a_rank(world_size, min(world_size, gpus_per_node), base):
        recipe.adopt("strategy", name, "--strategies")
        recipe.reset_option("gradient_accumulation_steps" if recipe.global_batch_size else "global_batch_size")
        recipe.per_device_train_batch_size = 1
        strategy = read_strategy(recipe)
    if strategy.sequence > 1:
        raise UserError(f"sequence_parallel_size = {strategy.sequence}: sequence parallelism is not predicted")
    if strategy.tensor > 1:
        raise UserError(f"tensor_parallel.autotp_size = {strategy.tensor}: tensor parallelism is not predicted")
    return resolved(name, strategy, subject)


def resolved(name: str, strategy: Strategy, subject: Subject) -> Resolved:
    """With what follows from the model: sizes of buckets and thresholds."""
    world_size = strategy.launch.world_size
    if strategy.deepspeed is None:
        return Resolved(name, world_size, strategy.precision, None)
    section = copy.deepcopy(strategy.deepspeed["zero_optimization"])
    fill_bucket_size(section, subject.full)
    hidden = _hidden_size(subject.config)
    for key, value_of in BY_HIDDEN_SIZE.items():
        if section.get(key) == "auto":
            section[key] = value_of(hidden)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = {key: value for key, value in section.items() if value != "auto"}
    return Resolved(name, world_size, strategy.precision, DeepSpeedZeroConfig(**section))


def _hidden_size(config) -> int:
    sizes = getattr(config, "hidden_sizes", None)
    return getattr(config, "hidden_size", None) or (max(sizes) if sizes else config.get_text_config().hidden_size)
