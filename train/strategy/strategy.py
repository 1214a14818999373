"""The strategy of a run: everything that can be checked is checked before data is read or a process group exists."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from train.recipe.errors import UserError
from train.recipe.options import Recipe
from train.strategy.batches import BatchSizes, resolve_batches
from train.strategy.builds import announce_builds, drop_abandoned_locks
from train.strategy.deepspeed_json import read_config, refuse_another_optimizer, resolve_config, stated_precision
from train.strategy.gpus import check_devices, idle_devices
from train.strategy.launch import Launch, read_launch, tell_deepspeed_of_a_cpu
from train.strategy.layout import ParallelLayout
from train.strategy.machines import everyones
from train.strategy.named import take_named

# Longer than anything takes for which ranks wait for one of them: data that another machine prepares, a checkpoint
# that is read or written, an export. A rank that hangs is found by its watchdog.
COLLECTIVE_TIMEOUT = timedelta(hours=24)


SHARES_DEVICES = "ZEROFIT_SHARES_DEVICES"  # set by `zerofit compare`, where one device stands for several


@dataclass
class Strategy:
    """How the run is laid out. `deepspeed` is the resolved DeepSpeed configuration, or None under DDP and alone."""

    launch: Launch
    batches: BatchSizes
    precision: str
    deepspeed: dict[str, Any] | None
    source: str  # who stated the DeepSpeed configuration
    notes: list[str] = field(default_factory=list)
    plugin: Any = None
    device: Any = None  # this rank's torch.device, once the processes have started
    stated: list["Stated"] = field(default_factory=list)  # every place that states the precision

    gather = staticmethod(everyones)

    @property
    def layout(self) -> ParallelLayout:
        """Which part of the model, and which samples, this process works on."""
        return ParallelLayout(self.launch.world_size, self.launch.rank)

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank holds a share of the weights only (ZeRO-3)."""
        return self.deepspeed is not None and self.deepspeed["zero_optimization"].get("stage") == 3

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the host moves the weights."""
        zero = self.deepspeed["zero_optimization"] if self.deepspeed is not None else {}
        return (zero.get("offload_optimizer") or {}).get("device", "none") != "none"

    @property
    def name(self) -> str:
        """The pair's name, else what the launcher's file or flags come to."""
        if self.launch.pair:
            return self.launch.pair
        if self.deepspeed is not None:
            return f"zero{self.deepspeed['zero_optimization'].get('stage')}"
        return "ddp" if self.launch.world_size > 1 else "single"

    @property
    def describe(self) -> str:
        """One line for the log."""
        b = self.batches
        sizes = f"global batch {b.global_batch} = {b.micro_batch} x {b.accumulation} accumulation x {b.replicas}"
        return f"{self.describe_layout}, {sizes}"

    @property
    def describe_layout(self) -> str:
        """The same without the batches of training."""
        processes, launch = self.launch.world_size, self.launch
        file = launch.config_file or (launch.json_path if self.deepspeed is not None else None)
        name = self.name if launch.pair or not file else f"{self.name} ({file})"
        return ", ".join([name, f"{processes} process{'es' if processes > 1 else ''}", self.precision])

    # ------------------------------------------------------------------------------------------------------- building

    def accelerator(self, timeout: timedelta | None = None, shares_devices: bool = False, **kwargs):
        """Start the process group and build the Accelerator.

        Args:
            timeout: of what the processes do together; by default COLLECTIVE_TIMEOUT.
            shares_devices: more processes than devices are welcome.

        Raises:
            UserError: fp16 without a GPU; more processes than devices.
            RuntimeError: the processes do not find each other (each would train alone, without a word).
        """
        import torch
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

        from train.strategy.devices import use_threads_of_share

        # DeepSpeed calls collectives by names that torch 2.13 deprecates, once for every layer of every update.
        warnings.filterwarnings("ignore", message="`torch.distributed.*deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        self.check_precision()
        on_cpu = not torch.accelerator.is_available()
        if on_cpu:
            tell_deepspeed_of_a_cpu()
        if (on_cpu or self.offloads_optimizer) and not self.launch.threads_are_the_users:
            use_threads_of_share()
        grouped = self.launch.world_size > 1 or self.deepspeed is not None
        shared = not on_cpu and self._share_devices(torch.accelerator.device_count(), shares_devices)
        backend = {"backend": "gloo"} if (on_cpu or shared) and grouped else {}
        if self.deepspeed is not None:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                self.notes += [
                    f"{lock} was left by a build that was killed: removed" for lock in drop_abandoned_locks()
                ]
            announce_builds()
            self.plugin = kwargs["deepspeed_plugin"] = self._deepspeed_plugin()
            kwargs["gradient_accumulation_steps"] = self.batches.accumulation
        # Gradients lie in DDP's buckets and not beside them; buffers (positions, masks) are the same on all ranks.
        # No static_graph: with no_sync it fails (pytorch/pytorch#187732), and some models drop layers at random.
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        accelerator = Accelerator(
            cpu=on_cpu and self.deepspeed is None,
            mixed_precision={"fp32": "no"}.get(self.precision, self.precision),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout or COLLECTIVE_TIMEOUT, **backend), ddp],
            **kwargs,
        )
        if accelerator.num_processes != self.launch.world_size:
            raise RuntimeError(
                f"the launcher started {self.launch.world_size} processes, and accelerate sees "
                f"{accelerator.num_processes} ({accelerator.distributed_type}): each would train alone"
            )
        self.device = accelerator.device
        self.notes += filter(None, [idle_devices()])
        self._hint_at_precision()
        return accelerator

    def _hint_at_precision(self) -> None:
        from train.strategy.devices import faster_precisions

        ways = {"bf16": "--precision bf16", "tf32": "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 (factors rounded to TF32)"}
        faster = [ways[each] for each in faster_precisions(self.device)] if self.precision == "fp32" else []
        if faster:
            self.notes.append(f"fp32 is the slowest precision of this device. Faster: {', or '.join(faster)}")

    def _share_devices(self, num_devices: int, welcome: bool) -> bool:
        """Whether processes of this machine share devices: NCCL refuses two on one GPU, gloo does not.

        Raises:
            UserError: they would have to, and nobody has allowed it.
        """
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if processes <= num_devices:
            return False
        if not (welcome or os.environ.get(SHARES_DEVICES)):
            raise UserError(
                f"num_processes: {processes} on this machine, which has {num_devices} "
                f"device{'s' if num_devices > 1 else ''}. Use --num_processes {num_devices}"
            )
        # Both accelerate and DeepSpeed take LOCAL_RANK for the number of the device.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % num_devices)
        return True

    def _deepspeed_plugin(self):
        from accelerate import DeepSpeedPlugin

        # accelerate's own comparison of YAML and JSON is ours by now (launch.py, deepspeed_json.py), and it would take
        # the resolved configuration for a second opinion.
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
        init = os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true") == "true"
        return DeepSpeedPlugin(hf_ds_config=self.deepspeed, zero3_init_flag=init and self.shards_parameters)

    def check_precision(self) -> None:
        """See that there is a device for the precision.

        Raises:
            UserError: fp16 without a GPU; one problem for each place that asks for it.
        """
        if self.precision != "fp16":
            return
        import torch

        if not torch.accelerator.is_available():
            raise UserError(
                f"{each.statement} needs a GPU: its loss scaling has no CPU kernels. {each.remedy}"
                for each in self.stated
            )

    def drop_optimizer(self) -> None:
        """Nothing is trained: leave out what is said of optimizer and schedule; before the processes start."""
        if self.deepspeed is not None:
            for part in ("optimizer", "scheduler"):
                self.deepspeed.pop(part, None)
            self.deepspeed["zero_optimization"].pop("offload_optimizer", None)

    def use_precision(self, precision: str) -> None:
        """Train in another precision than was asked for; before the processes start. The caller says so."""
        self.precision = precision
        if self.deepspeed is not None:
            for half in ("bf16", "fp16"):
                self.deepspeed[half] = {**self.deepspeed.get(half, {}), "enabled": precision == half}

    @property
    def model_dtype(self):
        """The dtype that weights have here: DeepSpeed casts the model itself, accelerate keeps fp32 and autocasts."""
        import torch

        return self.frozen_dtype if self.deepspeed is not None else torch.float32

    @property
    def frozen_dtype(self):
        """The dtype of weights that are not trained: no optimizer needs them in fp32."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @property
    def device_of_weights(self):
        """Where pretrained weights are put as they are read, and not on the host first, by every rank of it: the
        device; None for the CPU, and where each rank keeps a share of them only."""
        return None if self.shards_parameters or self.device is None or self.device.type == "cpu" else self.device

    @property
    def lacks_bf16(self) -> bool:
        """Whether there is a device, and it does not compute in bf16."""
        import torch

        from train.strategy.devices import has_bf16

        return torch.accelerator.is_available() and has_bf16(torch.accelerator.current_accelerator()) is False

    def gathered(self, parameter, written: bool = True) -> AbstractContextManager:
        """The context in which a parameter is whole on every rank, and what all ranks write into it is kept."""
        if not self.shards_parameters or not hasattr(parameter, "ds_id"):
            return contextlib.nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if written else None)

    def read_from_outside(self, module, parameter) -> None:
        """Let ZeRO-3 know that `module` reads a parameter that is not its own; else it would find it empty."""
        if self.shards_parameters:
            import deepspeed

            deepspeed.zero.register_external_parameter(module, parameter)

    def building_from_scratch(self, num_parameters: int) -> AbstractContextManager:
        """The context in which random weights are drawn.

        Under ZeRO-3, weights drawn share by share differ from those of every other strategy at the same seed. So where
        each process of this machine can hold the whole model for a moment, it is drawn whole, and then shared out.
        """
        if not self.shards_parameters:
            return contextlib.nullcontext()
        from train.strategy.host_memory import host_memory

        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed, available = 4 * num_parameters * local, host_memory()[0]
        if needed < available / 2:
            return self._whole()
        self.notes.append(
            f"random weights are drawn share by share (whole ones would take {needed / 2**30:.1f} GiB of this "
            f"machine's {available / 2**30:.1f}): they differ from those of other strategies at the same seed"
        )
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Let transformers forget for a while that ZeRO-3 is on (accelerate's zero3_init_flag does not reach it)."""
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        try:
            yield
        finally:
            self.plugin.set_deepspeed_weakref()


def read_strategy(recipe: Recipe) -> Strategy:
    """Read the launcher's environment and the pair behind it, and settle recipe against YAML against JSON.

    Values that the recipe leaves open and the pair states are adopted into the recipe.

    Raises:
        UserError: any contradiction, with both values and both sources; a GPU that torch does not see.
    """
    launch = read_launch(take_named(recipe))
    check_devices()
    said = [_said_by_launcher(launch)]
    if not launch.deepspeed:
        recipe.precision, said = _settle_precision(recipe, said)
        return Strategy(
            launch, resolve_batches(recipe, launch.world_size), recipe.precision, None, launch.source, stated=said
        )
    config, source, notes = read_config(launch)
    recipe.precision, said = _settle_precision(recipe, [*said, _said_by_json(config, source)])
    resolved, batches = resolve_config(config, source, recipe, launch)
    strategy = Strategy(launch, batches, recipe.precision, resolved, source, notes, stated=said)
    strategy.use_precision(recipe.precision)
    refuse_another_optimizer(resolved, source, recipe.precision)
    if not recipe.trains:
        strategy.drop_optimizer()
    return strategy


class Stated(NamedTuple):
    """A precision, and the place that states it."""

    value: str | None  # None: it is left open there
    source: str
    statement: str
    remedy: str  # where there is no device for it


def _said_by_launcher(launch: Launch) -> Stated:
    if launch.states_precision_by_flag:
        source = "accelerate launch"
        return Stated(launch.precision, source, f"{source} --mixed_precision {launch.precision}", "Use bf16 or no")
    statement = f"{launch.config_file}: mixed_precision = {launch.precision}"
    return Stated(launch.precision, launch.source, statement, 'Write bf16, or "no" for fp32')


def _said_by_json(config: dict[str, Any], source: str) -> Stated:
    value = stated_precision(config, source)
    return Stated(value, source, f"{source}: {value}.enabled = true", 'Write "auto"')


def _settle_precision(recipe, statements: list[Stated]) -> tuple[str, list[Stated]]:
    """(the precision, those who state it)."""
    said = [each for each in statements if each.value]
    source = recipe.source("precision")
    if source:
        said.append(Stated(recipe.precision, source, f"precision = {recipe.precision} ({source})",
                           "Use bf16 or fp32"))  # fmt: skip
    if len({each.value for each in said}) > 1:
        sides = " and ".join(f"{each.value} ({each.source})" for each in said)
        raise UserError(
            f"precision is {sides}: make them agree. The recipe's `precision` is its place, "
            "the others may leave it open"
        )
    return (said[0].value if said else "fp32"), said
