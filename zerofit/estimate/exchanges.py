"""The communication of an update under each strategy, its copies to and from the host, and the bytes its optimizer
moves; and the time of a collective, which follows from its volume and the slowest link of the ring.

Sources: torch's DDP; DeepSpeed 0.19, runtime/zero/stage_1_and_2.py and stage3.py, with the resolved configuration.
Bytes of collectives are those of the full buffers; other sizes are those of one process.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zerofit.estimate.allocations import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, MATRIX, REDUCE_SCATTER, Operation
from zerofit.estimate.fully_sharded import Fsdp2Settings
from zerofit.estimate.model_states import offload_target
from zerofit.estimate.weights import NORM_BYTES, Weights
from zerofit.strategy.muon import NEWTON_SCHULZ_STEPS

# The share of a link's bandwidth that collectives reach. Source: NCCL's limit on an A100, 235 of 300 GB/s
# (src/graph/tuning.cc), and S. Bekman's "about 80 %"; between machines Calculon's 0.9.
LINK_EFFICIENCY = 0.78
NETWORK_EFFICIENCY = 0.9

# Latencies of a hop of a ring and of a tree (NVLink, PCIe, network), for the protocols (LL, Simple); LL has a quarter
# of the bandwidth. Source: NCCL, src/graph/tuning.cc at 01afd20 (baseLat, hwLat).
BASE_S = {"ring": (3.6e-6, 8.4e-6), "tree": (4.4e-6, 4.4e-6)}
HOP_S = {"link": (0.47e-6, 3.4e-6), "pcie": (1.0e-6, 5.7e-6), "network": (2.7e-6, 9.6e-6)}
TREE_HOP_S = {"link": 1.2e-6, "pcie": 1.9e-6, "network": 8.5e-6}
LL_BANDWIDTH = 0.25

# A network between many machines shares its links: it reaches 1 / (1 + machines / SHARING_MACHINES) of one. Fitted.
SHARING_MACHINES = 110

# Bytes that AdamW moves per element: weight, gradient and two moments are read, three of them are written; fp32.
ADAM_BYTES = 28

# Bytes that each optimizer moves per element. In 8 bits a moment takes one byte. Adafactor's operations (transformers
# 5.23, Adafactor.step) read and write a tensor of the parameter's size 21 times. For Muon see MUON_MOVED_BYTES.
MOVED_BYTES = {"adamw": ADAM_BYTES, "muon": ADAM_BYTES, "adamw_8bit": 16, "adafactor": 21 * 4}

# Bytes that a step of Muon moves per element in addition to AdamW's: mixing mean and gradient, norm, scale, result.
MUON_MOVED_BYTES = 44

# An optimizer on a disk reads and writes weight, moments and gradient of each element in fp32 in every update.
DISK_ELEMENT_BYTES = 2 * 16


class Collectives(NamedTuple):
    """A number of collectives of one kind, one after another."""

    kind: str
    bytes: float  # sum over the full buffers; of an all-to-all, over the data of each process
    count: int = 1  # type: ignore[assignment]  # it replaces tuple.count
    half: bool = False
    group_size: int = 0  # ranks in a group; 0: all that shard the same weights
    rank_stride: int = 1  # distance between neighbouring ranks of the group


@dataclass(frozen=True)
class Links:
    """The bandwidths of a GPU's links, by the maker's figures."""

    link: float  # bytes/s of a GPU to the others of its machine, in one direction
    network: float  # bytes/s of one GPU to other machines
    over_pcie: bool = False  # True if the GPUs of a machine have no link but PCIe
    # collectives on the critical path of a pass take longer than alone by this factor
    waited: float = 1.0

    def seconds(self, exchange: Collectives, world_size: int, per_machine: int) -> float:
        """Return the time of collectives by NCCL's model (src/graph/tuning.cc): the latency of the hops, and the
        volume over the slowest link."""
        if world_size < 2 or not exchange.bytes:
            return 0.0
        machines = -(-world_size // per_machine)
        local = min(per_machine, world_size)
        bandwidth = LINK_EFFICIENCY * self.link if local > 1 else math.inf
        if machines > 1:
            bandwidth = min(bandwidth, NETWORK_EFFICIENCY * self.network * local / (1 + machines / SHARING_MACHINES))
        rounds = 2 if exchange.kind == ALL_REDUCE else 1
        sent = exchange.bytes / exchange.count * (rounds * (world_size - 1) / world_size)  # bytes per process
        far_hops = rounds * (machines - 1)
        hops = rounds * (world_size - 1)
        local_link = "pcie" if self.over_pcie else "link"
        times = [
            BASE_S["ring"][protocol]
            + (hops - far_hops) * HOP_S[local_link][protocol]
            + far_hops * HOP_S["network"][protocol]
            + sent / (bandwidth * (LL_BANDWIDTH if protocol == 0 else 1))
            for protocol in (0, 1)
        ]
        if exchange.kind == ALL_REDUCE:
            tree = 2 * ((local - 1) * TREE_HOP_S[local_link] + math.log2(machines) * TREE_HOP_S["network"])
            times.append(BASE_S["tree"][1] + tree + sent / bandwidth)
        return exchange.count * min(times)


DDP_BUCKET_BYTES = 25 * 2**20  # torch's default of bucket_cap_mb, which accelerate does not change


@dataclass(frozen=True)
class Exchanges:
    """The communication of an update, and the bytes that its engine moves."""

    forward: list[Collectives] = field(default_factory=list)  # in the forward pass of each micro-batch
    backward: list[Collectives] = field(default_factory=list)  # in the backward pass of each micro-batch
    last_backward: list[Collectives] = field(default_factory=list)  # in the backward pass of the last one only
    step: list[Collectives] = field(default_factory=list)  # with the optimizer's step, which waits for them
    hidden: bool = True  # True if communication overlaps the passes
    down: float = 0.0  # copied to the host, in each micro-batch
    up: float = 0.0  # copied from the host, in each micro-batch
    step_up: float = 0.0  # copied from the host after the step
    micro_moved: float = 0.0  # moved in device memory by the engine in each micro-batch, without the passes
    step_moved: float = 0.0  # moved in device memory in the step, including the optimizer
    products: list[Operation] = field(default_factory=list)  # matrix products of the optimizer
    product_rounds: float = 0.0  # how often a rank computes these products
    host_adam_elements: float = 0.0  # elements that the host's Adam updates
    disk: float = 0.0  # read from a disk and written to it, in an update
    tensors: int = 0  # number of trained tensors, which DeepSpeed's Python handles one by one in its step


def torch_exchanges(weights: Weights, world_size: int, on_gpu: bool, optim: str = "adamw") -> Exchanges:
    """Return the exchanges of DDP, which reduces buckets of fp32 once per update, or of a single process."""
    size = 4 * weights.trained
    is_ddp = world_size > 1
    norm = size + (0 if on_gpu else 2 * NORM_BYTES * weights.trained)
    reduced = [Collectives(ALL_REDUCE, size, max(1, math.ceil(size / DDP_BUCKET_BYTES)))] if is_ddp else []
    return Exchanges(
        last_backward=reduced,
        micro_moved=3 * size if is_ddp else 0,  # added to the bucket
        # norm, clipping, the optimizer; under DDP the buckets are also set to zero
        step_moved=norm + 2 * size + MOVED_BYTES[optim] * weights.trained + (size if is_ddp else 0),
    )


def fully_sharded_exchanges(
    weights: Weights, world_size: int, width: int, fsdp: Fsdp2Settings, replicas: int = 1
) -> Exchanges:
    """Return the exchanges of FSDP2: an all-gather and a reduce-scatter of each block in each micro-batch, and with
    several replicas an all-reduce of the shards in the last one. Tokens that are sent to experts are in the trace.

    Args:
        world_size: ranks of a replica.
        width: bytes of an element of the weights that are gathered.
    """
    gathered = [weight for weight in weights.all if weight.name not in fsdp.divided]
    total = sum(weight.size for weight in gathered)
    half = width < 4
    trained = sum(weight.size for weight in gathered if weight.trained)
    in_blocks = sum(weight.size for weight in gathered if weights.place_of(weight.name)) if fsdp.reshards else 0
    groups = len({weights.group_of(weight.name) for weight in gathered})
    blocks = len({weights.place_of(weight.name) for weight in gathered} - {None})
    shard = weights.trained / world_size
    reduce_width = fsdp.reduce_width
    is_half = fsdp.reduce_width < 4
    reduced = [Collectives(REDUCE_SCATTER, reduce_width * trained, groups, is_half)] if trained else []
    replicated = [Collectives(ALL_REDUCE, reduce_width * trained / world_size, groups, is_half, replicas, world_size)]
    replicated = replicated if trained and replicas > 1 else []
    regathered = [Collectives(ALL_GATHER, width * in_blocks, blocks, half, fsdp.reshard_group)] if in_blocks else []
    return Exchanges(
        forward=[Collectives(ALL_GATHER, width * total, groups, half)],
        backward=(regathered + reduced) if fsdp.syncs else regathered,
        last_backward=replicated if fsdp.syncs else reduced + replicated,
        # copies from and to flat tensors
        micro_moved=2 * width * (total + in_blocks) + (width + reduce_width) * trained,
        step_moved=(4 + 8 + ADAM_BYTES) * shard,  # norm, clipping, AdamW
    )


def first_stages_exchanges(weights: Weights, zero: Any, world_size: int, width: int, accumulates: bool) -> Exchanges:
    """Return the exchanges of ZeRO-1 or ZeRO-2. `width`: bytes of an element of weights and gradients."""
    trained = weights.trained
    shard = weights.trained / world_size
    half = width < 4
    size = width * trained
    buckets = max(1, math.ceil(trained / int(zero.reduce_bucket_size)))
    # use_multi_rank_bucket_allreduce: each rank keeps its shard of the all-reduce's result.
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
        kept = width * shard if accumulates else 0  # accumulated gradients are copied to the device and back
        return Exchanges(down=4 * shard + kept, up=kept, step_up=width * shard, host_adam_elements=shard, **common)
    # flat copy, copy in fp32, norm, clipping, AdamW, cast
    moved = 2 * width + (2 * width + 4) + 2 * NORM_BYTES + 8 + ADAM_BYTES + 4 + width
    return Exchanges(step_moved=moved * shard, **common)


def third_stage_exchanges(weights: Weights, zero: Any, world_size: int, width: int, keeps_layers: bool) -> Exchanges:
    """Return the exchanges of ZeRO-3. `keeps_layers`: as `keeps` of GatheredWeights."""
    threshold = int(zero.param_persistence_threshold)
    half = width < 4
    sharded = [weight for weight in weights.all if weight.size > threshold]
    total = sum(weight.size for weight in sharded)
    trained_shard = weights.trained / world_size
    count = len(sharded)
    max_kept = min(total, int(zero.max_reuse_distance) // 2, int(zero.max_live_parameters))
    in_layers = sum(weight.size for weight in sharded if weight.name.startswith(weights.stacks))
    kept = max_kept if keeps_layers else min(max_kept, total - in_layers)  # from the forward to the backward pass
    share = (total - kept) / total if total else 0  # fraction of the weights that are gathered twice
    gathered = Collectives(ALL_GATHER, width * total, max(1, count), half)
    ranks_per_copy = int(zero.zero_hpz_partition_size)  # ZeRO++: gathered from the copies within a machine
    within_machine = ranks_per_copy if ranks_per_copy > 1 else 0
    regathered = Collectives(ALL_GATHER, share * width * total, max(1, round(share * count)), half, within_machine)
    buckets = max(1, math.ceil(weights.trained / max(1, int(zero.reduce_bucket_size))))
    persistent = sum(size for size in weights.sizes.values() if size <= threshold)
    fetched = width * total / world_size * (1 + share) if offload_target(zero.offload_param) != "none" else 0
    common: dict[str, Any] = {
        "forward": [gathered] if total else [],
        "backward": [regathered, Collectives(REDUCE_SCATTER, width * weights.trained, buckets, half)],
        "step": [Collectives(ALL_GATHER, width * persistent, 1, half)] if persistent else [],
        "hidden": zero.overlap_comm is not False,  # overlap_comm is on by default in this stage
        "tensors": len(weights.sizes),
        "up": fetched,
        "micro_moved": 2 * width * total * (1 + share) + 6 * width * weights.trained,
    }
    if offload_target(zero.offload_optimizer) != "none":
        up = 0 if offload_target(zero.offload_param) != "none" else width * trained_shard
        on_disk = offload_target(zero.offload_optimizer) == "nvme"
        disk = DISK_ELEMENT_BYTES * trained_shard if on_disk else 0
        return Exchanges(down=width * trained_shard, step_up=up, host_adam_elements=trained_shard, disk=disk, **common)
    moved = (width + 4) + 2 * NORM_BYTES + 8 + ADAM_BYTES + 4 + width
    return Exchanges(step_moved=moved * trained_shard, **common)


def with_muon(exchanges: Exchanges, weights: Weights, half: bool, ranks: int, is_split: bool) -> Exchanges:
    """Return the exchanges of an update with those of Muon's orthogonal updates (zerofit/strategy/muon.py) added.
    `ranks`: number of ranks that share the work. `is_split`: True if they also shard the matrices."""
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
        product_rounds=NEWTON_SCHULZ_STEPS / ranks,
    )
