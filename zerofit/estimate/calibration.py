"""What `zerofit plan --calibrate` has measured on this machine, kept in the cache of prepared data."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerofit.estimate.links import MeasuredLinks
from zerofit.estimate.speeds import Curve, Speeds
from zerofit.estimate.time_constants import CONTENTION, CONTENTION_CPU
from zerofit.recipe.cache import cache_root
from zerofit.strategy.host_memory import cpu_model, usable_cores

VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """A measurement: of one process, while so many measured at the same time.

    Attributes:
        device: what was measured, as it calls itself.
        rates: {"kind half|single": [(size, rate)]}, as Speeds has them.
        links: {"kind half|single": [(bytes, bytes/s)]}; empty of one process.
        adam: elements/s of the host's Adam, all processes together.
        host_link: bytes/s; None on a CPU.
    """

    version: int
    device: str
    processes: int
    rates: dict[str, list[tuple[float, float]]]
    links: dict[str, list[tuple[float, float]]]
    operation_s: float
    adam: float
    host_link: float | None
    measured: str  # when, and with which torch

    def speeds(self, local: int, peak_half: float | None) -> Speeds:
        """As rates of one of `local` processes. On a CPU they share its cores: together they reach what was measured
        together."""
        on_cpu = self.host_link is None
        share = self.processes / local if on_cpu else 1.0
        rates = {_key(name): Curve(_points(points)).times(share) for name, points in self.rates.items()}
        return Speeds(
            rates, self.operation_s, not on_cpu, self.adam, self.host_link,
            CONTENTION_CPU if on_cpu else CONTENTION, peak_half, f"measured on this machine, {self.measured}",
        )  # fmt: skip

    def links_of(self, network: float) -> MeasuredLinks | None:
        """None where one process was measured alone."""
        curves = {_key(name): Curve(_points(points)) for name, points in self.links.items()}
        return MeasuredLinks(curves, self.processes, network) if curves else None

    def write(self) -> Path:
        path = place_of(self.device)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path


def read_calibration(device: str) -> Calibration | None:
    """That of a device of this name; None where there is none, or an older one."""
    try:
        found: dict[str, Any] = json.loads(place_of(device).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Calibration(**found) if found.get("version") == VERSION else None


def place_of(device: str) -> Path:
    return cache_root(None) / "calibration" / f"{''.join(c if c.isalnum() else '-' for c in device).lower()}.json"


def cpu_name() -> str:
    """The processor of this machine and the cores that this process may use: one cache may serve several machines."""
    return f"cpu {cpu_model()} {usable_cores()} cores"


def key_name(kind: str, half: bool) -> str:
    return f"{kind} {'half' if half else 'single'}"


def _key(name: str) -> tuple[str, bool]:
    kind, _, width = name.rpartition(" ")
    return kind, width == "half"


def _points(points: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((size, rate) for size, rate in points)
