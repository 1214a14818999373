"""ZeRO of any stage, through DeepSpeed's engine."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from zerofit.model.tensor_parallel.cut import join_shares
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.deepspeed_config import fill_bucket_size
from zerofit.strategy.disk import DiskState, keeps_optimizer_on_disk, own_folder, remove
from zerofit.strategy.engine import Engine
from zerofit.strategy.layout import initializing_deepspeed
from zerofit.strategy.state import FlatState, OptimizerState, ShardedState
from zerofit.strategy.torch_engine import gradient_norm


def norm_at_once(combine: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Take the norm of a partition's gradients in one call each for those that DeepSpeed counts on all ranks alike.

    Args:
        combine: `get_grad_norm_direct` of a ZeRO optimizer, (gradients, their parameters) -> the norm over all ranks,
            which casts and measures one gradient after another. It is given norms in the place of gradients: whether a
            rank counts them is said by a parameter's being cut (tensor parallelism), or in several stages.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    def norm(gradients: list[torch.Tensor], parameters: list[Any], **kwargs: Any) -> torch.Tensor:
        kinds: dict[Any, tuple[Any, list[torch.Tensor]]] = {}
        of_parameters = (each for each in gradients if not getattr(each, "_zero_padding", False))
        for gradient, parameter in zip(of_parameters, parameters):
            kind = is_model_parallel_parameter(parameter), getattr(parameter, "ds_pipe_replicated", False)
            kinds.setdefault(kind, (parameter, []))[1].append(gradient)
        norms = [gradient_norm(alike) for _, alike in kinds.values()]
        return combine(norms, [parameter for parameter, _ in kinds.values()], **kwargs)

    return norm


class DeepSpeedEngine(Engine):
    """ZeRO of any stage, with or without offload."""

    _folder: Path | None = None  # of this process, for an optimizer on a disk

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        zero = self.accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        fill_bucket_size(zero, model)
        if keeps_optimizer_on_disk(zero):
            self._folder = own_folder(zero["offload_optimizer"]["nvme_path"])
            zero["offload_optimizer"]["nvme_path"] = str(self._folder)
        with initializing_deepspeed(self.layout):
            self.engine = self.accelerator.prepare(model, optimizer)[0]
        self._decide_before_step(self.engine.optimizer)
        return self.engine

    def _decide_before_step(self, optimizer: Any) -> None:
        """DeepSpeed takes the norm, and decides whether to step, within its optimizer's `step`. Let that use the norm
        that `gradient_norm` has taken before, and end, where `discard` says so, as it ends after an overflow: every
        ZeRO optimizer decides in `_update_scale`, and drops the gradients; only the loss scale stays here."""
        if not hasattr(optimizer, "_update_scale"):
            self._decide_before_bf16_step(optimizer)
            return
        from deepspeed.runtime.utils import combine_grad_norm_groups

        optimizer.get_grad_norm_direct = norm_at_once(optimizer.get_grad_norm_direct)
        name = "_get_norm_groups" if self.strategy.shards_parameters else "scaled_global_norm"
        take_norm, update_scale = getattr(optimizer, name), optimizer._update_scale

        def norm_before_step() -> float:
            if hasattr(optimizer, "_wait_for_offload_copies"):  # ZeRO-1 and ZeRO-2; `step` begins with it
                optimizer._wait_for_offload_copies()
            self._norm = take_norm()
            norms = self._norm if isinstance(self._norm, list) else [self._norm]
            return float(combine_grad_norm_groups(norms)) / optimizer.loss_scale

        def update_scale_unless_discarded(has_overflow: bool = False) -> None:
            if self._discards:
                optimizer.overflow = True
            else:
                update_scale(has_overflow)

        self._take_norm = norm_before_step
        setattr(optimizer, name, lambda *args, **kwargs: self._norm)
        optimizer._update_scale = update_scale_unless_discarded

    def _decide_before_bf16_step(self, optimizer: Any) -> None:
        """The same of the BF16_Optimizer, which adds gradients up in fp32 (under ZeRO-1 and bf16, where the JSON's
        data_types.grad_accum_dtype says so). It steps unless the norm is no number, of which DeepSpeed makes -1
        (runtime/utils.py, get_global_norm_of_tensors)."""
        from deepspeed.runtime import bf16_optimizer

        take_norm = bf16_optimizer.get_global_norm_of_tensors

        def norm_before_step() -> float:
            tensors, _ = optimizer.get_grads_for_norm()
            self._norm = take_norm(input_tensors=tensors, mpu=optimizer.mpu, norm_type=optimizer.norm_type)
            return float(self._norm) if self._norm >= 0 else math.nan

        self._take_norm = norm_before_step
        bf16_optimizer.get_global_norm_of_tensors = lambda **_: self._norm
        bf16_optimizer.is_invalid_grad_norm = lambda _: self._discards

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        if self.strategy.shards_parameters and self.layout.sequence > 1:
            # ZeRO-1 and ZeRO-2 average gradients over replicas, ZeRO-3 over all ranks (coalesced_collectives.py).
            loss = loss * self.layout.sequence
        self.engine.backward(loss, scale_wrt_gas=False)

    def gradient_norm(self) -> float:
        return self._take_norm()

    def apply(self) -> None:
        self._discards = False
        self._take_step()

    def discard(self) -> None:
        self._discards = True
        self._take_step()

    def _take_step(self) -> None:
        self.engine.step()

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        return self.engine.optimizer.optimizer

    def _state(self) -> OptimizerState | None:
        if self._folder is not None:
            return DiskState(self, self._folder)
        return ShardedState(self) if self.strategy.shards_parameters else FlatState(self)

    def close(self) -> None:
        super().close()
        if self._folder is not None:
            remove(self._folder)

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
