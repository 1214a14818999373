"""The engine that a strategy asks for."""

from typing import TYPE_CHECKING, Any

import torch

from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.engine import Engine
from zerofit.strategy.engines import DeepSpeedEngine, FullyShardedEngine, TorchEngine
from zerofit.strategy.layout import initializing_deepspeed
from zerofit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from accelerate import Accelerator

# Freeing a DDP model frees its process group, and torch's destructor of a gloo group waits, with the interpreter's
# lock held, for a thread that may be waiting for that lock: a run that had finished hung for good once in some
# hundreds of launches. So neither is ever freed nor the group destroyed; zerofit.recipe.errors.leave ends the process.
KEPT_ENGINES: list[Engine] = []


class InferenceEngine(Engine):
    """Engine that only evaluates and generates, under every strategy but FSDP2 and a pipeline. ZeRO-1 and ZeRO-2 shard
    what training holds beside the weights, and DeepSpeed has no such stage without an optimizer: each rank has the
    full model, as in training. ZeRO-3 shards the weights here as well."""

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        model.requires_grad_(False)
        if self.strategy.shards_parameters:
            with initializing_deepspeed(self.layout):
                self.engine = self.accelerator.prepare(model)
            return self.engine
        if self.strategy.deepspeed is not None:  # in its dtype already, and no autocast
            return model if getattr(model, "hf_quantizer", None) is not None else model.to(self.device)
        return self.accelerator.prepare_model(model, evaluation_mode=True)


def prepare_engine(
    strategy: Strategy, accelerator: "Accelerator", model: Any, recipe: OptimizerOptions, optimizer: Any
) -> Engine:
    """Shard, wrap and place the model and its optimizer as the strategy says."""
    kind: type[Engine] = DeepSpeedEngine if strategy.deepspeed is not None else TorchEngine
    if strategy.fully_shards:
        kind = FullyShardedEngine
    elif not recipe.trains:
        kind = InferenceEngine
    if strategy.pipeline > 1:
        from zerofit.strategy.pipeline_engine import PipelineEngine, PipelineInference  # which load DeepSpeed

        kind = PipelineEngine if recipe.trains else PipelineInference
    engine = kind(strategy, accelerator, model, recipe, optimizer)
    if torch.distributed.is_initialized():
        KEPT_ENGINES.append(engine)
    return engine
