"""What the engines of all strategies have in common."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from zerofit.model.compilation import uncompiled
from zerofit.model.stages import whole_model
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.engine import LossSum
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.sequence import SplitRows
from zerofit.strategy.state import OptimizerState
from zerofit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from zerofit.data.collate import Batch
    from zerofit.recipe.schedule import Schedule


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of what the tensors lie in, each once."""
    held = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The sum of the bit patterns of each."""
    patterns = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [int(tensor.view(patterns[tensor.element_size()]).sum(dtype=torch.int64)) for tensor in tensors]


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; a copy of its own where it is a part of something larger, as under ZeRO-1 and ZeRO-2."""
    return tensor.to("cpu", copy=tensor.untyped_storage().nbytes() > tensor.nbytes)


class BaseEngine:
    """What engines have in common. Methods of the protocol (engine.py) are described there."""

    def __init__(
        self, strategy: Strategy, accelerator: Any, model: Any, recipe: OptimizerOptions, schedule: "Schedule | None"
    ) -> None:
        self.strategy, self.accelerator, self.module = strategy, accelerator, model
        self.whole = whole_model(model)
        self.max_grad_norm = recipe.max_grad_norm
        self.schedule: Any = schedule  # None where nothing is trained
        self.alive: Callable[[], None] = lambda: None  # a sign of life within what may take long
        self.split_rows = SplitRows(model, self.layout) if self.layout.sequence > 1 else None
        self.model = self._prepare(model, recipe)
        self.state: Any = self._state()  # an OptimizerState; None where nothing is trained

    def _prepare(self, model: Any, recipe: OptimizerOptions) -> Any:
        """Make the optimizer, and what `model` is: the module, wrapped, sharded and on its device."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def layout(self) -> ParallelLayout:
        return self.strategy.layout

    @property
    def is_main(self) -> bool:
        return self.layout.is_main

    def run(
        self, batches: Sequence["Batch"], loss_sum: LossSum, scale: float, phase: Callable[[str], None]
    ) -> list[torch.Tensor]:
        losses = []
        for index, batch in enumerate(batches):
            with self.accumulate(last=index == len(batches) - 1):
                phase("forward")
                loss = loss_sum(self.model, batch.to(self.device))
                losses.append(loss.detach().float())
                phase("backward")
                self.backward(loss * scale)
        return losses

    @torch.no_grad()
    def losses(self, batches: Iterable["Batch"], loss_sum: LossSum) -> Iterator[tuple["Batch", torch.Tensor]]:
        for batch in batches:
            yield batch, loss_sum(self.model, batch).float()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and backward pass; `last` of an update brings the ranks together."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients."""
        raise NotImplementedError

    def set_learning_rate(self, index: int) -> None:
        assert self.torch_optimizer is not None
        for group in self.torch_optimizer.param_groups:
            group["lr"] = self.schedule(index)

    def gradient_norm(self) -> float:
        raise NotImplementedError

    def apply(self) -> None:
        raise NotImplementedError

    def discard(self) -> None:
        raise NotImplementedError

    @property
    def learning_rate(self) -> float:
        raise NotImplementedError

    def _state(self) -> OptimizerState | None:
        """The optimizer's state, in the form in which checkpoints have it."""
        raise NotImplementedError

    def loss_scale(self) -> dict[str, Any]:
        return {}

    def continue_from(self, loss_scale: dict[str, Any]) -> None:
        """Restore fp16's loss scaling."""

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole weights by name on the CPU, on the main process; None elsewhere. All ranks must call it."""
        if not self.is_main:
            return None
        return {name: _on_the_host(tensor.detach()) for name, tensor in self.module.state_dict().items()}

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def live_tensors(self) -> list[torch.Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return (self.state_dict() or {}).items()

    def stored_buffers(self) -> dict[str, torch.Tensor]:
        stored, own = self.whole.state_dict().keys(), dict(self.module.named_buffers())
        return {name: own.get(name, buffer) for name, buffer in self.whole.named_buffers() if name in stored}

    def trained_state(self) -> dict[str, torch.Tensor] | None:
        state = {}
        self._before_gathering()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                with self.strategy.gathered(parameter, written=False):
                    if self.is_main:
                        state[name] = parameter.detach().to("cpu", copy=True)
        return state if self.is_main else None

    def _before_gathering(self) -> None:
        """What an engine has to see to before weights are gathered outside of a forward pass."""

    def sum_over_replicas(self, values: Iterable[float]) -> list[float]:
        return [float(total) for total in self._gathered(values)[self.layout.loss_ranks].sum(dim=0)]

    def per_rank(self, values: Iterable[float]) -> list[list[float]]:
        return self._gathered(values).tolist()

    def gather_objects(self, own: Any) -> list[Any] | None:
        if self.layout.world_size == 1:
            return [own]
        ranks = [None] * self.layout.world_size if self.is_main else None
        torch.distributed.gather_object(own, ranks, dst=0)
        return ranks

    def from_main(self, value: Any) -> Any:
        if self.layout.world_size == 1:
            return value
        held = [value]
        torch.distributed.broadcast_object_list(held, src=0, device=self.device)
        return held[0]

    def _gathered(self, values: Iterable[float]) -> torch.Tensor:
        wide = torch.float32 if self.device.type in ("mps", "hpu") else torch.float64
        row = torch.tensor([list(values)], dtype=wide)
        return row if self.layout.world_size == 1 else self.accelerator.gather(row.to(self.device)).cpu()

    def rows_in_full(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.split_rows is None else self.split_rows.in_full()

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        self.model.eval()
        input_ids = input_ids.to(self.device)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        together = (self.strategy.shards_parameters or self.strategy.fully_shards) and self.layout.world_size > 1
        with self.rows_in_full(), uncompiled():
            return self.module.generate(
                input_ids, attention_mask=attention_mask.to(self.device), synced_gpus=together, use_cache=True,
                **kwargs,
            )  # fmt: skip

    def close(self) -> None:
        self.accelerator.wait_for_everyone()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def held_bytes(self) -> dict[str, int]:
        copies = ("ds_tensor", "ds_secondary_tensor")  # ZeRO-3's shard, and ZeRO++'s copy within a machine
        shards = [(p, *(getattr(p, name, None) for name in copies)) for p in self.module.parameters()]
        held = [tensor for tensors in shards for tensor in tensors if tensor is not None]
        state = self.torch_optimizer.state if self.torch_optimizer is not None else {}
        states = [tensor for parameter in state for tensor in (parameter, *state[parameter].values())]
        weights, optimizer = storages(held), storages(filter(torch.is_tensor, states))
        optimizer = {key: size for key, size in optimizer.items() if key not in weights}
        return {"parameters": sum(weights.values()), "optimizer": sum(optimizer.values())}

    def frozen_checksum(self) -> list[int]:
        frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        shards = [getattr(parameter, "ds_tensor", parameter.data) for parameter in frozen]
        return checksums(shards)

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """The innermost optimizer: accelerate and DeepSpeed put theirs around it. None: nothing is trained."""
        raise NotImplementedError

    def effective_strategy(self) -> dict[str, Any]:
        launch, state, batches = self.strategy.launch, self.accelerator.state, self.strategy.batches
        return {
            "name": self.strategy.name,
            "accelerate_config": launch.config_file,
            "deepspeed_config": launch.json_path,
            "distributed_type": str(state.distributed_type.value),
            "num_processes": self.layout.world_size,
            "data_parallel": self.layout.data_size,
            "tensor_parallel": self.layout.tensor,
            "pipeline_parallel": self.layout.pipeline,
            "sequence_parallel": self.layout.sequence,
            "num_machines": self.layout.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", self.layout.world_size)),
            "backend": str(state.backend),
            "device": str(self.device.type),
            "precision": self.strategy.precision,
            "micro_batch": batches.micro_batch,
            "gradient_accumulation_steps": batches.accumulation,
            "global_batch": batches.global_batch,
            "deepspeed": getattr(self.accelerator, "deepspeed_config", None)
            if self.strategy.deepspeed is not None
            else None,
        }
