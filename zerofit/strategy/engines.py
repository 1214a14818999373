"""The engines of one process and DDP, of FSDP2, and of ZeRO. That of pipelines is in pipeline_engine.py.

FSDP2 is torch's fully_shard: it shards weights, gradients and optimizer state, block by block.

These groups of weights are gathered and reduced together: each block; the embedding, and the final norm with the head,
if they are not tied, so that they are exchanged while blocks compute; and the remaining weights.

accelerate's own FSDP does nothing on a host without a GPU (1.15: DistributedType is NO there, and each rank trains
alone, or MULTI_CPU), and it loads the full model before it shards it. So the engine calls torch directly.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerofit.compat.deepspeed import SplitStep
from zerofit.compat.torch import norms_of
from zerofit.model.compilation import blocks_of, embedding_and_head_of
from zerofit.model.parameters import replace_parameters
from zerofit.model.stages import copy_without_weights, meta_parameters
from zerofit.model.tensor_parallel import join_shares, shard_rows
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.deepspeed_config import fill_bucket_size
from zerofit.strategy.engine import Bounds, Engine, Outcome
from zerofit.strategy.expert_parallel import dispatch, find_experts
from zerofit.strategy.layout import initializing_deepspeed
from zerofit.strategy.optimizers import SHARDABLE, ReplicatedOptimizerState
from zerofit.strategy.state import (
    DiskState,
    FlatState,
    OptimizerState,
    ReplicatedState,
    RowState,
    ShardedState,
    own_folder,
    remove_disk_folder,
)


def gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients together, a scalar in fp32, even of gradients in half precision. On a CPU the
    squares are summed in fp64: torch's fp32 norm adds them one after another there, and is too small by 5e-5 for a
    tensor of 0.8 M elements and by 0.4 % for one of 50 M."""
    wide = torch.float64 if gradients and gradients[0].device.type == "cpu" else torch.float32
    norms = norms_of(gradients, wide)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


