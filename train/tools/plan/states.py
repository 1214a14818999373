"""What a strategy keeps on a device and on the host: weights, gradients, optimizer, buffers and gathered weights.

Sources: DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, read with the resolved configuration;
train/strategy/torch_engine.py for DDP and one process. Sizes are in bytes of one process, the one that holds most.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from train.tools.plan.constants import MASTER_BYTES, MOMENTS_BYTES, NF4_BYTES, NORM_BYTES

ALIGNMENT = 2  # elements and process: of the flat weights of ZeRO-1 and 2 (nccl_start_alignment_factor)


@dataclass(frozen=True)
class Weights:
    """The parameters of the full model, in elements.

    Attributes:
        sizes: (elements, trained) of each parameter.
        layer: elements of one layer, of the largest stack.
        quantised: elements of frozen matrices that are held in 4 bits, or in 8 (`quantised_bytes` each).
    """

    sizes: tuple[tuple[int, bool], ...]
    layer: int = 0
    quantised: int = 0
    quantised_bytes: float = NF4_BYTES

    @property
    def trained(self) -> int:
        return sum(size for size, trained in self.sizes if trained)

    @property
    def frozen(self) -> int:
        return sum(size for size, trained in self.sizes if not trained)

    @property
    def largest(self) -> int:
        """Elements of the largest parameter that is trained."""
        return max((size for size, trained in self.sizes if trained), default=0)

    def persistent(self, threshold: int) -> int:
        """Elements of the parameters that ZeRO-3 never shards."""
        return sum(size for size, _ in self.sizes if size <= threshold)

    def frozen_bytes(self, dtype: torch.dtype) -> int:
        return int((self.frozen - self.quantised) * dtype.itemsize + self.quantised * self.quantised_bytes)


@dataclass(frozen=True)
class States:
    """The states of one strategy, and what its engine takes in each phase.

    Attributes:
        weights, optimizer, buffers: always on the device.
        gradients: always on the device.
        gradients_later: the same from the second micro-batch of an update on.
        keeps_first: gradients of the first micro-batch stay where the backward pass has made them.
        backward: beside `gradients`, during a backward pass: {name: bytes}.
        gathered: weights of other processes, during the passes.
        step: on the device during the optimizer's step, beside weights and optimizer: the largest of its moments.
        load: on the device while the engine is made, beside nothing else. ZeRO-1 and 2 flatten the weights into a copy
            on the device if it has room for that, and else on the host: the copy does not decide what fits.
        host: on the host, of this process: {name: bytes}.
    """

    weights: int
    optimizer: int
    gradients: int = 0
    gradients_later: int = 0
    keeps_first: bool = False
    buffers: int = 0
    backward: dict[str, int] = field(default_factory=dict)
    gathered: int = 0
    step: dict[str, int] = field(default_factory=dict)
    load: int = 0
    host: dict[str, int] = field(default_factory=dict)


def torch_states(weights: Weights, world_size: int, trained_dtype, frozen_dtype, on_gpu: bool) -> States:
    """DDP, whose buckets hold the gradients all the time; or one process, where backward makes them."""
    trained = weights.trained * trained_dtype.itemsize
    held = trained + weights.frozen_bytes(frozen_dtype)
    norm = 0 if on_gpu else NORM_BYTES * weights.largest
    return States(
        weights=held,
        optimizer=MOMENTS_BYTES * weights.trained,
        gradients=trained if world_size > 1 else 0,
        gradients_later=trained,
        keeps_first=world_size == 1,
        step={"gradients": trained, "workspace": norm},
        load=held,
    )


def deepspeed_states(weights: Weights, zero: Any, world_size: int, dtype, accumulates: bool, on_gpu: bool) -> States:
    """ZeRO of any stage.

    Args:
        zero: DeepSpeed's own DeepSpeedZeroConfig of the resolved configuration: defaults are DeepSpeed's.
        accumulates: an update has more than one micro-batch.
    """
    make = _third_stage if int(zero.stage) == 3 else _first_stages
    return make(weights, zero, world_size, dtype.itemsize, dtype, accumulates, on_gpu)


def _first_stages(weights, zero, world_size, width, dtype, accumulates, on_gpu) -> States:
    """ZeRO-1 and ZeRO-2 (stage_1_and_2.py)."""
    trained = _aligned(weights.trained, ALIGNMENT * world_size)
    shard = trained // world_size
    frozen = weights.frozen_bytes(dtype)
    offloads = _device(zero.offload_optimizer) != "none"
    bucket = width * int(zero.reduce_bucket_size) * (2 if zero.overlap_comm else 1)  # setup_buckets
    full_gradients = width * trained if int(zero.stage) == 1 and accumulates else 0
    later = full_gradients if int(zero.stage) == 1 else width * shard
    backward = {"buffers": bucket if zero.contiguous_gradients or offloads else 0}
    common = {"weights": width * trained + frozen, "load": width * trained + frozen}
    if offloads:
        largest = weights.largest
        backward["workspace"] = 4 * largest if width != 4 else 0  # async_inplace_copy_grad_to_fp32_buffer_from_gpu
        host = {
            "optimizer": _pinned((MASTER_BYTES + MOMENTS_BYTES) * shard, zero.offload_optimizer, on_gpu, parts=3),
            "gradients": _pinned(4 * shard, zero.offload_optimizer, on_gpu)
            + (width * shard if accumulates else 0),  # accumulated_grads_in_cpu
            "buffers": _pinned(width * (shard + largest), zero.offload_optimizer, on_gpu),
        }
        return States(
            optimizer=0, buffers=width * largest, backward=backward, gradients_later=full_gradients,
            keeps_first=bool(full_gradients), host=host, **common,
        )  # fmt: skip
    backward["gradients"] = width * shard  # grads_in_partition
    flattened = width * shard + (4 * shard if width != 4 else 0)  # step: averaged, then flat, then fp32
    norm = NORM_BYTES * min(weights.largest, shard)
    collected = 0 if on_gpu else width * trained  # gloo gathers into a tensor of its own, after gradients are gone
    step = {"gradients": width * shard, "workspace": max(flattened, norm, collected - width * shard)}
    return States(
        optimizer=(MASTER_BYTES + MOMENTS_BYTES) * shard, gradients_later=later, keeps_first=bool(full_gradients),
        backward=backward, step=step, **common,
    )  # fmt: skip


def _third_stage(weights, zero, world_size, width, dtype, accumulates, on_gpu) -> States:
    """ZeRO-3 (stage3.py, partitioned_param_coordinator.py)."""
    everything = weights.trained + weights.frozen
    persistent = weights.persistent(int(zero.param_persistence_threshold))
    sharded = everything - persistent
    shard, trained_shard = -(-sharded // world_size), -(-weights.trained // world_size)
    of_weights, of_optimizer = _device(zero.offload_param), _device(zero.offload_optimizer)
    # A parameter is kept after the forward pass if its backward pass is nearer than max_reuse_distance elements.
    kept = min(sharded, int(zero.max_reuse_distance) // 2, int(zero.max_live_parameters))
    largest = max(weights.layer, weights.largest)
    gathered = width * min(sharded, kept + largest + int(zero.prefetch_bucket_size))
    bucket = width * int(zero.reduce_bucket_size)
    host: dict[str, int] = {}
    if of_weights != "none":
        host["weights"] = _pinned(width * shard, zero.offload_param, on_gpu)
    if of_optimizer != "none":
        host["optimizer"] = _pinned((MASTER_BYTES + MOMENTS_BYTES) * trained_shard, zero.offload_optimizer, on_gpu, 3)
        host["gradients"] = _pinned((4 + width) * trained_shard, zero.offload_optimizer, on_gpu, 2)
    gradients = 0 if of_optimizer != "none" else width * trained_shard
    sub_group = min(int(zero.sub_group_size), trained_shard)
    return States(
        weights=width * (persistent + (shard if of_weights == "none" else 0)),
        optimizer=0 if of_optimizer != "none" else (MASTER_BYTES + MOMENTS_BYTES) * trained_shard,
        gradients=gradients,
        gradients_later=gradients,
        buffers=bucket if zero.contiguous_gradients else 0,
        backward={"buffers": bucket},  # the reduction's own copy of a bucket
        gathered=gathered,
        step={"gradients": gradients, "workspace": 4 * sub_group if of_optimizer == "none" else 0},
        load=width * (persistent + shard),
        host=host,
    )


def _device(offload: Any) -> str:
    device = getattr(offload, "device", None) or "none"
    return str(getattr(device, "value", device))


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pinned(size: int, offload: Any, on_gpu: bool, parts: int = 1) -> int:
    """Host memory that is page-locked: CachingHostAllocator rounds each block up to a power of two."""
    if not (on_gpu and getattr(offload, "pin_memory", False)) or size < parts:
        return size
    return parts * 2 ** math.ceil(math.log2(size / parts))
