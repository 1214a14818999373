"""The engine: the prepared model and optimizer. A loop calls `forward_backward` and `step` under every strategy.

`Engine` is the interface of training, evaluation, checkpoints and export, and what all strategies have in common;
prepare_engine.py makes one. Single strategies' parts are in engines.py, those of pipelines in pipeline_engine.py.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from zerofit.model.compilation import uncompiled
from zerofit.model.stages import whole_model
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.muon import Muon
from zerofit.strategy.sequence import SplitRows
from zerofit.strategy.state import OptimizerState, sampled_elements
from zerofit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from zerofit.data.collate import Batch

LossSum = Callable[[Any, "Batch"], torch.Tensor]  # (model, batch) -> the loss summed over the batch's targets


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return {address: bytes} of the tensors' storages, each once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@dataclass(frozen=True)
class Bounds:
    """The largest loss and gradient norm of an update; beyond them it is refused, and the weights stay as they are."""

    loss_sum: float = math.inf  # the largest loss that is accepted, summed over the targets of the global batch
    grad_norm: float = math.inf  # the largest norm of the gradients
    # accept a norm that is not finite: in fp16 the loss scaler then skips the step itself
    may_overflow: bool = False
    # this rank's RankReport (training/stream.py) as numbers, gathered with the loss in the update's one collective
    report: Sequence[float] = ()

    def accept(self, loss_sum: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Return True if the optimizer may step: a boolean scalar on the arguments' device, without a sync."""
        fits = grad_norm.isfinite() & (loss_sum <= self.loss_sum) & (grad_norm <= self.grad_norm)
        overflows = ~grad_norm.isfinite() & self.may_overflow
        return loss_sum.isfinite() & (fits | overflows)


class Outcome:
    """The result of an update, equal on every rank, except `losses`, which are this rank's.

    Reading a figure waits for the device, which may still compute the step.

    Args:
        losses: the loss sum of each micro-batch.
        read: () -> (whether the update was refused, the row of each rank: loss sum, gradient norm, its report).
        loss_ranks: one rank of each replica; the sum of their losses is that of the global batch.
    """

    def __init__(
        self, losses: list[torch.Tensor], read: Callable[[], tuple[bool, list[list[float]]]], loss_ranks: Sequence[int]
    ):
        self.losses = losses
        self._read = cache(read)
        self._loss_ranks = loss_ranks

    @property
    def skipped(self) -> bool:
        """True if the update was skipped, after a rewind."""
        return not self.losses

    @property
    def refused(self) -> bool:
        """True if loss or norm was out of bounds: weights, moments and step counts are unchanged."""
        return self._read()[0]

    @property
    def ranks(self) -> list[list[float]]:
        """The report of each rank."""
        return [row[2:] for row in self._read()[1]]

    @property
    def loss_sum(self) -> float:
        """The loss summed over the targets of the global batch."""
        rows = self._read()[1]
        return sum(rows[rank][0] for rank in self._loss_ranks)

    @property
    def grad_norm(self) -> float:
        """The 2-norm of all gradients before clipping; 0 if the update was skipped."""
        rows = self._read()[1]
        return rows[0][1] if rows else 0.0


