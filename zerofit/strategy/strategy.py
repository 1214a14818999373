"""The strategy of a run: its processes, batches and precision, and what is sharded over which ranks."""

import contextlib
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerofit.model.tensor_parallel import TensorGroup
from zerofit.recipe.errors import UserError
from zerofit.strategy.batches import BatchSizes
from zerofit.strategy.devices import accelerator, has_bf16
from zerofit.strategy.host_memory import host_memory
from zerofit.strategy.launch import (
    BOOLEANS,
    EXPERTS,
    IGNORED_MODULES,
    REDUCE_DTYPE,
    REPLICAS_KEY,
    RESHARD_KEY,
    SYNC_KEY,
    Launch,
)
from zerofit.strategy.layout import ParallelLayout, model_groups, offload_device

SHARED_FOLDER_REMEDY = "output_dir must be on a file system that all machines share"


def all_gather_objects(value: Any) -> list[Any]:
    """Gather a small object from each rank on every rank. Without a process group the list has one item."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_same(facts: dict[str, Any], remedy: str) -> None:
    """Check that all ranks have the same values; all call it together. `facts`: {noun for the message: the value of
    this rank}. `remedy`: what to do where they differ. Raises UserError on all ranks, naming the first rank that
    differs from rank 0, and its machine."""
    (first_machine, expected), *rest = all_gather_objects((platform.node(), facts))
    for rank, (machine, values) in enumerate(rest, 1):
        for name in expected:
            if values.get(name) != expected[name]:
                raise UserError(
                    f"rank {rank}, on machine {machine}, has another {name} than rank 0, on machine {first_machine}: "
                    f"{_shorten(values.get(name))}, and there {_shorten(expected[name])}. {remedy}"
                )


def _shorten(value: Any) -> str:
    """Return a value as text, without the middle of a long one."""
    text = str(value)
    return text if len(text) < 300 else f"{text[:140]} ... {text[-140:]}"


class PrecisionSetting(NamedTuple):
    """A precision, and the flag or file that states it; a value of None leaves it open."""

    value: str | None
    source: str


@dataclass(frozen=True)
class Strategy:
    """The strategy of a run: processes, batches, precision, what is sharded. `deepspeed` is the resolved DeepSpeed
    configuration; None without DeepSpeed."""

    launch: Launch
    batches: BatchSizes
    precision: str
    deepspeed: dict[str, Any] | None
    source: str  # the file, or the launcher, that messages name
    notes: tuple[str, ...] = ()
    stated: tuple[PrecisionSetting, ...] = ()  # every place that states the precision
    tensor: int = 1  # ranks that share each layer
    pipeline: int = 1  # stages that share the layers
    sequence: int = 1  # ranks that split each row
    fsdp: dict[str, str] | None = None  # FSDP2's settings; None: it is not used, or one process has nothing to share

    gather = staticmethod(all_gather_objects)

    @property
    def layout(self) -> ParallelLayout:
        """The parallel layout: this process's part of the model and of the samples."""
        degrees = self.tensor, self.pipeline, self.sequence, int((self.fsdp or {}).get(REPLICAS_KEY, "1"))
        return ParallelLayout(self.launch.world_size, self.launch.rank, *degrees)

    @property
    def zero(self) -> dict[str, Any]:
        """DeepSpeed's `zero_optimization` section; empty without DeepSpeed."""
        return self.deepspeed["zero_optimization"] if self.deepspeed is not None else {}

    @property
    def shards_parameters(self) -> bool:
        """True if each rank holds a shard of the weights only (ZeRO-3)."""
        return self.zero.get("stage") == 3

    @property
    def fully_shards(self) -> bool:
        """True if torch shards the weights (FSDP2)."""
        return self.fsdp is not None

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO, 0 to 3, that shards as much as this strategy; 3 for FSDP2."""
        return 3 if self.fully_shards else self.zero.get("stage", 0)

    @property
    def reshards(self) -> bool | int:
        """Under FSDP2: whether gathered weights are freed after the forward pass; a number: they stay sharded over so
        many ranks until the backward pass."""
        value = (self.fsdp or {}).get(RESHARD_KEY, "true")
        return value == "true" if value in BOOLEANS or self.launch.world_size == 1 else int(value)

    @property
    def reduces_in_half(self) -> bool:
        """True if FSDP2 reduces gradients in bf16."""
        return (self.fsdp or {}).get(REDUCE_DTYPE) == "bf16"

    @property
    def syncs_each_batch(self) -> bool:
        """True if FSDP2 reduces gradients in each micro-batch, so that no rank keeps full gradients."""
        return (self.fsdp or {}).get(SYNC_KEY, "true") == "true"

    @property
    def divides_experts(self) -> bool:
        """True under expert parallelism: each rank has some of the experts in full."""
        return (self.fsdp or {}).get(IGNORED_MODULES) == EXPERTS

    @property
    def optimizer_device(self) -> str:
        """Where DeepSpeed keeps the optimizer's state: "cpu", "nvme", or "none" for the weights' device."""
        return offload_device(self.zero, "offload_optimizer")

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer step runs on the CPU."""
        return self.optimizer_device != "none"

    @property
    def name(self) -> str:
        """The strategy's name: of its YAML, else made of what is sharded."""
        if self.launch.strategy_name:
            return self.launch.strategy_name
        if self.deepspeed is not None:
            stage = f"zero{self.zero.get('stage')}"
            degrees = {"tp": self.tensor, "pp": self.pipeline, "sp": self.sequence}
            return "_".join([*(f"{kind}{degree}" for kind, degree in degrees.items() if degree > 1), stage])
        if self.fully_shards:
            return "ep" if self.divides_experts else "hsdp" if self.layout.dp_replicate > 1 else "fsdp2"
        return "ddp" if self.launch.world_size > 1 else "single"

    @property
    def describe(self) -> str:
        """The layout and the batch sizes, as one line for the log."""
        sizes = self.batches
        warmup = f" (first {sizes.warmup.first}, grows for {sizes.warmup_updates} updates)" if sizes.warmup else ""
        row = sizes.row_tokens or 1
        unit = " tokens" if sizes.row_tokens else ""
        return (
            f"{self.describe_layout}, global batch {row * sizes.global_batch:,}{unit}{warmup} = "
            f"{row * sizes.micro_batch:,} x {sizes.accumulation} accumulation x {sizes.replicas}"
        )

    @property
    def describe_layout(self) -> str:
        """The name, processes, degrees and precision, as one line for the log."""
        launch = self.launch
        processes = launch.world_size
        file = launch.config_file or (launch.json_path if self.deepspeed is not None else None)
        name = self.name if launch.strategy_name or not file else f"{self.name} ({file})"
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline, "sequence": self.sequence}
        split = [f"{kind} {degree}" for kind, degree in degrees.items() if degree > 1]
        split = [" x ".join([*split, f"data {self.layout.data_size}"])] if split else []
        return ", ".join([name, f"{processes} process{'es' if processes > 1 else ''}", *split, self.precision])

    def check_precision(self) -> None:
        """Raises UserError for fp16 without a GPU."""
        if self.precision == "fp16" and not torch.accelerator.is_available():
            sources = " and ".join(setting.source for setting in self.stated)
            raise UserError(
                f"precision = fp16 ({sources}) needs a GPU: loss scaling has no CPU kernels. Use bf16 or fp32"
            )

    def with_precision(self, precision: str) -> "Strategy":
        """Return a copy of the strategy in another precision."""
        config = self.deepspeed
        if config is not None:
            halves = {half: {**config.get(half, {}), "enabled": precision == half} for half in ("bf16", "fp16")}
            config = {**config, **halves}
        return replace(self, precision=precision, deepspeed=config)

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype of the model's weights: DeepSpeed casts the model itself; other engines keep fp32."""
        return self.compute_dtype if self.deepspeed is not None else torch.float32

    @property
    def autocasts(self) -> bool:
        """True if autocast casts fp32 weights in each product: one process and DDP, in half precision."""
        return self.precision != "fp32" and self.deepspeed is None and not self.fully_shards

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products, and of LoRA's frozen base.

        One process and DDP: autocast of the Accelerator (processes.py) casts each product; weights stay in fp32.
        FSDP2: the MixedPrecisionPolicy of engines.py casts gathered weights; each rank's shards stay in fp32.
        DeepSpeed: the model itself has this dtype, the optimizer has the weights in fp32.
        Everywhere: the residual stream too, unless the recipe says `residual_in_fp32`, and on CUDA the RMSNorm of
        Llama and its kin (both in model/compilation.py). Losses and moments are in fp32. A model that overflows in
        fp16 gets bf16 instead (model/preflight.py)."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @property
    def device_of_weights(self) -> torch.device | None:
        """The device onto which pretrained weights are read directly, without a copy on the host. None: they are read
        on the CPU, since each rank keeps only a part of them, or the processes have not started yet."""
        from accelerate.state import PartialState, is_initialized

        shards = self.shards_parameters or self.fully_shards
        if shards or self.layout.model_size > 1 or not is_initialized():
            return None
        device: torch.device = PartialState().device
        return device if device.type != "cpu" else None

    @property
    def lacks_bf16(self) -> bool:
        """True if torch says that the device does not compute in bf16."""
        return has_bf16(accelerator()) is False

    @contextlib.contextmanager
    def gathered(self, parameter: torch.Tensor, written: bool = True) -> Iterator[None]:
        """The context in which every rank has the full parameter. `written`: all ranks write the same into it, which
        is kept; else it is only read."""
        if self.fully_shards and hasattr(parameter, "cut"):
            parameter.data = torch.cat(self.gather(parameter.data))
            yield
            parameter.data = parameter.cut.of(parameter.data)  # the rows of this rank: see keep_rows
        elif self.shards_parameters and hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if written else None):
                yield
        else:
            yield

    def read_from_outside(self, module: torch.nn.Module, parameter: torch.Tensor) -> None:
        """Tell ZeRO-3 that `module` reads a parameter of another module, which it would find empty otherwise."""
        if self.shards_parameters:
            import deepspeed

            deepspeed.zero.register_external_parameter(module, parameter)

    def sharded_init_reason(self, num_parameters: int) -> str | None:
        """Return the reason for drawing random weights shard by shard; None: they are drawn in full. Under ZeRO-3,
        weights drawn shard by shard differ from those of every other strategy at the same seed. So the full model is
        drawn, and then sharded, where all processes of this machine can hold it for a moment."""
        if not self.shards_parameters or self.tensor > 1:
            return None
        needed = 4 * num_parameters * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        available = host_memory()[0]
        if needed < available / 2:
            return None
        return (
            f"random weights are drawn shard by shard (full ones would take {needed / 2**30:.1f} GiB of this "
            f"machine's {available / 2**30:.1f}): they differ from those of other strategies at the same seed"
        )

    def building_from_scratch(self, num_parameters: int) -> AbstractContextManager[Any]:
        """The context in which random weights are drawn: in full, unless `sharded_init_reason` has a reason."""
        in_full = self.shards_parameters and self.sharded_init_reason(num_parameters) is None
        return without_sharding() if in_full else contextlib.nullcontext()

    def loading(self) -> AbstractContextManager[Any]:
        """The context in which pretrained weights are loaded: in full, where tensor parallelism cuts them before
        ZeRO-3 shards them."""
        return without_sharding() if self.tensor > 1 and self.shards_parameters else contextlib.nullcontext()

    def tensor_group(self) -> "TensorGroup":
        """Return the group of ranks that share each layer. All ranks call it together, after their start."""
        groups = model_groups(self.layout)
        return TensorGroup(groups.get_slice_parallel_group(), groups.get_slice_parallel_rank(), self.tensor)


@contextlib.contextmanager
def without_sharding() -> Iterator[None]:
    """The context in which transformers does not know of ZeRO-3 (accelerate's zero3_init_flag does not reach it)."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        AcceleratorState().deepspeed_plugin.set_deepspeed_weakref()
