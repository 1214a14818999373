"""The strategy of a run: everything that can be checked is checked before data is read or a process group made."""

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
    """Gather a small object from each rank on every rank; a list of one without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_same(facts: dict[str, Any], remedy: str) -> None:
    """Check that all ranks have the same. All of them call it together. `facts`: {what it is, in words: what this rank
    has}. `remedy`: what to do where they differ. Raises UserError on all ranks, naming the first rank that differs
    from rank 0, and its machine."""
    ranks = all_gather_objects((platform.node(), facts))
    (first, expected), *others = ranks
    for rank, (machine, facts_there) in enumerate(others, 1):
        for name in expected:
            if facts_there.get(name) != expected[name]:
                raise UserError(
                    f"rank {rank}, on machine {machine}, has another {name} than rank 0, on machine {first}: "
                    f"{_shown(facts_there.get(name))}, and there {_shown(expected[name])}. {remedy}"
                )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:140]} ... {text[-140:]}"


class PrecisionSetting(NamedTuple):
    """A precision, and the place that states it; None: it is left open there."""

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
        """The part of the model, and the samples, that this process works on."""
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
        """The stage of ZeRO that says how much is sharded: 0 to 3."""
        return 3 if self.fully_shards else self.zero.get("stage", 0)

    @property
    def reshards(self) -> bool | int:
        """Under FSDP2: whether the forward pass forgets the weights that it has gathered; or how many ranks share them
        between a block's two passes."""
        value = (self.fsdp or {}).get(RESHARD_KEY, "true")
        return value == "true" if value in BOOLEANS or self.launch.world_size == 1 else int(value)

    @property
    def reduces_in_half(self) -> bool:
        """Under FSDP2: whether gradients travel, and are summed up, in bf16."""
        return (self.fsdp or {}).get(REDUCE_DTYPE) == "bf16"

    @property
    def syncs_each_batch(self) -> bool:
        """Under FSDP2: whether gradients are reduced in each micro-batch, so that no rank keeps full ones."""
        return (self.fsdp or {}).get(SYNC_KEY, "true") == "true"

    @property
    def divides_experts(self) -> bool:
        """Under FSDP2: whether each rank has some of the experts in full (expert parallelism)."""
        return (self.fsdp or {}).get(IGNORED_MODULES) == EXPERTS

    @property
    def optimizer_device(self) -> str:
        """Return where DeepSpeed keeps the optimizer's state: cpu or nvme; none: with the weights."""
        return offload_device(self.zero, "offload_optimizer")

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer step runs on the CPU."""
        return self.optimizer_device != "none"

    @property
    def name(self) -> str:
        """The strategy's name, else what the launcher's file or flags come to."""
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
        """One line for the log."""
        b = self.batches
        warmup = f" (first {b.warmup.first}, grows for {b.warmup_updates} updates)" if b.warmup else ""
        rows = b.row_tokens or 1
        unit = " tokens" if b.row_tokens else ""
        sizes = (
            f"global batch {rows * b.global_batch:,}{unit}{warmup} = {rows * b.micro_batch:,} x {b.accumulation} "
            f"accumulation x {b.replicas}"
        )
        return f"{self.describe_layout}, {sizes}"

    @property
    def describe_layout(self) -> str:
        """One line for the log, without the batches of training."""
        processes = self.launch.world_size
        launch = self.launch
        file = launch.config_file or (launch.json_path if self.deepspeed is not None else None)
        name = self.name if launch.strategy_name or not file else f"{self.name} ({file})"
        degrees = {"tensor": self.tensor, "pipeline": self.pipeline, "sequence": self.sequence}
        split = [f"{kind} {degree}" for kind, degree in degrees.items() if degree > 1]
        split = [" x ".join([*split, f"data {self.layout.data_size}"])] if split else []
        return ", ".join([name, f"{processes} process{'es' if processes > 1 else ''}", *split, self.precision])

    def check_precision(self) -> None:
        """Raises UserError where there is no device for the precision."""
        if self.precision == "fp16" and not torch.accelerator.is_available():
            sources = " and ".join(each.source for each in self.stated)
            raise UserError(
                f"precision = fp16 ({sources}) needs a GPU: loss scaling has no CPU kernels. Use bf16 or fp32"
            )

    def with_precision(self, precision: str) -> "Strategy":
        """Return a copy in another precision."""
        config = self.deepspeed
        if config is not None:
            halves = {half: {**config.get(half, {}), "enabled": precision == half} for half in ("bf16", "fp16")}
            config = {**config, **halves}
        return replace(self, precision=precision, deepspeed=config)

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype that weights have here: DeepSpeed casts the model itself; others keep fp32."""
        return self.compute_dtype if self.deepspeed is not None else torch.float32

    @property
    def autocasts(self) -> bool:
        """True if weights in fp32 are cast product by product: in half precision, of one process and of DDP."""
        return self.precision != "fp32" and self.deepspeed is None and not self.fully_shards

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of matrix products, and of LoRA's frozen base. One process and DDP: autocast of the Accelerator
        (processes.py); layers add to a sum in this dtype, too (model/compilation.py), unless the recipe says
        `residual_in_fp32`. FSDP2: the MixedPrecisionPolicy of engines.py; each rank's rows are in fp32. DeepSpeed:
        the model itself has this dtype, the optimizer has the weights in fp32. Losses are in fp32."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @property
    def device_of_weights(self) -> torch.device | None:
        """Return where pretrained weights are put as they are read, and not on the host first, by every rank of it:
        the device; None for the CPU, where each rank keeps a part of them only, and before the processes have
        started."""
        from accelerate.state import PartialState, is_initialized

        shards = self.shards_parameters or self.fully_shards
        if shards or self.layout.model_size > 1 or not is_initialized():
            return None
        device: torch.device = PartialState().device
        return device if device.type != "cpu" else None

    @property
    def lacks_bf16(self) -> bool:
        """True if there is a device, and it does not compute in bf16."""
        return has_bf16(accelerator()) is False

    @contextlib.contextmanager
    def gathered(self, parameter: torch.Tensor, written: bool = True) -> Iterator[None]:
        """The context in which a parameter is whole on every rank, and what all ranks write into it is kept."""
        if self.fully_shards and hasattr(parameter, "cut"):
            parameter.data = torch.cat(self.gather(parameter.data))
            yield
            parameter.data = parameter.cut.of(parameter.data)  # of keep_rows
        elif self.shards_parameters and hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if written else None):
                yield
        else:
            yield

    def read_from_outside(self, module: torch.nn.Module, parameter: torch.Tensor) -> None:
        """Let ZeRO-3 know that `module` reads a parameter that is not its own; else it would find it empty."""
        if self.shards_parameters:
            import deepspeed

            deepspeed.zero.register_external_parameter(module, parameter)

    def sharded_init_reason(self, num_parameters: int) -> str | None:
        """Say why random weights are drawn shard by shard; None: they are drawn in full. Under ZeRO-3, weights drawn
        shard by shard differ from those of every other strategy at the same seed. So where each process of this
        machine can hold the full model for a moment, it is drawn in full, and then sharded."""
        if not self.shards_parameters or self.tensor > 1:
            return None
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = 4 * num_parameters * local
        available = host_memory()[0]
        if needed < available / 2:
            return None
        return (
            f"random weights are drawn shard by shard (full ones would take {needed / 2**30:.1f} GiB of this "
            f"machine's {available / 2**30:.1f}): they differ from those of other strategies at the same seed"
        )

    def building_from_scratch(self, num_parameters: int) -> AbstractContextManager[Any]:
        """The context in which random weights are drawn: in full, where there is room for them."""
        in_full = self.shards_parameters and self.sharded_init_reason(num_parameters) is None
        return without_sharding() if in_full else contextlib.nullcontext()

    def loading(self) -> AbstractContextManager[Any]:
        """The context in which pretrained weights are loaded: in full, where tensor parallelism cuts them before
        ZeRO-3 shards them."""
        return without_sharding() if self.tensor > 1 and self.shards_parameters else contextlib.nullcontext()

    def tensor_group(self) -> "TensorGroup":
        """The ranks that share each layer. All ranks of the run call it together, once the processes have started."""
        groups = model_groups(self.layout)
        return TensorGroup(groups.get_slice_parallel_group(), groups.get_slice_parallel_rank(), self.tensor)


@contextlib.contextmanager
def without_sharding() -> Iterator[None]:
    """Let transformers forget for a while that ZeRO-3 is on (accelerate's zero3_init_flag does not reach it)."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        AcceleratorState().deepspeed_plugin.set_deepspeed_weakref()
