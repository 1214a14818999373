"""ZeRO of any stage, through DeepSpeed's engine."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from zerofit.compat.deepspeed import SplitStep
from zerofit.model.tensor_parallel.cut import join_shares
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.deepspeed_config import fill_bucket_size
from zerofit.strategy.disk import DiskState, own_folder, remove_disk_folder
from zerofit.strategy.engine import Engine
from zerofit.strategy.layout import initializing_deepspeed
from zerofit.strategy.state import FlatState, OptimizerState, ShardedState
from zerofit.strategy.torch_engine import gradient_norm


def norm_at_once(combine: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a faster `get_grad_norm_direct`: one call for a group of gradients, not one for each gradient. `combine`:
    the method of a ZeRO optimizer, (gradients, their parameters) -> the norm over all ranks; it gets the norm of each
    group in place of its gradients, with one parameter of the group. A group has the parameters that DeepSpeed treats
    alike when it counts each weight once: split by tensor parallelism or not, held by several stages or not."""
    from deepspeed.runtime.utils import is_model_parallel_parameter

    def norm(gradients: list[torch.Tensor], parameters: list[Any], **kwargs: Any) -> torch.Tensor:
        kinds: dict[Any, tuple[Any, list[torch.Tensor]]] = {}
        of_parameters = (each for each in gradients if not SplitStep.is_padding(each))
        for gradient, parameter in zip(of_parameters, parameters):
            kind = is_model_parallel_parameter(parameter), getattr(parameter, "ds_pipe_replicated", False)
            kinds.setdefault(kind, (parameter, []))[1].append(gradient)
        norms = [gradient_norm(alike) for _, alike in kinds.values()]
        return combine(norms, [parameter for parameter, _ in kinds.values()], **kwargs)

    return norm


class DeepSpeedEngine(Engine):
    """Engine of ZeRO of any stage, with or without offload."""

    _folder: Path | None = None  # of this process, for an optimizer on a disk

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        zero = config["zero_optimization"]
        if isinstance(optimizer, torch.optim.Optimizer):  # the script's own: it takes the place of the file's
            config.pop("optimizer", None)
            config.setdefault("zero_force_ds_cpu_optimizer", False)  # with offload any other is refused
        fill_bucket_size(zero, model)
        if self.strategy.optimizer_device == "nvme":
            self._folder = own_folder(zero["offload_optimizer"]["nvme_path"])
            zero["offload_optimizer"]["nvme_path"] = str(self._folder)
        with initializing_deepspeed(self.layout):
            self.engine = self.accelerator.prepare(model, optimizer)[0]
        self.torch_optimizer = self.engine.optimizer.optimizer
        self._split = SplitStep(self.engine.optimizer, self.strategy.shards_parameters, norm_at_once)
        return self.engine

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        if self.strategy.shards_parameters and self.layout.sequence > 1:
            # ZeRO-1 and ZeRO-2 average gradients over replicas, ZeRO-3 over all ranks (coalesced_collectives.py).
            loss = loss * self.layout.sequence
        self.engine.backward(loss, scale_wrt_gas=False)

    def gradient_norm(self) -> float:
        if self.strategy.offloads_optimizer and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # gradients are on their way to the host
        return self._split.norm()

    def clip_and_step(self) -> None:
        self._split.run(self._take_step, discards=False)

    def skip_step(self) -> None:
        self._split.run(self._take_step, discards=True)

    def _take_step(self) -> None:
        self.engine.step()

    def _state(self) -> OptimizerState:
        if self._folder is not None:
            return DiskState(self, self._folder)
        return ShardedState(self) if self.strategy.shards_parameters else FlatState(self)

    def close(self) -> None:
        super().close()
        if self._folder is not None:
            remove_disk_folder(self._folder)

    def loss_scale(self) -> dict[str, Any]:
        if self.strategy.precision != "fp16":
            return {}
        scaler = vars(self.engine.optimizer.loss_scaler)
        return {name: value for name, value in scaler.items() if isinstance(value, (int, float))}

    def continue_from(self, loss_scale: dict[str, Any]) -> None:
        if loss_scale and self.strategy.precision == "fp16":
            vars(self.engine.optimizer.loss_scaler).update(loss_scale)

    def _in_full(self, parameters: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        # ZeRO-3 fetches ahead, and with recomputed activations it fetches more than the last pass of an evaluation
        # uses; weights on their way cannot be put away again ("Cannot partition a param in flight").
        if self.strategy.shards_parameters:
            self.engine.empty_partition_cache()
        yield from super()._in_full(parameters)

    def _joined(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        share, cut = parameter.detach(), getattr(parameter, "cut", None)
        return share if cut is None else join_shares(share, cut, self.strategy.tensor_group())
