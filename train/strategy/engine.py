"""The prepared model and optimizer. The loop asks it for backward, update and sums, and never which strategy it is."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from train.model.parameters import decay_groups
from train.recipe.options import OptimizerOptions
from train.strategy.buckets import fill_bucket_size
from train.strategy.devices import has_fused_adamw
from train.strategy.layout import ParallelLayout
from train.strategy.state import FlatState, OptimizerState, ShardedState, WholeState
from train.strategy.strategy import Strategy

if TYPE_CHECKING:
    from train.recipe.schedule import Schedule

# Freeing a DDP model frees its process group, and torch's destructor of a gloo group waits, with the interpreter's
# lock held, for a thread that may be waiting for that lock: a run that had finished hung for good once in some
# hundreds of launches. So neither is ever freed nor the group destroyed; train.recipe.errors.leave ends the process.
NEVER_FREED: list["Engine"] = []
Judge = Callable[[float], bool]


def prepare_engine(strategy: Strategy, accelerator, model, recipe: OptimizerOptions, schedule: "Schedule") -> "Engine":
    """Shard, wrap and place the model and its optimizer as the strategy says."""
    kind = DeepSpeedEngine if strategy.deepspeed is not None else TorchEngine
    if not recipe.trains:
        from train.strategy.inference import InferenceEngine

        kind = InferenceEngine
    engine = kind(strategy, accelerator, model, recipe, schedule)
    if torch.distributed.is_initialized():
        NEVER_FREED.append(engine)
    return engine


def adamw(model: torch.nn.Module, recipe: OptimizerOptions, device: torch.device) -> torch.optim.AdamW:
    """The recipe's AdamW, fused where torch has it for this device."""
    return torch.optim.AdamW(
        decay_groups(model.parameters(), recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        fused=has_fused_adamw(device) or None,
    )


def gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, a scalar.

    On a CPU the squares are added up in fp64: torch's fp32 norm adds them one after another there, and is too small by
    5e-5 for a tensor of 0.8 M elements and by 0.4 % for one of 50 M.
    """
    wide = torch.float64 if gradients and gradients[0].device.type == "cpu" else None
    norms = torch._foreach_norm(gradients, 2, wide)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """{address: bytes} of what the tensors lie in, each once."""
    held = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in held if storage.nbytes()}


def _on_the_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU; a copy of its own where it is a part of something larger, as under ZeRO-1 and ZeRO-2."""
    return tensor.to("cpu", copy=tensor.untyped_storage().nbytes() > tensor.nbytes)


class Engine:
    """Common to all strategies. Gradients of `backward` are averaged over ranks and summed over micro-batches."""

    def __init__(self, strategy: Strategy, accelerator, model, recipe: OptimizerOptions, schedule: "Schedule"):
        self.strategy, self.accelerator, self.module = strategy, accelerator, model
        self.max_grad_norm, self.schedule = recipe.max_grad_norm, schedule
        self.alive: Callable[[], None] = lambda: None  # a sign of life within what may take long
        self.model = self._prepare(model, recipe)  # what is called: the wrapped model
        self.state = self._state()

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def layout(self) -> ParallelLayout:
        return self.strategy.layout

    @property
    def is_main(self) -> bool:
        return self.layout.is_main

    def accumulate(self, last: bool) -> AbstractContextManager:
        """The context of a micro-batch's forward and backward pass; `last` of an update brings the ranks together."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients."""
        raise NotImplementedError

    def update(self, number: int, judge: Judge) -> None:
        """Ask `judge`, then clip and move the weights at update `number`'s learning rate, or drop the gradients.

        Args:
            judge: called once on all ranks together, before anything has moved, with the gradient's norm before
                clipping; returns whether the weights are to be moved. In fp16 they are not moved where the norm is
                infinite: then the loss scale is lowered.
        """
        raise NotImplementedError

    @property
    def learning_rate(self) -> float:
        """The rate that the optimizer holds now."""
        raise NotImplementedError

    def _state(self) -> OptimizerState:
        """The optimizer's state, in the form in which checkpoints have it."""
        raise NotImplementedError

    def loss_scale(self) -> dict[str, Any]:
        """fp16's loss scaling, as plain numbers; empty without it."""
        return {}

    def continue_from(self, loss_scale: dict[str, Any]) -> None:
        """Go on with fp16's loss scaling as it was."""

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """The whole weights by name on the CPU, on the main process; None elsewhere. All ranks must call it."""
        if not self.is_main:
            return None
        return {name: _on_the_host(tensor.detach()) for name, tensor in self.module.state_dict().items()}

    def trained_state(self) -> dict[str, torch.Tensor] | None:
        """The same for the weights that are trained, and no others: each is gathered for itself."""
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
        """Each value summed over all replicas: what the ranks of one replica have in common counts once."""
        return [float(total) for total in self._gathered(values)[self.layout.reporters].sum(dim=0)]

    def per_replica(self, values: Iterable[float]) -> list[list[float]]:
        """The values of each replica, one list a replica."""
        return self._gathered(values)[self.layout.reporters].tolist()

    def per_rank(self, values: Iterable[float]) -> list[list[float]]:
        """The values of each rank, one list a rank."""
        return self._gathered(values).tolist()

    def gather_objects(self, share: Any) -> list[Any] | None:
        """Each rank's share, one a rank, on the main process; None elsewhere. For small things only."""
        if self.layout.world_size == 1:
            return [share]
        shares = [None] * self.layout.world_size if self.is_main else None
        torch.distributed.gather_object(share, shares, dst=0)
        return shares

    def from_main(self, value: Any) -> Any:
        """What the main process has, on every rank."""
        if self.layout.world_size == 1:
            return value
        held = [value]
        torch.distributed.broadcast_object_list(held, src=0, device=self.device)
        return held[0]

    def _gathered(self, values: Iterable[float]) -> torch.Tensor:
        wide = torch.float32 if self.device.type in ("mps", "hpu") else torch.float64
        row = torch.tensor([list(values)], dtype=wide)
        return row if self.layout.world_size == 1 else self.accelerator.gather(row.to(self.device)).cpu()

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
        """`generate` of the model on this rank's rows (B, T), on all ranks together.

        Under ZeRO-3 every rank takes part in every forward pass, so ranks that have finished go on until all have.
        """
        self.model.eval()
        input_ids = input_ids.to(self.device)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        together = self.strategy.shards_parameters and self.layout.world_size > 1
        return self.module.generate(
            input_ids, attention_mask=attention_mask.to(self.device), synced_gpus=together, use_cache=True, **kwargs
        )

    def close(self) -> None:
        """The last meeting of the ranks; each may leave the process after it (train.recipe.errors.leave)."""
        self.accelerator.wait_for_everyone()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def held_bytes(self) -> dict[str, int]:
        """What this rank holds from update to update, on the device or on the host: its share of the weights
        (`parameters`), and the optimizer's moments and fp32 copies of what is trained (`optimizer`)."""
        shares = [(p, getattr(p, "ds_tensor", None)) for p in self.module.parameters()]
        held = [tensor for pair in shares for tensor in pair if tensor is not None]
        state = self.torch_optimizer.state if self.torch_optimizer is not None else {}
        states = [tensor for parameter in state for tensor in (parameter, *state[parameter].values())]
        weights, optimizer = _storages(held), _storages(filter(torch.is_tensor, states))
        optimizer = {key: size for key, size in optimizer.items() if key not in weights}
        return {"parameters": sum(weights.values()), "optimizer": sum(optimizer.values())}

    def frozen_checksum(self) -> list[int]:
        """The sums of the bit patterns of the frozen weights, one a weight, of this rank's share under ZeRO-3."""
        frozen = [parameter for parameter in self.module.parameters() if not parameter.requires_grad]
        shares = [getattr(parameter, "ds_tensor", parameter.data) for parameter in frozen]
        patterns = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return [int(share.view(patterns[share.element_size()]).sum(dtype=torch.int64)) for share in shares]

    @property
    def torch_optimizer(self) -> torch.optim.Optimizer | None:
        """The innermost optimizer: accelerate and DeepSpeed put theirs around it. None: nothing is trained."""
        raise NotImplementedError

    def effective_strategy(self) -> dict[str, Any]:
        """What is in force, with nothing left open."""
        launch, state, batches = self.strategy.launch, self.accelerator.state, self.strategy.batches
        return {
            "name": self.strategy.name,
            "accelerate_config": launch.config_file,
            "deepspeed_config": launch.json_path,
            "distributed_type": str(state.distributed_type.value),
            "num_processes": self.layout.world_size,
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


class TorchEngine(Engine):
    """One process, or DDP."""

    def _prepare(self, model, recipe):
        self.optimizer = adamw(model, recipe, self.device)
        model, self.optimizer = self.accelerator.prepare(model, self.optimizer)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.layout.world_size > 1:
            self._put_gradients_into_buckets(model)
        return model

    def _put_gradients_into_buckets(self, model) -> None:
        """Let DDP make the gradients, as views of its buckets, in a backward pass that gives zeros.

        Those of the first micro-batches would lie in memory beside the buckets, until the ranks meet.
        """
        model.reducer.prepare_for_backward([])
        sum(0.0 * parameter.sum() for parameter in self.parameters).backward()

    def accumulate(self, last):
        # The forward pass as well: it is there that DDP decides whether the backward pass brings the ranks together.
        return (
            self.accelerator.no_sync(self.model)
            if self.layout.world_size > 1 and not last
            else contextlib.nullcontext()
        )

    def backward(self, loss):
        self.accelerator.backward(loss)

    def update(self, number, judge):
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(number)
        self.accelerator.unscale_gradients()
        norm = gradient_norm([p.grad for p in self.parameters if p.grad is not None])
        if judge(float(norm)):
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            self.optimizer.step()
        elif self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # else it takes the next gradients for unscaled ones
        # Of DDP, gradients are views of its buckets, and stay so.
        self.optimizer.zero_grad(set_to_none=self.layout.world_size == 1)

    @property
    def learning_rate(self):
        return self.optimizer.param_groups[0]["lr"]

    @property
    def torch_optimizer(self):
        return self.optimizer.optimizer

    def _state(self):
        return WholeState(self)

    def loss_scale(self):
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else {}

    def continue_from(self, loss_scale):
        if loss_scale and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(loss_scale)


class DeepSpeedEngine(Engine):
    """ZeRO of any stage, with or without offload."""

    def _prepare(self, model, recipe):
        from accelerate.utils import DummyOptim, DummyScheduler

        config, plugin = self.strategy.deepspeed, self.accelerator.deepspeed_plugin.deepspeed_config
        fill_bucket_size(plugin["zero_optimization"], model)
        if "optimizer" in config:  # DeepSpeed builds it from the JSON
            groups = decay_groups(model.parameters(), recipe.weight_decay)
            optimizer = DummyOptim(groups, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        else:
            optimizer = adamw(model, recipe, self.device)
        self.has_scheduler = "scheduler" in config
        prepared = [model, optimizer]
        if self.has_scheduler:
            plugin["scheduler"] = config["scheduler"]  # resolved by now
            prepared.append(DummyScheduler(optimizer, self.schedule.num_updates, self.schedule.num_warmup))
        self.engine = self.accelerator.prepare(*prepared)[0]
        self._judge_before_moving(self.engine.optimizer)
        return self.engine

    def _judge_before_moving(self, optimizer) -> None:
        """Have the judge asked within DeepSpeed's step, between the norm and the move.

        Every ZeRO optimizer settles there, in `_update_scale`, whether the step overflowed, and drops the gradients if
        so: what the judge refuses is dropped in the same way, but leaves the loss scale as it is.
        """
        norm_of = "_get_norm_groups" if self.strategy.shards_parameters else "scaled_global_norm"
        take_norm, update_scale = getattr(optimizer, norm_of), optimizer._update_scale

        def noted(*args, **kwargs):
            self._norm = take_norm(*args, **kwargs)
            return self._norm

        def judged(has_overflow=False):
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm = self._norm if self._norm is not None else math.inf
            if isinstance(norm, list):
                norm = combine_grad_norm_groups(norm)
            if self._judge(float(norm) / optimizer.loss_scale) or has_overflow:
                update_scale(has_overflow)
            else:
                optimizer.overflow = True

        setattr(optimizer, norm_of, noted)
        optimizer._update_scale = judged

    def accumulate(self, last):
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        return contextlib.nullcontext()

    def backward(self, loss):
        self.engine.backward(loss, scale_wrt_gas=False)

    def update(self, number, judge):
        rate = self.schedule(number)
        if self.has_scheduler:
            self.engine.lr_scheduler.step(number)  # its own start lags one update behind, and it misses dropped steps
        else:
            for group in self.engine.optimizer.param_groups:
                group["lr"] = rate
        self._rate = self.engine.optimizer.param_groups[0]["lr"]
        if abs(self._rate - rate) > 1e-6 * self.schedule.peak:
            raise RuntimeError(
                f"update {number + 1}: DeepSpeed's schedule is at {self._rate:g}, the recipe's at {rate:g}"
            )
        self._norm, self._judge = None, judge
        self.engine.step()

    @property
    def learning_rate(self):
        return self._rate

    @property
    def torch_optimizer(self):
        return self.engine.optimizer.optimizer

    def _state(self):
        return ShardedState(self) if self.strategy.shards_parameters else FlatState(self)

    def loss_scale(self):
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        numbers = {name: value for name, value in vars(scaler).items() if isinstance(value, (int, float))}
        return numbers if self.strategy.precision == "fp16" else {}

    def continue_from(self, loss_scale):
        if loss_scale and self.strategy.precision == "fp16":
            vars(self.engine.optimizer.loss_scaler).update(loss_scale)

    def _before_gathering(self):
        # ZeRO-3 fetches ahead, and with recomputed activations it fetches more than the last pass of an evaluation
        # uses; weights on their way cannot be put away again ("Cannot partition a param in flight").
        if self.strategy.shards_parameters:
            self.engine.empty_partition_cache()

    def state_dict(self):
        if not self.strategy.shards_parameters:  # accelerate would copy the model to the host on every rank
            return super().state_dict()
        self._before_gathering()
        state = self.accelerator.get_state_dict(self.model)
        return {name: tensor.detach().cpu() for name, tensor in state.items()} if self.is_main else None


def check_deepspeed_schedule(config: dict, source: str, schedule: "Schedule") -> None:
    """Run DeepSpeed's scheduler over the whole run without a model, and hold it against the recipe's curve.

    Raises:
        UserError: the first update at which the two differ, with both values.
    """
    if "scheduler" not in config:
        return
    import deepspeed.runtime.lr_schedules as lr_schedules

    from train.recipe.errors import UserError

    block = config["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=schedule.peak)
    scheduler = getattr(lr_schedules, block["type"])(optimizer, **block["params"])
    stride = max(1, schedule.num_updates // 20_000)
    for update in [*range(min(2000, schedule.num_updates)), *range(2000, schedule.num_updates, stride)]:
        scheduler.step(update)
        theirs, ours = optimizer.param_groups[0]["lr"], schedule(update)
        if abs(theirs - ours) > 1e-6 * schedule.peak:
            raise UserError(
                f"{source}: at update {update + 1} scheduler {block['type']} gives a learning rate of {theirs:g}, "
                f"and the recipe ({schedule.shape}, {schedule.num_warmup} warm-up updates of {schedule.num_updates}) "
                f"states {ours:g}. Remove the scheduler block: then the recipe's schedule is used"
            )
