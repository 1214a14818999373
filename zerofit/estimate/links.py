"""How long a collective takes: by the volume and the slowest link of the ring, or as it was measured."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from zerofit.estimate.operations import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from zerofit.estimate.speeds import Curve
from zerofit.estimate.time_constants import (
    BASE_S,
    HOP_S,
    LL_OF_BANDWIDTH,
    OF_LINK,
    OF_NETWORK,
    SHARED_BY,
    TREE_HOP_S,
)


class Exchange(NamedTuple):
    """Collectives of one kind, one after another.

    Attributes:
        bytes: of the full buffers, all of them together; of an all-to-all, of what each process has.
        count: how many collectives they are.
        among: ranks; 0: all that shard the same weights.
        apart: from one of them to the next; 1: they stand side by side.
    """

    kind: str
    bytes: float
    count: int = 1  # type: ignore[assignment]  # of tuple
    half: bool = False
    among: int = 0
    apart: int = 1


def bus_factor(kind: str, world_size: int) -> float:
    """What each process sends, relative to the buffer, if a ring does it."""
    return (2 if kind == ALL_REDUCE else 1) * (world_size - 1) / world_size


@dataclass(frozen=True)
class Links:
    """Links of a maker's figures.

    Args:
        link: bytes/s of a GPU to the others of its machine, in one direction.
        network: of one GPU to other machines.
        over_pcie: the GPUs of a machine have no other link.
    """

    link: float
    network: float
    over_pcie: bool = False

    def seconds(self, exchange: Exchange, world_size: int, per_machine: int) -> float:
        """As NCCL's own model has it (src/graph/tuning.cc): hops, and the volume over the slowest link."""
        if world_size < 2 or not exchange.bytes:
            return 0.0
        machines, local = -(-world_size // per_machine), min(per_machine, world_size)
        bandwidth = OF_LINK * self.link if local > 1 else math.inf
        if machines > 1:
            bandwidth = min(bandwidth, OF_NETWORK * self.network * local / (1 + machines / SHARED_BY))
        each = exchange.bytes / exchange.count * bus_factor(exchange.kind, world_size)
        rounds = 2 if exchange.kind == ALL_REDUCE else 1
        far, hops = rounds * (machines - 1), rounds * (world_size - 1)
        near = "pcie" if self.over_pcie else "link"
        ways = [
            BASE_S["ring"][protocol] + (hops - far) * HOP_S[near][protocol] + far * HOP_S["network"][protocol]
            + each / (bandwidth * (LL_OF_BANDWIDTH if protocol == 0 else 1))
            for protocol in (0, 1)
        ]  # fmt: skip
        if exchange.kind == ALL_REDUCE:
            tree = 2 * ((local - 1) * TREE_HOP_S[near] + math.log2(machines) * TREE_HOP_S["network"])
            ways.append(BASE_S["tree"][1] + tree + each / bandwidth)
        return exchange.count * min(ways)


@dataclass(frozen=True)
class MeasuredLinks:
    """Links within a machine, as `zerofit plan --calibrate` found them.

    Args:
        curves: {(kind, half precision): bytes/s of the full buffer by its bytes}.
        world_size: of the measurement.
        network: as that of Links.
    """

    curves: dict[tuple[str, bool], Curve]
    world_size: int
    network: float

    def seconds(self, exchange: Exchange, world_size: int, per_machine: int) -> float:
        if world_size < 2 or not exchange.bytes:
            return 0.0
        each = exchange.bytes / exchange.count
        factor = bus_factor(exchange.kind, world_size)
        measured = ALL_GATHER if exchange.kind == ALL_TO_ALL else exchange.kind  # of as many bytes
        within = each / self.curves[measured, exchange.half].at(each) / bus_factor(exchange.kind, self.world_size)
        between = 0.0
        if world_size > per_machine:
            shared = 1 + math.ceil(world_size / per_machine) / SHARED_BY
            between = each * shared / (OF_NETWORK * self.network * per_machine)
        return exchange.count * factor * max(within, between)
