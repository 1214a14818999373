"""The prepared model where nothing is trained: no optimizer, no gradients, nothing to shard but weights."""

from typing import Any

import torch

from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.base_engine import BaseEngine
from zerofit.strategy.grid import initializing_deepspeed
from zerofit.strategy.state import OptimizerState


class InferenceEngine(BaseEngine):
    """Evaluates and generates under every strategy.

    ZeRO-1 and ZeRO-2 shard what training holds beside the weights, and DeepSpeed has no such stage without an
    optimizer: each rank has the full model, as in training. ZeRO-3 shards the weights here as well.
    """

    def _prepare(self, model: Any, recipe: OptimizerOptions) -> Any:
        model.requires_grad_(False)
        if self.strategy.shards_parameters:
            with initializing_deepspeed(self.layout):
                self.engine = self.accelerator.prepare(model)
            return self.engine
        if self.strategy.deepspeed is not None:  # in its dtype already, and no autocast
            return model if getattr(model, "hf_quantizer", None) is not None else model.to(self.device)
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    def _state(self) -> OptimizerState | None:
        return None

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        return None
