"""FSDP2: torch's fully_shard shards weights, gradients and optimizer state, block by block.

Groups of weights that are gathered and reduced together: each block; the embedding, and the final norm with the head,
where these are not tied, so that they travel while blocks compute; what is in none of these.

accelerate's own FSDP does not engage on a host without a GPU (1.15: DistributedType is NO there, and each rank is
alone, or MULTI_CPU), and it loads the full model before it shards it. So the engine calls torch itself.
"""

import contextlib
import itertools
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerofit.model.compilation import blocks_of, ends_of
from zerofit.model.parameters import replace_parameters
from zerofit.model.stages import empty_parameters, without_weights
from zerofit.model.tensor_parallel.cut import shard_rows
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.expert_parallel import dispatch, experts_of, mesh_of_one
from zerofit.strategy.state import OptimizerState, RowState
from zerofit.strategy.torch_engine import TorchEngine


class FullyShardedEngine(TorchEngine):
    """Engine of FSDP2: weights, gradients and optimizer state are sharded by rows.

    Attributes:
        sharded: {name: parameter} of the module, each a DTensor; the module itself may have one in full for a while.
        experts: those of the parameters that are never gathered, as tokens travel to them.
        rows: {parameter that is trained: this rank's rows of it, a plain tensor in the same memory}. The optimizer has
            these: torch's fused step does not take `found_inf` and `grad_scale` together with DTensors.
    """

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        self.whole = without_weights(model)
        if not recipe.trains:
            model.requires_grad_(False)
        before, self.optimizer = dict(model.named_parameters()), optimizer
        self.torch_optimizer = optimizer
        modules = experts_of(model) if self.strategy.divides_experts else []
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
        """Shard each block, and what is in none of them; divide the experts. The rows that this rank has are put in
        their place, so that no weight has to be there in full."""
        half = self.strategy.compute_dtype if self.strategy.precision != "fp32" else None
        reduced = torch.bfloat16 if self.strategy.reduces_in_half else torch.float32 if half else None
        policy = MixedPrecisionPolicy(half, reduced, cast_forward_inputs=False)
        mesh = self._mesh()
        rows = {name: self._rows(parameter) for name, parameter in model.named_parameters()}
        replace_parameters(model, empty_parameters(model))
        blocks, divided = blocks_of(model), {each for module in experts for each in module.parameters()}
        self.blocks, (embedding, last) = len(blocks), ends_of(model)
        common: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": divided}
        for block in [*blocks, *embedding]:
            fully_shard(block, reshard_after_forward=self.strategy.reshards, **common)
        if last:
            fully_shard(last, reshard_after_forward=False, **common)  # the backward pass begins with it
        for table in embedding:
            cast(FSDPModule, table).set_unshard_in_backward(False)  # its gradient needs the tokens only
        fully_shard(model, **common)
        alone = mesh_of_one(mesh) if experts else None
        for module in experts:
            dispatch(module, mesh, alone, half)
        if experts:  # the host waits for the tokens' numbers in each block: what comes next must be under way before
            for block, following in itertools.pairwise(blocks):
                cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])
                cast(FSDPModule, following).set_modules_to_backward_prefetch([cast(FSDPModule, block)])
        own = {
            id(each): torch.nn.Parameter(self._as_shard(rows[name], each, mesh), each.requires_grad)
            for name, each in model.named_parameters()
        }
        replace_parameters(model, own)
        # Else the first block that is called becomes a root: `generate` calls an encoder before the model.
        cast(Any, fully_shard).state(model)._lazy_init()

    def _mesh(self) -> DeviceMesh:
        """Make the mesh of all ranks; with replicas (replicas, ranks that share one), the latter side by side."""
        shards, replicas = self.layout.shard_size, self.layout.dp_replicate
        if replicas == 1:
            return init_device_mesh(self.device.type, (shards,))
        return init_device_mesh(self.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))

    def _sharing_group(self) -> Any:
        mesh = self.parameters[0].device_mesh
        return mesh.get_group(mesh.ndim - 1)

    def _rows(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a parameter, in memory of their own."""
        if hasattr(parameter, "cut"):
            return parameter.detach()
        start, stop = shard_rows(len(parameter), self.layout.shard_rank, self.layout.shard_size)
        return parameter.detach()[start:stop].clone()

    def _as_shard(self, rows: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return DTensor.from_local(
            rows.to(self.device), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        if not self.strategy.syncs_each_batch:
            self.module.set_requires_gradient_sync(last)
        elif self.layout.dp_replicate > 1:  # sharded gradients are summed up, and travel between machines once
            self.module.set_requires_all_reduce(last)
        return contextlib.nullcontext()

    @torch.no_grad()  # with it DTensor.to_local starts an autograd function each time
    def trained(self) -> list[torch.Tensor]:
        for parameter, rows in self.rows.items():
            rows.grad = parameter.grad.to_local() if parameter.grad is not None else None
        return list(self.rows.values())

    @torch.no_grad()
    def _global_norm(self) -> torch.Tensor:
        for parameter in self.experts:  # of all ranks' samples: a sum, where fully_shard has made means
            if parameter.grad is not None:
                parameter.grad.to_local().div_(self.layout.world_size)
        square = super()._global_norm() ** 2  # of a replica's ranks together
        torch.distributed.all_reduce(square)
        return (square / self.layout.dp_replicate).sqrt()

    def _drop_gradients(self) -> None:
        for tensor in (*self.rows.keys(), *self.rows.values()):
            tensor.grad = None

    def _state(self) -> OptimizerState:
        return RowState(self)

    def forget_gathered(self) -> None:
        """Free the weights that are in full here: after a forward pass without a backward one there are some."""
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
        self.module.unshard()  # what is in no block: generate calls an encoder past the model's own forward
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
