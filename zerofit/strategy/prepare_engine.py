"""The choice of the engine that runs a strategy."""

from typing import TYPE_CHECKING, Any

import torch

from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.engine import Engine
from zerofit.strategy.engines import DeepSpeedEngine, FullyShardedEngine, TorchEngine
from zerofit.strategy.layout import initializing_deepspeed
from zerofit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from accelerate import Accelerator

# Freeing a DDP model frees its process group. torch's destructor of a gloo group holds the GIL while it waits for a
# thread, which may itself wait for the GIL: one in some hundreds of launches hung forever after its run had finished.
# So engines are never freed, nor groups destroyed; zerofit.recipe.errors.leave ends the process.
KEPT_ENGINES: list[Engine] = []


class InferenceEngine(Engine):
    """The engine that only evaluates and generates, for all strategies except FSDP2 and pipelines. Under ZeRO-1 and
    ZeRO-2 each rank has the full model, as in training: these stages shard gradients and optimizer states only, and
    DeepSpeed refuses them without an optimizer. ZeRO-3 shards the weights here, too."""

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        model.requires_grad_(False)
        if self.strategy.shards_parameters:
            with initializing_deepspeed(self.layout):
                self.engine = self.accelerator.prepare(model)
            return self.engine
        if self.strategy.deepspeed is not None:  # without autocast: the model has its dtype already
            return model if getattr(model, "hf_quantizer", None) is not None else model.to(self.device)
        return self.accelerator.prepare_model(model, evaluation_mode=True)


def prepare_engine(
    strategy: Strategy, accelerator: "Accelerator", model: Any, recipe: OptimizerOptions, optimizer: Any
) -> Engine:
    """Shard, wrap and place the model and its optimizer as the strategy says. Return the engine that runs them."""
    kind: type[Engine] = DeepSpeedEngine if strategy.deepspeed is not None else TorchEngine
    if strategy.fully_shards:
        kind = FullyShardedEngine
    elif not recipe.trains:
        kind = InferenceEngine
    if strategy.pipeline > 1:
        from zerofit.strategy.pipeline_engine import PipelineEngine, PipelineInference  # imports DeepSpeed

        kind = PipelineEngine if recipe.trains else PipelineInference
    engine = kind(strategy, accelerator, model, recipe, optimizer)
    if torch.distributed.is_initialized():
        KEPT_ENGINES.append(engine)
    return engine
