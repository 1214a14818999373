"""The time of a micro-batch's forward and backward pass: its operations, added up."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zerofit.estimate.operations import BY_FLOPS, EXCHANGES, Operation
from zerofit.estimate.speeds import Speeds
from zerofit.estimate.time_constants import BACKWARD_STARTS, FUSED, FUSED_STARTS
from zerofit.estimate.traced_steps import TracedStep

STARTS, COMMUNICATION = "starting operations", "communication"  # parts of a time that are no operations


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
            between(self.forward, other.forward),
            between(self.backward, other.backward),
            {name: between(self.parts.get(name, 0.0), other.parts.get(name, 0.0)) for name in names},
            between(self.offloaded, other.offloaded),
        )


def pass_time(
    steps: list[TracedStep],
    speeds: Speeds,
    exchanged: Callable[[Operation], float] = lambda operation: 0.0,
    is_compiled: bool = False,
) -> PassTime:
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
    return PassTime(times["forward"], times["backward"], parts, sum(step.offloaded for step in steps))


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