class Engine:
    """A model and its optimizer under a strategy. All ranks call its methods together.

    Attributes:
        module: the model of transformers; in a pipeline, this rank's stage of it.
        whole: the unsharded model, for names and shapes; under pipelines and FSDP2 it has no weights.
        model: the module, wrapped as the strategy says; it is what a loss calls.
        max_grad_norm: the norm to which gradients are clipped; 0: they are not. A loop may change it.
        state: the optimizer's state in the form of checkpoints (state.py); None if nothing is trained.
        torch_optimizer: the innermost optimizer, which accelerate and DeepSpeed wrap; None if nothing is trained.
        alive: watchdog heartbeat, called in long operations.
        phase: called with the part of an update that begins: forward, backward.
    """

    adds_calls = True  # the gradients of a second `forward_backward` before `step` are added to those of the first
    _has_gradients = False  # True until `step` uses them

    def __init__(
        self, strategy: Strategy, accelerator: Any, model: Any, recipe: OptimizerOptions, optimizer: Any
    ) -> None:
        self.strategy = strategy
        self.accelerator = accelerator
        self.module = model
        self.whole = whole_model(model)
        self.max_grad_norm = recipe.max_grad_norm
        self.alive: Callable[[], None] = lambda: None
        self.phase: Callable[[str], None] = lambda phase: None
        self.split_rows = SplitRows(model, self.layout) if self.layout.sequence > 1 else None
        self.torch_optimizer: Any = None
        self.model = self._prepare(model, recipe, optimizer)
        self.state: Any = self._state() if self.torch_optimizer is not None else None
        if isinstance(self.torch_optimizer, Muon):
            self.torch_optimizer.locate(self.state, self._sharing_group())
        self.ema_decay = recipe.ema_decay
        if self.ema_decay and self.state is not None:
            self.state.start_ema()

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        """Wrap and shard the module and the optimizer, on their device; set `torch_optimizer`. Returns the value of
        `model`. `optimizer`: one over the module's parameters, or accelerate's DummyOptim if DeepSpeed makes it; None
        if nothing is trained."""
        raise NotImplementedError

    def _sharing_group(self) -> Any:
        """Return the process group of the ranks that shard the same weights; None: all ranks."""
        return None

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def layout(self) -> ParallelLayout:
        return self.strategy.layout

    @property
    def is_main(self) -> bool:
        return self.layout.is_main

    def forward_backward(
        self, micro_batches: Sequence["Batch"], loss_sum: LossSum, scale: float
    ) -> list[torch.Tensor]:
        """Run the forward and backward passes of an update's micro-batches: gradients are averaged over replicas and
        summed over micro-batches. Raises UserError: a second call before `step`, if the strategy would lose the
        gradients of the first.

        Args:
            loss_sum: (model, batch) -> the loss summed over the batch's targets, a scalar with a gradient.
            scale: factor of the losses before the backward pass.

        Returns: the loss sum of each, fp32 scalars on the device; in a pipeline zeros on all stages but the last.
        """
        self._expect_gradients(micro_batches)
        losses = []
        for index, batch in enumerate(micro_batches):
            with self.accumulate(last=index == len(micro_batches) - 1):
                self.phase("forward")
                loss = loss_sum(self.model, batch.to(self.device))
                losses.append(loss.detach().float())
                self.phase("backward")
                self.backward(loss * scale)
        return losses

    def _expect_gradients(self, micro_batches: Sequence["Batch"]) -> None:
        """Record that there are gradients, if there are micro-batches."""
        if not micro_batches:
            return
        if self._has_gradients and not self.adds_calls:
            raise UserError(
                f"forward_backward was called twice before step, and {self.strategy.source} would lose the gradients "
                "of the first call: give it all micro-batches of the update in one list"
            )
        self._has_gradients = True

    def step(self, losses: list[torch.Tensor], bounds: Bounds) -> Outcome:
        """Clip the gradients and update the weights, unless loss or norm are out of bounds; all ranks decide alike.
        The gradients are dropped. `losses`: the result of `forward_backward`; if it is empty, nothing is done. Raises
        UserError: it is empty, but there are gradients.
        """
        if losses:
            self._has_gradients = False
            return self._step(losses, bounds)
        if self._has_gradients:
            raise UserError("step got no losses, but there are gradients: give it what forward_backward returned")
        return Outcome(losses, lambda: (False, []), ())

    def _step(self, losses: list[torch.Tensor], bounds: Bounds) -> Outcome:
        row = [float(sum(losses)), self.gradient_norm(), *bounds.report]
        rows = torch.tensor(self.per_rank(row), dtype=torch.float64)
        accepted = bool(bounds.accept(rows[self.layout.loss_ranks, 0].sum(), rows[0, 1]))
        if accepted:
            self.clip_and_step()
            if self.ema_decay and rows[0, 1].isfinite():  # if not, fp16 did not change the weights
                self.state.update_ema(self.ema_decay)
        else:
            self.skip_step()
        return Outcome(losses, lambda: (not accepted, rows.tolist()), self.layout.loss_ranks)

    @torch.no_grad()
    def losses(self, batches: Iterable["Batch"], loss_sum: LossSum) -> Iterator[tuple["Batch", torch.Tensor]]:
        """Yield each batch with its loss sum, an fp32 scalar; in a pipeline 0 on all stages but the last."""
        for batch in batches:
            yield batch, loss_sum(self.model, batch).float()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward and backward pass; the `last` one reduces gradients."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients."""
        raise NotImplementedError

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next step; a group's `lr_scale` multiplies it."""
        for group in self.torch_optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)

    def gradient_norm(self) -> float:
        """Return the 2-norm of the update's gradients over all ranks, not clipped: NaN or infinite if a gradient is.
        All ranks call it together, once for each update, after `forward_backward`."""
        raise NotImplementedError

    def clip_and_step(self) -> None:
        """Clip by the norm that `gradient_norm` returned, step, and drop the gradients. In fp16 an infinite norm only
        lowers the loss scale."""
        raise NotImplementedError

    def skip_step(self) -> None:
        """Drop the gradients without a step: weights, optimizer state and DeepSpeed's loss scale do not change."""
        raise NotImplementedError

    @property
    def learning_rate(self) -> float:
        """The optimizer's current learning rate, before any group's `lr_scale`."""
        groups = [(group["lr"], group.get("lr_scale", 1.0)) for group in self.torch_optimizer.param_groups]
        return next((rate / scale for rate, scale in groups if scale), 0.0)  # a group with scale 0 does not change

    def _state(self) -> OptimizerState:
        """Return the optimizer's state in the form of checkpoints."""
        raise NotImplementedError

    def loss_scale(self) -> dict[str, Any]:
        """Return the state of fp16's loss scaling as plain numbers; empty without it."""
        return {}

    def continue_from(self, loss_scale: dict[str, Any]) -> None:
        """Restore fp16's loss scaling."""

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that this rank has now; none under ZeRO, where DeepSpeed keeps them in shards."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]

    def shards(self) -> list[torch.Tensor]:
        """Return this rank's shards of the weights."""
        return [*self.module.parameters()]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor on the CPU) of weights and stored buffers, on the main process; other ranks yield
        nothing, but must iterate to the end too, since gathering is collective."""
        yield from self._gathered_weights(self._named_parameters())
        if self.is_main:
            yield from ((name, buffer.cpu()) for name, buffer in self.stored_buffers().items())

    def stored_buffers(self) -> dict[str, torch.Tensor]:
        """Return {name: buffer} of the buffers that are stored with the model's weights, equal on every rank."""
        stored = self.whole.state_dict().keys()
        buffers = dict(self.module.named_buffers())
        return {name: buffers.get(name, buffer) for name, buffer in self.whole.named_buffers() if name in stored}

    def trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor on the CPU) of the weights that are trained, as `weights` does."""
        yield from self._gathered_weights(self.state.parameters)

    def _named_parameters(self) -> dict[str, Any]:
        return dict(self.module.named_parameters())

    def weight_samples(self) -> dict[str, list[float]]:
        """Sample this rank's trained weights as the model has them, gathered one at a time. Returns {name: the values
        of a few elements} (`sampled_elements` in state.py)."""
        return {
            name: full.flatten()[torch.from_numpy(sampled_elements(full.numel()))].tolist()
            for name, full in self._in_full(self.state.parameters)
        }

    def _gathered_weights(self, parameters: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter on the main process, copied to the CPU; every rank gathers it for a moment."""
        for name, full in self._in_full(parameters):
            if self.is_main:
                yield name, full.to("cpu", copy=True)

    def _in_full(self, parameters: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter in full, on every rank that has its layer; it is whole until the next is asked for."""
        for name, parameter in parameters.items():
            with self.strategy.gathered(parameter, written=False):
                yield name, self._joined(parameter)

    def _joined(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the full tensor: what gathering leaves split (tp, FSDP2's DTensors) is joined."""
        return parameter.detach()

    def sum_over_replicas(self, values: Iterable[float]) -> list[float]:
        """Sum each value over all replicas; the ranks of one replica have the same values, which count once."""
        return [float(total) for total in self._gathered(values)[self.layout.loss_ranks].sum(dim=0)]

    def per_rank(self, values: Iterable[float]) -> list[list[float]]:
        """Gather the values of each rank on every rank, one list per rank."""
        return self._gathered(values).tolist()

    def gather_objects(self, own: Any) -> list[Any] | None:
        """Gather a small object from each rank on the main process, in a list; None elsewhere."""
        if self.layout.world_size == 1:
            return [own]
        ranks = [None] * self.layout.world_size if self.is_main else None
        torch.distributed.gather_object(own, ranks, dst=0)
        return ranks

    def from_main(self, value: Any) -> Any:
        """Send the main process's value to every rank, and return it there."""
        if self.layout.world_size == 1:
            return value
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def _gathered(self, values: Iterable[float]) -> torch.Tensor:
        wide = torch.float32 if self.device.type in ("mps", "hpu") else torch.float64
        row = torch.tensor([list(values)], dtype=wide)
        return row if self.layout.world_size == 1 else self.accelerator.gather(row.to(self.device)).cpu()

    def rows_in_full(self) -> AbstractContextManager[Any]:
        """Return the context in which each rank computes whole sequences, without sequence parallelism."""
        return nullcontext() if self.split_rows is None else self.split_rows.in_full()

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Call the model's `generate` on this rank's rows (B, T), on all ranks together and in eval mode. Under ZeRO-3
        and FSDP2 every forward pass is collective, so ranks that have finished continue until all have
        (`synced_gpus`). The model's mode is restored."""
        was_training = self.model.training
        self.model.eval()
        input_ids = input_ids.to(self.device)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        together = (self.strategy.shards_parameters or self.strategy.fully_shards) and self.layout.world_size > 1
        with self.rows_in_full(), uncompiled():
            written = self.module.generate(
                input_ids,
                attention_mask=attention_mask.to(self.device),
                synced_gpus=together,
                use_cache=True,
                **kwargs,
            )
        self.model.train(was_training)
        return written

    def close(self) -> None:
        """Wait at the final barrier; each rank may leave the process after it (zerofit.recipe.errors.leave)."""
        self.accelerator.wait_for_everyone()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank keeps from update to update, on device or host: its shard of the weights
        (`parameters`), and the optimizer's moments and fp32 copies of what is trained (`optimizer`)."""
        copies = ("ds_tensor", "ds_secondary_tensor")  # ZeRO-3's shard, and ZeRO++'s copy within a machine
        shards = [(each, *(getattr(each, name, None) for name in copies)) for each in self.shards()]
        held = [tensor for tensors in shards for tensor in tensors if tensor is not None]
        state = self.torch_optimizer.state if self.torch_optimizer is not None else {}
        states = [tensor for parameter in state for tensor in (parameter, *state[parameter].values())]
        weights = storages(held)
        optimizer = storages(filter(torch.is_tensor, states))
        optimizer = {key: size for key, size in optimizer.items() if key not in weights}
        return {"parameters": sum(weights.values()), "optimizer": sum(optimizer.values())}

    def effective_strategy(self) -> dict[str, Any]:
        """Return the content of strategy.yaml: the strategy with all of its effective values."""
        launch = self.strategy.launch
        state = self.accelerator.state
        batches = self.strategy.batches
        is_muon = isinstance(self.torch_optimizer, Muon)
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
            **({"muon": sorted(self.torch_optimizer.matrices)} if is_muon else {}),
            "deepspeed": getattr(self.accelerator, "deepspeed_config", None)
            if self.strategy.deepspeed is not None
            else None,
        }