class TorchEngine(Engine):
    """The engine of one process, and of DDP."""

    optimizer: Any  # accelerate's wrapper

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        self.optim = recipe.optim
        model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.torch_optimizer = self.optimizer.optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.layout.world_size > 1:
            # A backward pass of zeros makes gradients views of DDP's buckets. Without it, the gradients of the first
            # micro-batches would take extra memory until the all-reduce.
            zeros: Any = sum(0.0 * parameter.sum() for parameter in self.parameters)
            model.reducer.prepare_for_backward([zeros])
            zeros.backward()
        return model

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        # It includes the forward pass, in which DDP decides whether the backward pass reduces gradients.
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    @property
    def decides_on_device(self) -> bool:
        """True if the optimizer's kernel itself skips a refused update, as torch's fused AdamW does."""
        optimizer = self.torch_optimizer
        fused = type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
        has_fp64 = self.device.type not in ("mps", "hpu")
        return bool(fused and has_fp64 and self.accelerator.scaler is None and not self.ema_decay)

    def _step(self, losses: list[torch.Tensor], bounds: Bounds) -> Outcome:
        """Decide about an update on the device, if the optimizer's kernel can skip it: the host reads loss, norm and
        verdict while the optimizer steps."""
        if not self.decides_on_device:
            return super()._step(losses, bounds)
        norm = self._global_norm()
        report = torch.tensor(bounds.report, dtype=torch.float64).to(self.device, non_blocking=True)
        row = torch.cat([torch.stack([torch.as_tensor(sum(losses)).double(), norm.double()]), report])
        rows = row[None] if self.layout.world_size == 1 else self.accelerator.gather(row[None])
        norm = rows[0, 1]  # rank 0's, so that all decide alike
        refused = (~bounds.accept(rows[:, 0].sum(), norm)).float()
        # 1 / the clipping factor. Nothing is clipped here: the fused kernel divides gradients by it as it steps.
        divisor = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0).float() if self.max_grad_norm > 0 else None
        figures = torch.cat([refused.double()[None], rows.flatten()]).to("cpu", non_blocking=True)
        copied = torch.Event(self.device.type) if self.device.type != "cpu" else None
        if copied is not None:
            copied.record()
        optimizer = self.torch_optimizer
        # torch.amp.GradScaler sets these two
        optimizer.found_inf = refused
        optimizer.grad_scale = divisor
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale
        self._drop_gradients()

        def read() -> tuple[bool, list[list[float]]]:
            if copied is not None:
                copied.synchronize()
            return bool(figures[0]), figures[1:].view(rows.shape).tolist()

        return Outcome(losses, read, self.layout.loss_ranks)

    def trained(self) -> list[torch.Tensor]:
        """Return this rank's shards of the trainable parameters, with their gradients."""
        return self.parameters

    def gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self.trained() if each.grad is not None]

    def _global_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients: a scalar on the device, equal on all ranks."""
        self.accelerator.unscale_gradients()
        return gradient_norm(self.gradients())

    def gradient_norm(self) -> float:
        self._norm = self._global_norm()
        return float(self._norm)

    def clip_and_step(self) -> None:
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.trained(), self.max_grad_norm, self._norm)
        self.optimizer.step()
        self._drop_gradients()

    def skip_step(self) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # without it the next unscale_ raises: the scaler counts this as a step
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        # Under DDP, gradients are views of its buckets, and stay views.
        self.optimizer.zero_grad(set_to_none=self.layout.world_size == 1)

    def _state(self) -> OptimizerState:
        if self.optim in SHARDABLE:
            return ReplicatedState(self)
        return ReplicatedOptimizerState(self, self.optim)

    def loss_scale(self) -> dict[str, Any]:
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else {}

    def continue_from(self, loss_scale: dict[str, Any]) -> None:
        if loss_scale and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(loss_scale)


class FullyShardedEngine(TorchEngine):
    """The engine of FSDP2: weights, gradients and optimizer state are sharded by rows.

    Attributes:
        sharded: {name: parameter} of the module, each a DTensor; the module itself has some in full at times.
        experts: the parameters that are never gathered: tokens are sent to them.
        rows: {trainable parameter: its rows here, a plain tensor in the same memory}. The optimizer has these:
            torch's fused step does not take `found_inf` and `grad_scale` together with DTensors.
    """

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        self.whole = copy_without_weights(model)
        if not recipe.trains:
            model.requires_grad_(False)
        before = dict(model.named_parameters())
        self.optimizer = optimizer
        self.torch_optimizer = optimizer
        modules = find_experts(model) if self.strategy.divides_experts else []
        self._shard(model, modules)
        self.sharded: dict[str, Any] = dict(model.named_parameters())  # DTensors
        self.experts: list[Any] = [parameter for module in modules for parameter in module.parameters()]
        self.parameters: list[Any] = [parameter for parameter in self.sharded.values() if parameter.requires_grad]
        self.rows = {parameter: parameter.detach().to_local() for parameter in self.parameters}
        if optimizer is not None:
            sharded = {id(parameter): self.sharded[name] for name, parameter in before.items()}
            for group in optimizer.param_groups:
                group["params"] = [self.rows[sharded[id(parameter)]] for parameter in group["params"]]
        return model

    def _shard(self, model: Any, experts: list[torch.nn.Module]) -> None:
        """Shard each block, and the weights outside of blocks; divide the experts. This rank's rows replace the
        weights, so that no weight is materialized in full."""
        half = self.strategy.compute_dtype if self.strategy.precision != "fp32" else None
        reduced = torch.bfloat16 if self.strategy.reduces_in_half else torch.float32 if half else None
        policy = MixedPrecisionPolicy(half, reduced, cast_forward_inputs=False)
        shards = self.layout.shard_size
        replicas = self.layout.dp_replicate
        if replicas == 1:
            mesh = init_device_mesh(self.device.type, (shards,))
        else:  # neighbouring ranks share a replica's weights
            mesh = init_device_mesh(self.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
        rows = {name: self._rows(parameter) for name, parameter in model.named_parameters()}
        replace_parameters(model, meta_parameters(model))
        blocks = blocks_of(model)
        divided = {each for module in experts for each in module.parameters()}
        self.blocks = len(blocks)
        embedding, last = embedding_and_head_of(model)
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": divided}
        for block in [*blocks, *embedding]:
            fully_shard(block, reshard_after_forward=self.strategy.reshards, **common)
        if last:
            fully_shard(last, reshard_after_forward=False, **common)  # the backward pass begins with it
        for table in embedding:
            cast(FSDPModule, table).set_unshard_in_backward(False)  # its gradient needs only the tokens
        fully_shard(model, **common)
        if experts:
            # A mesh of this rank alone. Each call makes a process group for every rank.
            alone = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("expert", "shared"))["shared"]
            for module in experts:
                dispatch(module, mesh, alone, half)
            # The host waits for the numbers of tokens in each block: the next gather must start before that.
            for block, following in itertools.pairwise(blocks):
                cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
                cast(FSDPModule, following).set_modules_to_backward_prefetch([cast(FSDPModule, block)])
        sharded: dict[int, Any] = {}
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        for name, parameter in model.named_parameters():
            local = rows[name].to(self.device)
            shard = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            sharded[id(parameter)] = torch.nn.Parameter(shard, parameter.requires_grad)
        replace_parameters(model, sharded)
        # Without it, the first block that is called becomes a root: `generate` calls an encoder before the model.
        cast(Any, fully_shard).state(model)._lazy_init()

    def _sharing_group(self) -> Any:
        mesh = self.parameters[0].device_mesh
        return mesh.get_group(mesh.ndim - 1)

    def _rows(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's rows of a parameter."""
        if hasattr(parameter, "cut"):
            return parameter.detach()
        start, stop = shard_rows(len(parameter), self.layout.shard_rank, self.layout.shard_size)
        return parameter.detach()[start:stop].clone()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if not self.strategy.syncs_each_batch:
            self.module.set_requires_gradient_sync(last)
        elif self.layout.dp_replicate > 1:  # shards are summed, and reduced between machines once
            self.module.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    @torch.no_grad()  # otherwise DTensor.to_local runs an autograd function each time
    def trained(self) -> list[torch.Tensor]:
        for parameter, rows in self.rows.items():
            rows.grad = parameter.grad.to_local() if parameter.grad is not None else None
        return list(self.rows.values())

    @torch.no_grad()
    def _global_norm(self) -> torch.Tensor:
        self.forget_gathered()  # a script may have called the model without a backward pass
        for parameter in self.experts:  # a sum over all ranks; fully_shard makes means
            if parameter.grad is not None:
                parameter.grad.to_local().div_(self.layout.world_size)
        square = super()._global_norm() ** 2  # this rank's share
        torch.distributed.all_reduce(square)
        return (square / self.layout.dp_replicate).sqrt()

    def _drop_gradients(self) -> None:
        for tensor in (*self.rows.keys(), *self.rows.values()):
            tensor.grad = None

    def _state(self) -> OptimizerState:
        return RowState(self)

    def forget_gathered(self) -> None:
        """Free gathered weights: a forward pass without a backward pass leaves some."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def shards(self) -> list[torch.Tensor]:
        return [parameter.detach().to_local() for parameter in self.sharded.values()]

    def _named_parameters(self) -> dict[str, Any]:
        return self.sharded

    def _joined(self, parameter: Any) -> torch.Tensor:
        return parameter.detach().full_tensor()

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        self.module.unshard()  # weights outside of blocks: generate calls an encoder without the model's forward
        try:
            return super().generate(input_ids, attention_mask, **kwargs)
        finally:
            self.forget_gathered()

    def effective_strategy(self) -> dict[str, Any]:
        fsdp = {
            "version": 2,
            "reshard_after_forward": self.strategy.reshards,
            "blocks": self.blocks,
            "replicas": self.layout.dp_replicate,
            "sync_each_batch": self.strategy.syncs_each_batch,
            "gathered_in": self.strategy.precision,
            "reduced_in": "bf16" if self.strategy.reduces_in_half else "fp32",
            "divides_experts": self.strategy.divides_experts,
        }
        return {**super().effective_strategy(), "distributed_type": "FSDP", "fsdp": fsdp}


def norm_at_once(combine: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a faster `get_grad_norm_direct`: one call for a group of gradients, not one for each gradient. `combine`:
    the method of a ZeRO optimizer, (gradients, their parameters) -> the norm over all ranks; it gets the norm of each
    group instead of its gradients, with one parameter of the group. A group has the parameters that DeepSpeed treats
    alike to count each weight once: split by tensor parallelism or not, in several stages or not."""
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
    """The engine of ZeRO, any stage, with or without offload."""

    _folder: Path | None = None  # this process's, for an optimizer on a disk

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        zero = config["zero_optimization"]
        if isinstance(optimizer, torch.optim.Optimizer):  # the script's own replaces the file's
            config.pop("optimizer", None)
            config.setdefault("zero_force_ds_cpu_optimizer", False)  # with offload DeepSpeed refuses others
        fill_bucket_size(zero, model)
        if self.strategy.optimizer_device == "nvme":
            self._folder = own_folder(zero["offload_optimizer"]["nvme_path"])
            zero["offload_optimizer"]["nvme_path"] = str(self._folder)
        with initializing_deepspeed(self.layout):
            self.engine = self.accelerator.prepare(model, optimizer)[0]
        self.torch_optimizer = self.engine.optimizer.optimizer
        self.adds_calls = self.strategy.shards_parameters  # other stages clear what they reduced before
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
            torch.accelerator.synchronize()  # gradients are copied to the host
        return self._split.norm()

    def clip_and_step(self) -> None:
        self.engine.optimizer.clip_grad = self.max_grad_norm
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
        # ZeRO-3 prefetches, and with recomputed activations it prefetches more than the last pass of an evaluation
        # uses; weights in flight cannot be released ("Cannot partition a param in flight").
        if self.strategy.shards_parameters:
            self.engine.empty_partition_cache()
        yield from super()._in_full(parameters)

    def _joined(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        share = parameter.detach()
        cut = getattr(parameter, "cut", None)
        return share if cut is None else join_shares(share, cut, self.strategy.tensor_group())
