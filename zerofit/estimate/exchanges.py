"""What a strategy exchanges in an update, what it copies to and from the host, what its optimizer moves, and how
long a collective takes, by the volume and the slowest link of the ring.

Sources: torch's DDP; DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, with the resolved configuration.
Bytes are of the full buffers; sizes are of one process otherwise.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zerofit.estimate.allocations import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MATRIX, REDUCE_SCATTER, Operation
from zerofit.estimate.fully_sharded import FullyShards
from zerofit.estimate.model_states import offload_target
from zerofit.estimate.weights import NORM_BYTES, Weights
from zerofit.strategy.muon import ITERATIONS

# What collectives reach of a link. Source: NCCL's own limit on an A100, 235 of 300 GB/s (src/graph/tuning.cc), and
# S. Bekman's "about 80 %"; between machines Calculon's 0.9.
OF_LINK = 0.78
OF_NETWORK = 0.9

# What a hop of a ring takes, and of a tree (NVLink, PCIe, network), in the protocols LL and Simple; LL has a quarter
# of the bandwidth. Source: NCCL, src/graph/tuning.cc at 01afd20 (baseLat, hwLat).
BASE_S = {"ring": (3.6e-6, 8.4e-6), "tree": (4.4e-6, 4.4e-6)}
HOP_S = {"link": (0.47e-6, 3.4e-6), "pcie": (1.0e-6, 5.7e-6), "network": (2.7e-6, 9.6e-6)}
TREE_HOP_S = {"link": 1.2e-6, "pcie": 1.9e-6, "network": 8.5e-6}
LL_OF_BANDWIDTH = 0.25

# A network between many machines has its links shared: it reaches 1 / (1 + machines / SHARED_BY) of one link. Fitted.
SHARED_BY = 110

# Bytes that AdamW moves for each element: weight, gradient and two moments are read, three of them are written; fp32.
ADAM_BYTES = 28

# The same of others. In 8 bits both moments take a byte each. Adafactor's single operations (transformers 5.23,
# Adafactor.step) read and write a tensor of the parameter's size 21 times. Of Muon see MUON_MOVED_BYTES.
MOVED_BYTES = {"adamw": ADAM_BYTES, "muon": ADAM_BYTES, "adamw_8bit": 16, "adafactor": 21 * 4}

# Bytes that a step of Muon moves for each element beside AdamW's: mean and gradient mixed, norm, scale, the result.
MUON_MOVED_BYTES = 44

# An optimizer on a disk: of each element weight, moments and gradient in fp32 are read and written in an update.
DISK_BYTES = 2 * 16


class Collectives(NamedTuple):
    """Collectives of one kind, one after another: `count` of them."""

    kind: str
    bytes: float  # of the full buffers, all of them together; of an all-to-all, of what each process has
    count: int = 1  # type: ignore[assignment]  # of tuple
    half: bool = False
    group_size: int = 0  # ranks in each; 0: all that shard the same weights
    rank_stride: int = 1  # distance between neighbouring ranks of the group


@dataclass(frozen=True)
class Links:
    """Links of a maker's figures."""

    link: float  # bytes/s of a GPU to the others of its machine, in one direction
    network: float  # of one GPU to other machines
    over_pcie: bool = False  # the GPUs of a machine have no other link
    # collectives within a pass, which wait for it and which it waits for, take longer than alone by this factor
    waited: float = 1.0

    def seconds(self, exchange: Collectives, world_size: int, per_machine: int) -> float:
        """Time of collectives, as NCCL's own model has it (src/graph/tuning.cc): hops, and the volume over the
        slowest link."""
        if world_size < 2 or not exchange.bytes:
            return 0.0
        machines = -(-world_size // per_machine)
        local = min(per_machine, world_size)
        bandwidth = OF_LINK * self.link if local > 1 else math.inf
        if machines > 1:
            bandwidth = min(bandwidth, OF_NETWORK * self.network * local / (1 + machines / SHARED_BY))
        rounds = 2 if exchange.kind == ALL_REDUCE else 1
        each = exchange.bytes / exchange.count * (rounds * (world_size - 1) / world_size)  # that a process sends
        far = rounds * (machines - 1)
        hops = rounds * (world_size - 1)
        near = "pcie" if self.over_pcie else "link"
        ways = [
            BASE_S["ring"][protocol]
            + (hops - far) * HOP_S[near][protocol]
            + far * HOP_S["network"][protocol]
            + each / (bandwidth * (LL_OF_BANDWIDTH if protocol == 0 else 1))
            for protocol in (0, 1)
        ]
        if exchange.kind == ALL_REDUCE:
            tree = 2 * ((local - 1) * TREE_HOP_S[near] + math.log2(machines) * TREE_HOP_S["network"])
            ways.append(BASE_S["tree"][1] + tree + each / bandwidth)
        return exchange.count * min(ways)


DDP_BUCKET = 25 * 2**20  # bytes: torch's default of bucket_cap_mb, which accelerate leaves


@dataclass(frozen=True)
class Exchanges:
    """The communication of an update, and what its engine moves; sizes are in bytes."""

    forward: list[Collectives] = field(default_factory=list)  # in the forward pass of each micro-batch
    backward: list[Collectives] = field(default_factory=list)  # in the backward pass of each
    last_backward: list[Collectives] = field(default_factory=list)  # in the backward pass of the last one only
    step: list[Collectives] = field(default_factory=list)  # with the optimizer's step, which waits for them
    hidden: bool = True  # communication runs beside the passes
    down: float = 0.0  # copied to the host, in each micro-batch
    up: float = 0.0  # copied from the host, in each
    step_up: float = 0.0  # copied from the host after the step
    micro_moved: float = 0.0  # of device memory that the engine moves beside the passes, in each micro-batch
    step_moved: float = 0.0  # the same in the step, the optimizer's included
    products: list[Operation] = field(default_factory=list)  # of the optimizer
    product_rounds: float = 0.0  # how often these are made on a rank
    host_adam_elements: float = 0.0  # that the host's Adam moves
    disk: float = 0.0  # read from a disk and written to it, in an update
    tensors: int = 0  # that are trained, which DeepSpeed's Python handles one by one in its step


def torch_exchanges(weights: Weights, world_size: int, on_gpu: bool, optim: str = "adamw") -> Exchanges:
    """DDP, whose gradients are reduced in buckets once an update; or one process. Gradients are fp32."""
    size = 4 * weights.trained
    is_ddp = world_size > 1
    norm = size + (0 if on_gpu else 2 * NORM_BYTES * weights.trained)
    reduced = [Collectives(ALL_REDUCE, size, max(1, math.ceil(size / DDP_BUCKET)))] if is_ddp else []
    return Exchanges(
        last_backward=reduced,
        micro_moved=3 * size if is_ddp else 0,  # added to the bucket
        # Norm, clipping, the optimizer; DDP's buckets are set to zero.
        step_moved=norm + 2 * size + MOVED_BYTES[optim] * weights.trained + (size if is_ddp else 0),
    )


def fully_sharded_exchanges(
    weights: Weights, world_size: int, width: int, fsdp: FullyShards, replicas: int = 1
) -> Exchanges:
    """FSDP2: an all-gather and a reduce-scatter of each block in each micro-batch; of several
    replicas an all-reduce of the shards in the last one. What travels to divided experts is in the trace.

    Args:
        world_size: ranks of a replica.
        width: bytes of an element of the weights that are gathered.
    """
    gathered = [one for one in weights.all if one.name not in fsdp.divided]
    total = sum(one.size for one in gathered)
    half = width < 4
    trained = sum(one.size for one in gathered if one.trained)
    in_blocks = sum(one.size for one in gathered if weights.place_of(one.name)) if fsdp.reshards else 0
    groups = len({weights.group_of(one.name) for one in gathered})
    blocks = len({weights.place_of(one.name) for one in gathered} - {None})
    shard = weights.trained / world_size
    wide = fsdp.reduce_width
    is_half = fsdp.reduce_width < 4
    reduced = [Collectives(REDUCE_SCATTER, wide * trained, groups, is_half)] if trained else []
    between = [Collectives(ALL_REDUCE, wide * trained / world_size, groups, is_half, replicas, world_size)]
    between = between if trained and replicas > 1 else []
    again = [Collectives(ALL_GATHER, width * in_blocks, blocks, half, fsdp.reshard_group)] if in_blocks else []
    return Exchanges(
        forward=[Collectives(ALL_GATHER, width * total, groups, half)],
        backward=(again + reduced) if fsdp.syncs else again,
        last_backward=between if fsdp.syncs else reduced + between,
        micro_moved=2 * width * (total + in_blocks) + (width + wide) * trained,  # out of flat tensors, and into them
        step_moved=(4 + 8 + ADAM_BYTES) * shard,  # norm, clipping, AdamW
    )


def first_stages_exchanges(weights: Weights, zero: Any, world_size: int, width: int, accumulates: bool) -> Exchanges:
    """The communication of an update under ZeRO-1 or ZeRO-2. `width`: bytes of an element of weights and gradients."""
    trained = weights.trained
    shard = weights.trained / world_size
    half = width < 4
    size = width * trained
    buckets = max(1, math.ceil(trained / int(zero.reduce_bucket_size)))
    # use_multi_rank_bucket_allreduce: an all-reduce, of which each rank keeps its shard.
    reduced = [Collectives(ALL_REDUCE, size, buckets, half)]
    gathers = max(1, math.ceil(trained / int(zero.allgather_bucket_size)))
    in_each = int(zero.stage) == 2
    common: dict[str, Any] = {
        "backward": reduced if in_each else [],
        "last_backward": [] if in_each else reduced,
        "step": [Collectives(ALL_GATHER, size, gathers, half)],
        "hidden": bool(zero.overlap_comm),
        "tensors": len(weights.sizes),
        "micro_moved": 6 * size,  # into the bucket, divided, and out of it
    }
    if offload_target(zero.offload_optimizer) != "none":
        kept = width * shard if accumulates else 0  # what was accumulated goes up, is added to, and comes down
        return Exchanges(down=4 * shard + kept, up=kept, step_up=width * shard, host_adam_elements=shard, **common)
    moved = (
        2 * width + (2 * width + 4) + 2 * NORM_BYTES + 8 + ADAM_BYTES + 4 + width
    )  # flat, fp32, norm, clipped, cast
    return Exchanges(step_moved=moved * shard, **common)


def third_stage_exchanges(weights: Weights, zero: Any, world_size: int, width: int, keeps_layers: bool) -> Exchanges:
    """ZeRO-3, which may keep layers between their forward and their backward pass (`GatheredWeights`)."""
    threshold = int(zero.param_persistence_threshold)
    half = width < 4
    total = sum(one.size for one in weights.all if one.size > threshold)
    trained_shard = weights.trained / world_size
    count = sum(weight.size > threshold for weight in weights.all)
    near = min(total, int(zero.max_reuse_distance) // 2, int(zero.max_live_parameters))
    in_layers = sum(one.size for one in weights.all if one.name.startswith(weights.stacks) and one.size > threshold)
    kept = near if keeps_layers else min(near, total - in_layers)  # from the forward to the backward pass
    again = (total - kept) / total if total else 0  # of the weights; the others are gathered once
    gathered = Collectives(ALL_GATHER, width * total, max(1, count), half)
    within = int(zero.zero_hpz_partition_size)  # ZeRO++: from the copies within a machine
    within_machine = within if within > 1 else 0
    regathered = Collectives(ALL_GATHER, again * width * total, max(1, round(again * count)), half, within_machine)
    buckets = max(1, math.ceil(weights.trained / max(1, int(zero.reduce_bucket_size))))
    persistent = sum(size for size in weights.sizes.values() if size <= threshold)
    fetched = width * total / world_size * (1 + again) if offload_target(zero.offload_param) != "none" else 0
    common: dict[str, Any] = {
        "forward": [gathered] if total else [],
        "backward": [regathered, Collectives(REDUCE_SCATTER, width * weights.trained, buckets, half)],
        "step": [Collectives(ALL_GATHER, width * persistent, 1, half)] if persistent else [],
        "hidden": zero.overlap_comm is not False,  # by default it is on in this stage
        "tensors": len(weights.sizes),
        "up": fetched,
        "micro_moved": 2 * width * total * (1 + again) + 6 * width * weights.trained,
    }
    if offload_target(zero.offload_optimizer) != "none":
        up = 0 if offload_target(zero.offload_param) != "none" else width * trained_shard
        on_disk = offload_target(zero.offload_optimizer) == "nvme"
        disk = DISK_BYTES * trained_shard if on_disk else 0
        return Exchanges(down=width * trained_shard, step_up=up, host_adam_elements=trained_shard, disk=disk, **common)
    moved = (width + 4) + 2 * NORM_BYTES + 8 + ADAM_BYTES + 4 + width
    return Exchanges(step_moved=moved * trained_shard, **common)


def with_muon(exchanges: Exchanges, weights: Weights, half: bool, ranks: int, is_split: bool) -> Exchanges:
    """The exchanges of an update with what Muon's orthogonal updates add (zerofit/strategy/muon.py). `ranks`: that
    share the work."""
    size = sum(weight.size for weight in weights.matrices)
    products = []
    for weight in weights.matrices:
        count, short, long = weight.sides
        for shape in ((count, short, short, long), (count, short, short, short), (count, short, long, short)):
            moved = (2 if half else 4) * count * (shape[1] * shape[2] + shape[1] * shape[3] + shape[2] * shape[3])
            products.append(Operation(MATRIX, half, 2 * math.prod(shape), moved, shape))
    rounds = 2 * math.ceil(len(weights.matrices) / ranks)
    sent = Collectives(ALL_TO_ALL, 2 * (2 if half else 4) * size / ranks, rounds, half)
    return replace(
        exchanges,
        step=[*exchanges.step, *([sent] if is_split else [])],
        step_moved=exchanges.step_moved + MUON_MOVED_BYTES * size / ranks,
        products=products,
        product_rounds=ITERATIONS / ranks,
    )
