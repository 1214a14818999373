"""A resolved strategy for one model: its settings that depend on the model's size, and its states."""

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.estimate.fully_sharded import Fsdp2Settings, fully_sharded_states
from zerofit.estimate.model_states import ModelStates, first_stages_states, third_stage_states, torch_states
from zerofit.estimate.traced_steps import Stage, expert_names
from zerofit.estimate.weights import MASTER_BYTES
from zerofit.strategy.deepspeed_config import fill_by_sizes
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from zerofit.estimate.planned_model import PlannedModel

AUTO_SIZES = {  # the values that accelerate sets for "auto" under stage 3 (accelerator.py, _prepare_deepspeed)
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy that is fully resolved for a model. `sharding`: DeepSpeed's configuration object, or the settings of
    FSDP2; None without either."""

    name: str
    layout: ParallelLayout
    precision: str
    sharding: Any

    @property
    def zero(self) -> Any:
        """DeepSpeed's configuration object; None without DeepSpeed."""
        return None if isinstance(self.sharding, Fsdp2Settings) else self.sharding

    @property
    def shards_parameters(self) -> bool:
        """True if ZeRO-3 shards the weights."""
        return self.zero is not None and int(self.zero.stage) == 3

    @property
    def divides_experts(self) -> bool:
        return bool(getattr(self.sharding, "divided", ()))

    @property
    def shards_weights(self) -> bool:
        return isinstance(self.sharding, Fsdp2Settings) or self.shards_parameters

    @property
    def optimizer_ranks(self) -> int:
        """The number of ranks that share the optimizer's work."""
        return 1 if self.sharding is None else self.layout.shard_size

    def states(self, model: "PlannedModel", accumulates: bool, stage: Stage | None = None) -> ModelStates:
        """Return the states of the rank that holds the most. `accumulates`: an update has several micro-batches."""
        trained, frozen = model.dtypes(self)
        local = model.weights_of(self.layout, stage)
        shard_ranks = self.layout.shard_size
        if isinstance(self.sharding, Fsdp2Settings):
            states = fully_sharded_states(local, shard_ranks, trained, model.on_gpu, self.sharding)
        elif self.zero is None:
            states = torch_states(local, shard_ranks, trained, frozen, model.on_gpu, optim=model.recipe.optim)
        elif self.shards_parameters:
            states = third_stage_states(
                local, self.zero, shard_ranks, trained.itemsize, model.on_gpu, keeps_layers=model.keeps_layers
            )
        else:
            states = first_stages_states(local, self.zero, shard_ranks, trained, accumulates, on_gpu=model.on_gpu)
        weights = model.weights
        ranks = self.optimizer_ranks
        if not weights.matrices:
            return states
        half = self.precision != "fp32"
        is_split = self.shards_weights and ranks > 1
        gradient_bytes = 0  # per element, in DeepSpeed's step: in fp32, under ZeRO-3 also in half precision
        if self.zero is not None:
            gradient_bytes = MASTER_BYTES + 2 * (half and self.shards_weights)
        elements = sum(weight.size for weight in weights.matrices)
        workspace = weights.muon_workspace(half, is_split) + gradient_bytes * elements // ranks
        return replace(states, step={**states.step, "workspace": max(states.step["workspace"], workspace)})


def plan_strategy(name: str, strategy: Strategy, model: "PlannedModel") -> PlannedStrategy:
    """Return a strategy with the settings that follow from the model: sizes of buckets and thresholds."""
    if strategy.deepspeed is None:
        sharding = None
        if strategy.fully_shards:
            divided = expert_names(model.full) if strategy.divides_experts else frozenset()
            sharding = Fsdp2Settings(
                strategy.reshards, strategy.syncs_each_batch, divided, 2 if strategy.reduces_in_half else 4
            )
        return PlannedStrategy(name, strategy.layout, strategy.precision, sharding)
    section = copy.deepcopy(strategy.deepspeed["zero_optimization"])
    weights = model.weights_of(strategy.layout)
    fill_by_sizes(section, weights.trained, weights.trained + weights.frozen)
    sizes = getattr(model.config, "hidden_sizes", None)
    hidden = getattr(model.config, "hidden_size", None)
    hidden = hidden or (max(sizes) if sizes else model.config.get_text_config().hidden_size)
    for key, value_of in AUTO_SIZES.items():
        if section.get(key) == "auto":
            section[key] = value_of(hidden)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = {key: value for key, value in section.items() if value != "auto"}
    return PlannedStrategy(name, strategy.layout, strategy.precision, DeepSpeedZeroConfig(**section))
