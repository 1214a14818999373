"""The predicted time of an update: passes, communication, what is copied to and from the host, the optimizer."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from zerofit.estimate.exchanges import Exchanges
from zerofit.estimate.links import Exchange
from zerofit.estimate.operations import BY_FLOPS, EXCHANGES, Operation
from zerofit.estimate.speeds import Speeds
from zerofit.estimate.time_constants import BACKWARD_STARTS, DISK, FUSED, FUSED_STARTS, HOST_STEP
from zerofit.estimate.traced_steps import TracedStep, host_inputs

STARTS, COMMUNICATION, OPTIMIZER, HOST, BUBBLE = (
    "starting operations", "communication", "optimizer step", "host", "pipeline bubble",
)  # fmt: skip


class AnyLinks(Protocol):
    def seconds(self, exchange: Exchange, world_size: int, per_machine: int) -> float: ...


@dataclass(frozen=True)
class PassTime:
    """The time of a micro-batch's passes on one device, in seconds.

    Attributes:
        parts: {kind of operation: seconds}, of both passes.
        offloaded: bytes that are copied to the host in the forward pass, and back in the backward pass.
    """

    forward: float
    backward: float
    parts: dict[str, float]
    offloaded: float = 0.0

    def towards(self, other: "PassTime", part: float) -> "PassTime":
        """On the line from this one (part 0) to another (part 1), and beyond it."""
        between = lambda first, second: max(0.0, first + part * (second - first))  # noqa: E731
        names = dict.fromkeys((*self.parts, *other.parts))
        return PassTime(
            between(self.forward, other.forward), between(self.backward, other.backward),
            {name: between(self.parts.get(name, 0.0), other.parts.get(name, 0.0)) for name in names},
            between(self.offloaded, other.offloaded),
        )  # fmt: skip


@dataclass(frozen=True)
class UpdateTime:
    """The time of an update, and what it consists of; what is hidden behind something else is in none of the parts."""

    seconds: float
    parts: dict[str, float]

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return max(self.parts, key=self.parts.__getitem__)


def pass_time(
    steps: list[TracedStep], speeds: Speeds, exchanged: Callable[[Operation], float] = lambda operation: 0.0,
    is_compiled: bool = False,
) -> PassTime:  # fmt: skip
    """Sum up the operations of the passes.

    A GPU's queue is filled while it works: where starting all operations of a pass takes longer than their work, that
    is what counts. On a CPU both are added.

    Args:
        exchanged: seconds of a collective within the passes, which wait for it: that of ranks which share layers or
            rows.
        is_compiled: by torch.compile, which fuses operations that move bytes.
    """
    times = {"forward": 0.0, "backward": 0.0}
    starts, waits = times.copy(), times.copy()
    parts: dict[str, float] = {}
    known: dict[int, tuple[dict[str, float], int]] = {}
    for step in steps:
        key = id(step.operations)
        if key not in known:
            known[key] = _segment_time(step.operations, speeds, exchanged, is_compiled)
        of_kinds, count = known[key]
        phase = "backward" if step.phase == "backward" else "forward"
        starts[phase] += count * speeds.operation_s
        for kind, seconds in of_kinds.items():
            parts[kind] = parts.get(kind, 0.0) + seconds
            (waits if kind == COMMUNICATION else times)[phase] += seconds
    starts["backward"] *= BACKWARD_STARTS
    for phase, started in starts.items():
        started *= FUSED_STARTS if is_compiled else 1.0
        more = max(0.0, started - times[phase]) if speeds.is_queued else started
        times[phase] += more + waits[phase]
        parts[STARTS] = parts.get(STARTS, 0.0) + more
    return PassTime(times["forward"], times["backward"], parts, sum(host_inputs(steps)))


def _segment_time(
    operations: Iterable[Operation], speeds: Speeds, exchanged: Callable[[Operation], float], is_compiled: bool
) -> tuple[dict[str, float], int]:
    """({kind: seconds}, operations that are started)."""
    parts, count = dict[str, float](), 0
    for operation in operations:
        if operation.kind in EXCHANGES:
            parts[COMMUNICATION] = parts.get(COMMUNICATION, 0.0) + exchanged(operation)
            continue
        count += 1
        fused = FUSED if is_compiled and operation.kind not in BY_FLOPS else 1.0
        parts[operation.kind] = parts.get(operation.kind, 0.0) + fused * speeds.seconds(operation)
    return parts, count


def update_time(
    passes: PassTime, exchanges: Exchanges, speeds: Speeds, links: AnyLinks, accumulation: int, world_size: int,
    per_machine: int, half: bool, pipeline: int = 1, handed_over: float = 0.0,
) -> UpdateTime:  # fmt: skip
    """The time of an update of `accumulation` micro-batches.

    Communication beside computation is hidden up to the length of the pass, and slows it by `contention`. What is
    copied to and from the host counts likewise. The bubble is that of 1F1B: Narayanan et al. 2021, (p - 1) / m.

    Args:
        world_size: ranks that hold the same weights, and exchange gradients.
        per_machine: of these, on one machine.
        pipeline: stages.
        handed_over: seconds in which a stage sends a micro-batch to the next one. Both wait; a stage in the middle
            receives and sends in both passes.
    """
    local = min(world_size, per_machine)

    def exchanged(several: list[Exchange]) -> float:
        return sum(links.seconds(one, one.among or world_size, max(1, per_machine // one.apart)) for one in several)

    def copied(moved: float) -> float:
        return moved / speeds.host_link if speeds.host_link else 2 * speeds.memory_seconds(moved, half)

    def exposed(beside: float, compute: float) -> float:
        hidden = min(beside, compute) if exchanges.hidden else 0.0
        return beside - hidden * (1 - speeds.contention)

    forward, backward = exchanged(exchanges.forward), exchanged(exchanges.backward)
    up, down = copied(exchanges.up + passes.offloaded), copied(exchanges.down + passes.offloaded)
    last = backward + exchanged(exchanges.last_backward)
    in_each = exposed(forward, passes.forward) + exposed(backward, passes.backward)
    in_last = exposed(last, passes.backward) - exposed(backward, passes.backward)
    communication = accumulation * in_each + in_last + exchanged(exchanges.step)
    communication += 2 * (accumulation * min(2, pipeline - 1) + pipeline - 1) * handed_over
    copies = exposed(up, passes.forward) + exposed(down, passes.backward)
    adam = HOST_STEP * exchanges.adam * local / speeds.adam + exchanges.disk * local / DISK
    host = accumulation * copies + copied(exchanges.step_up) + adam
    engine = accumulation * speeds.memory_seconds(exchanges.micro_moved, half)
    optimizer = speeds.memory_seconds(exchanges.step_moved)
    parts = {kind: accumulation * seconds for kind, seconds in passes.parts.items()}
    parts["memory"] = parts.get("memory", 0.0) + engine
    computed = accumulation * (passes.forward + passes.backward) + engine
    bubble = computed * (pipeline - 1) / accumulation
    beside = {COMMUNICATION: communication, OPTIMIZER: optimizer, HOST: host, BUBBLE: bubble}
    for name, seconds in beside.items():
        if seconds:
            parts[name] = parts.get(name, 0.0) + seconds
    return UpdateTime(computed + sum(beside.values()), parts)
