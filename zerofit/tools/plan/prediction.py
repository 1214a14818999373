"""The memory that there is, and the predictions of a strategy."""

from dataclasses import asdict, dataclass, field
from typing import Any

from zerofit.estimate.peak import Peak
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.estimate.timing import UpdateSpeed
from zerofit.strategy.layout import ParallelLayout
from zerofit.tools.plan.layouts import Degrees, labelled


@dataclass(frozen=True)
class Budget:
    """The memory of a device and of a machine.

    Attributes:
        device: bytes of one device; on a CPU, of one process.
        host: bytes of one machine; None: it is not checked.
    """

    device: int
    host: int | None
    num_gpus: int
    gpus_per_node: int

    @property
    def local_ranks(self) -> int:
        return min(self.num_gpus, self.gpus_per_node)


@dataclass(frozen=True)
class Prediction:
    """A micro-batch under a strategy; sizes in bytes, of the process that needs most.

    Attributes:
        speed: None where no time is predicted.
    """

    strategy: str
    precision: str
    layout: ParallelLayout
    micro_batch: int
    accumulation: int
    peak: Peak
    host_bytes: int  # of a machine
    disk_bytes: int  # of a machine: what is offloaded to it
    fits: bool
    lacking: int  # bytes, of device or host; 0 where it fits
    length: int  # tokens of a row; of pairs, of a source
    speed: UpdateSpeed | None = None

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.layout.tensor, self.layout.pipeline, self.layout.sequence)

    @property
    def label(self) -> str:
        """The strategy, with its degrees where it has some."""
        return labelled(self.strategy, self.degrees)

    @property
    def device_bytes(self) -> int:
        """The bytes of a device that training takes at least."""
        return self.peak.needed

    @property
    def timed(self) -> UpdateSpeed | None:
        """The speed where it is known, and not only ranks layouts."""
        return self.speed if self.speed and self.speed.is_known else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, known or only for the rank; 0 where no time is predicted."""
        return self.speed.tokens_per_s if self.speed else 0.0

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.layout.data_size

    @property
    def size(self) -> tuple[int, int]:
        """The size that is searched: among predictions of one strategy, lengths or micro-batches differ."""
        return self.length, self.micro_batch

    @property
    def rank(self) -> tuple[float, int]:
        """The place among others of its strategy: the fastest first, then the largest."""
        return -self.tokens_per_s, -self.micro_batch

    def to_dict(self) -> dict[str, Any]:
        peak, layout = asdict(self.peak), self.layout
        unknown = dict.fromkeys(("seconds_per_update", "seconds", "bound", "tokens_per_s", "mfu"))
        return {
            "strategy": self.strategy,
            "precision": self.precision,
            "layout": {
                "data": layout.data_size,
                "tensor": layout.tensor,
                "pipeline": layout.pipeline,
                "sequence": layout.sequence,
            },
            "length": self.length,
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "global_batch_size": self.global_batch,
            "peak_allocated_bytes": peak["allocated"],
            "peak_reserved_bytes": peak["reserved"],
            "device_bytes": peak["device"],
            "needed_bytes": peak["needed"],
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "phase": peak["phase"],
            "components": peak["components"],
            **(self.timed.to_dict() if self.timed else unknown),
            "fits": self.fits,
        }


@dataclass
class LayoutOutcome:
    """The predictions of one strategy in one layout.

    Attributes:
        found: the strategy in this layout; None: it is refused.
        largest: the prediction of the largest micro-batch, or of the longest rows, that fit; None: not even the
            smallest do.
        best: the fastest that fits.
        smallest_misfit: the prediction of the smallest that do not fit; None: all that were tried do.
        refused: why this is not possible at all.
        remedies: of what does not fit: (options with which it does, the prediction with them).
    """

    strategy: str
    degrees: Degrees = field(default_factory=Degrees)
    found: PlannedStrategy | None = None
    predictions: list[Prediction] = field(default_factory=list)
    refused: str = ""
    remedies: list[tuple[dict[str, Any], Prediction]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return labelled(self.strategy, self.degrees)

    @property
    def resolved(self) -> PlannedStrategy:
        """The strategy of a layout that is not refused."""
        if self.found is None:
            raise ValueError(f"{self.label} is refused: {self.refused}")
        return self.found

    @property
    def largest(self) -> Prediction | None:
        return max(self._fitting, key=lambda one: one.size, default=None)

    @property
    def best(self) -> Prediction | None:
        return min(self._fitting, key=lambda one: one.rank, default=None)

    @property
    def smallest_misfit(self) -> Prediction | None:
        misfits = [one for one in self.predictions if not one.fits]
        return min(misfits, key=lambda one: one.size, default=None)

    @property
    def _fitting(self) -> list[Prediction]:
        return [one for one in self.predictions if one.fits]
