"""The engine that a strategy asks for."""

from typing import TYPE_CHECKING, Any

import torch

from zerofit.recipe.options import OptimizerOptions
from zerofit.recipe.schedule import Schedule
from zerofit.strategy.base_engine import BaseEngine
from zerofit.strategy.deepspeed_engine import DeepSpeedEngine
from zerofit.strategy.engine import Engine
from zerofit.strategy.fsdp_engine import FullyShardedEngine
from zerofit.strategy.inference import InferenceEngine
from zerofit.strategy.strategy import Strategy
from zerofit.strategy.torch_engine import TorchEngine

if TYPE_CHECKING:
    from accelerate import Accelerator

# Freeing a DDP model frees its process group, and torch's destructor of a gloo group waits, with the interpreter's
# lock held, for a thread that may be waiting for that lock: a run that had finished hung for good once in some
# hundreds of launches. So neither is ever freed nor the group destroyed; zerofit.recipe.errors.leave ends the process.
NEVER_FREED: list[Engine] = []


def prepare_engine(
    strategy: Strategy, accelerator: "Accelerator", model: Any, recipe: OptimizerOptions, schedule: Schedule | None
) -> Engine:
    """Shard, wrap and place the model and its optimizer as the strategy says."""
    kind: type[BaseEngine] = DeepSpeedEngine if strategy.deepspeed is not None else TorchEngine
    if strategy.fully_shards:
        kind = FullyShardedEngine
    elif not recipe.trains:
        kind = InferenceEngine
    if strategy.pipeline > 1:
        from zerofit.strategy.pipeline_engine import PipelineEngine, PipelineInference  # which load DeepSpeed

        kind = PipelineEngine if recipe.trains else PipelineInference
    engine = kind(strategy, accelerator, model, recipe, schedule)
    if torch.distributed.is_initialized():
        NEVER_FREED.append(engine)
    return engine
