"""A strategy pair as a run of so many processes would resolve it, without a launcher and without processes."""

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.model.lora import check_expert_targets, check_quantised_sharding, split_targets
from zerofit.recipe.errors import UserError
from zerofit.strategy.buckets import fill_by_sizes
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.strategy import Strategy
from zerofit.tools.plan.experts import expert_names
from zerofit.tools.plan.fully_sharded import FullyShards, fully_sharded_states
from zerofit.tools.plan.layouts import Degrees, Pair
from zerofit.tools.plan.stages import Stage
from zerofit.tools.plan.states import States, deepspeed_states, torch_states
from zerofit.tools.plan.subject import Subject
from zerofit.tools.rank_environment import strategy_of_a_launch
from zerofit.training.configuration import check_layout, check_task

BY_HIDDEN_SIZE = {  # what accelerate makes of "auto" under stage 3 (accelerator.py, _prepare_deepspeed)
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


@dataclass(frozen=True)
class Resolved:
    """A strategy with nothing left open. `sharding`: DeepSpeed's own object of its configuration, or FSDP2's settings;
    None without either."""

    name: str
    layout: ParallelLayout
    precision: str
    sharding: Any

    @property
    def zero(self) -> Any:
        """DeepSpeed's object; None without DeepSpeed."""
        return None if isinstance(self.sharding, FullyShards) else self.sharding

    @property
    def divides_experts(self) -> bool:
        return getattr(self.sharding, "divides_experts", False)

    def divided(self, subject: Subject) -> frozenset[str]:
        """The parameters with experts of which each rank has some in full."""
        return expert_names(subject.full) if self.divides_experts else frozenset()

    def states(self, subject: Subject, accumulates: bool, stage: Stage | None = None) -> States:
        trained, frozen = subject.dtypes(self.precision, self.sharding is not None)
        weights, sharers = subject.weights_of(self.layout, stage), self.layout.shard_size
        if isinstance(self.sharding, FullyShards):
            return fully_sharded_states(weights, sharers, trained, subject.on_gpu, self.sharding.reshards,
                                        self.divided(subject))  # fmt: skip
        if self.zero is None:
            return torch_states(weights, sharers, trained, frozen, subject.on_gpu, subject.recipe.optim)
        return deepspeed_states(
            weights, self.zero, sharers, trained, accumulates, subject.on_gpu, subject.keeps_layers
        )


def resolve(name: str, recipe, subject: Subject, world_size: int, gpus_per_node: int) -> Resolved:
    """The strategy as read_strategy has it in a process of such a launch.

    Raises:
        UserError: no such strategy, a contradiction between recipe, YAML and JSON, no such batch; degrees of
            parallelism that the model or the task does not have.
    """
    recipe = recipe.draft()
    recipe.reset_option("gradient_accumulation_steps" if recipe.global_batch_size else "global_batch_size")
    recipe.reset_option("global_batch_warmup")
    recipe.per_device_train_batch_size = 1
    strategy = strategy_of_a_launch(recipe, name, "--strategies", world_size, min(world_size, gpus_per_node))
    check_task(subject.task, strategy)
    check_layout(subject.config, strategy)
    if recipe.lora:
        check_quantised_sharding(recipe, strategy)
        targets = [name for text in recipe.lora_target_modules or () for name in text.split(",") if name]
        check_expert_targets(split_targets(subject.full, targets)[1], strategy, recipe)
    return resolved(name, strategy, subject)


def resolve_with(
    name: str, pair: Pair, degrees: Degrees, recipe, subject: Subject, world_size: int, gpus_per_node: int
) -> Resolved:
    """The same for a pair with other degrees than its own: it is written with them, as `--write` does, and read.

    Raises:
        UserError: as resolve.
    """
    if degrees == pair.degrees:
        return resolve(name, recipe, subject, world_size, gpus_per_node)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{pair.source.stem}.yaml"
        pair.with_degrees(degrees).write(file)
        try:
            found = resolve(str(file), recipe, subject, world_size, gpus_per_node)
        except UserError as error:
            named = {str(file): str(pair.source), str(file.with_suffix(".json")): str(pair.json_file)}
            raise UserError(_replaced(problem, named) for problem in error.problems) from None
    return Resolved(name, found.layout, found.precision, found.sharding)


def _replaced(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def resolved(name: str, strategy: Strategy, subject: Subject) -> Resolved:
    """With what follows from the model: sizes of buckets and thresholds."""
    if strategy.deepspeed is None:
        sharding = FullyShards(strategy.reshards, strategy.divides_experts) if strategy.fully_shards else None
        return Resolved(name, strategy.layout, strategy.precision, sharding)
    section = copy.deepcopy(strategy.deepspeed["zero_optimization"])
    weights = subject.weights_of(strategy.layout)
    fill_by_sizes(section, weights.trained, weights.trained + weights.frozen)
    hidden = _hidden_size(subject.config)
    for key, value_of in BY_HIDDEN_SIZE.items():
        if section.get(key) == "auto":
            section[key] = value_of(hidden)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = {key: value for key, value in section.items() if value != "auto"}
    return Resolved(name, strategy.layout, strategy.precision, DeepSpeedZeroConfig(**section))


def _hidden_size(config) -> int:
    sizes = getattr(config, "hidden_sizes", None)
    return getattr(config, "hidden_size", None) or (max(sizes) if sizes else config.get_text_config().hidden_size)
