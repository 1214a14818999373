"""The processes of a run: their process group, and accelerate's Accelerator over it."""

import contextlib
import os
import warnings
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs, InitProcessGroupKwargs

from zerofit.compat.deepspeed import without_shared_memory
from zerofit.recipe.errors import UserError
from zerofit.strategy.builds import describe_build, drop_abandoned_locks
from zerofit.strategy.devices import faster_precisions, use_threads_of_share
from zerofit.strategy.launch import SHARES_DEVICES, tell_deepspeed_of_a_cpu
from zerofit.strategy.state import check_async_io
from zerofit.strategy.strategy import Strategy

# Longer than any work of one rank for which others wait: preparing data, reading or writing a checkpoint, an export.
# The watchdog finds a rank that hangs.
COLLECTIVE_TIMEOUT = timedelta(hours=24)
# Variables that launchers set for each rank, with their value for a single process.
RANK_DEFAULTS = {
    "WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_SIZE": "1",
    "PMI_SIZE": "1",
    "MV2_COMM_WORLD_SIZE": "1",
    "LOCAL_RANK": "-1",
}
FASTER = {"bf16": "--precision bf16", "tf32": "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 (factors rounded to TF32)"}


def make_accelerator(
    strategy: Strategy, timeout: timedelta = COLLECTIVE_TIMEOUT, **kwargs: Any
) -> tuple[Accelerator, list[str]]:
    """Start the process group and build the Accelerator.

    Returns: the Accelerator, and notes for the log.

    Raises:
        UserError: fp16 without a GPU; more processes than devices; no launcher has started several.
        RuntimeError: the processes do not find each other (each would silently train alone).
    """
    # DeepSpeed calls collectives by names that torch 2.13 deprecates, once for every layer of every update.
    warnings.filterwarnings("ignore", message="`torch.distributed.*deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    strategy.check_precision()
    _check_started()
    launch = strategy.launch
    on_cpu = not torch.accelerator.is_available()
    notes: list[str] = []
    tell_deepspeed_of_a_cpu()
    if (on_cpu or strategy.offloads_optimizer) and not launch.threads_are_the_users:
        use_threads_of_share()
    grouped = launch.world_size > 1 or strategy.deepspeed is not None
    shared = not on_cpu and _share_devices(torch.accelerator.device_count())
    backend = {"backend": "gloo"} if (on_cpu or shared) and grouped else {}
    if strategy.deepspeed is not None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            notes += [f"{lock} was left by a build that was killed: removed" for lock in drop_abandoned_locks()]
            notes += filter(None, [describe_build("cpu_adam") if strategy.offloads_optimizer else None])
        # accelerate would compare the YAML with the resolved configuration, and refuse the difference.
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
        init = os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true") == "true" and strategy.shards_parameters
        kwargs["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=strategy.deepspeed, zero3_init_flag=init)
        if strategy.optimizer_device == "nvme":
            check_async_io()
        kwargs["gradient_accumulation_steps"] = strategy.batches.accumulation
    # Gradients lie in DDP's buckets and not beside them; buffers (positions, masks) are the same on all ranks.
    # No static_graph: with no_sync it fails (pytorch/pytorch#187732).
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    for name in ("FSDP", "PARALLELISM_CONFIG"):  # the engine shards, and transformers would load on one rank only
        os.environ.pop(f"ACCELERATE_USE_{name}", None)
    os.environ.pop("ACCELERATE_FP8_BACKEND", None)  # accelerate would convert layers of its own choice, the head too
    with without_shared_memory() if strategy.deepspeed is not None else contextlib.nullcontext():
        accelerator = Accelerator(
            cpu=on_cpu and strategy.deepspeed is None,
            mixed_precision={"fp32": "no"}.get(strategy.precision, strategy.precision),
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout, **backend), ddp],
            **kwargs,
        )
    world = torch.distributed.group.WORLD
    if shared and world is not None:  # DeepSpeed has bound it to a device, and gloo cannot split such a group
        world.bound_device_id = None
    if accelerator.num_processes != launch.world_size:
        raise RuntimeError(
            f"the launcher started {launch.world_size} processes, and accelerate sees "
            f"{accelerator.num_processes} ({accelerator.distributed_type}): each would train alone"
        )
    faster = [FASTER[name] for name in faster_precisions(accelerator.device)] if strategy.precision == "fp32" else []
    if faster:
        notes.append(f"fp32 is the slowest precision of this device. Faster: {', or '.join(faster)}")
    return accelerator, notes


def _check_started() -> None:
    """Raises UserError where variables are those of several processes, and no launcher has set MASTER_ADDR."""
    changed = [name for name, default in RANK_DEFAULTS.items() if os.environ.get(name, default) != default]
    if changed and "MASTER_ADDR" not in os.environ:
        name = changed[0]
        raise UserError(
            f"{name} = {os.environ[name]} is set, and MASTER_ADDR is not: no launcher has started this process. "
            f"Use zerofit launch, accelerate launch or torchrun, or unset {name}"
        )


def _share_devices(num_devices: int) -> bool:
    """Return whether processes of this machine share devices: NCCL refuses two on one GPU, gloo does not. Raises
    UserError where nobody has allowed it."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes <= num_devices:
        return False
    if not os.environ.get(SHARES_DEVICES):
        raise UserError(
            f"num_processes: {processes} on this machine, which has {num_devices} "
            f"device{'s' if num_devices > 1 else ''}. Use --num_processes {num_devices}"
        )
    # Both accelerate and DeepSpeed take LOCAL_RANK for the number of the device.
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % num_devices)
    return True
