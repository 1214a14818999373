"""For each strategy: the predicted peak of a micro-batch, and the largest micro-batch that fits."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from train.recipe.errors import UserError
from train.tools.plan.constants import CHECKPOINT_BYTES
from train.tools.plan.memory import Peak, find_peak
from train.tools.plan.resolve import Resolved, resolve
from train.tools.plan.subject import Subject


@dataclass(frozen=True)
class Budget:
    """What a device and a machine have.

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
    """A micro-batch under a strategy; sizes in bytes, of the process that needs most."""

    strategy: str
    precision: str
    num_gpus: int
    micro_batch: int
    accumulation: int
    recomputed: bool
    peak: Peak
    host_bytes: int  # of a machine
    fits: bool
    lacking: int  # bytes, of device or host; 0 where it fits

    def to_dict(self) -> dict[str, Any]:
        peak = asdict(self.peak)
        return {
            "strategy": self.strategy,
            "precision": self.precision,
            "layout": {"data": self.num_gpus, "tensor": 1, "pipeline": 1, "sequence": 1},
            "per_device_train_batch_size": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_checkpointing": self.recomputed,
            "peak_allocated_bytes": peak["allocated"],
            "peak_reserved_bytes": peak["reserved"],
            "device_bytes": peak["device"],
            "host_bytes": self.host_bytes,
            "phase": peak["phase"],
            "components": peak["components"],
            "fits": self.fits,
        }


@dataclass
class Outcome:
    """What was found of one strategy.

    Attributes:
        largest: the prediction of the largest micro-batch that fits; None: not even the smallest one does.
        smallest_misfit: the prediction of the smallest micro-batch that does not fit; None: all that were tried do.
        refused: why this strategy is not possible at all.
    """

    strategy: str
    resolved: Resolved | None = None
    predictions: list[Prediction] = field(default_factory=list)
    largest: Prediction | None = None
    smallest_misfit: Prediction | None = None
    refused: str = ""


class Planner:
    """Predicts; the same trace serves every strategy that computes alike."""

    def __init__(self, recipe, subject: Subject, budget: Budget):
        self.recipe, self.subject, self.budget = recipe, subject, budget

    def plan(
        self, name: str, sizes: list[int] | None, max_batch_size: int, check: Callable[[Resolved], str]
    ) -> Outcome:
        """The named micro-batches, or the largest that fits.

        Args:
            check: says what stands against a resolved strategy on this device; empty if nothing does.
        """
        outcome = Outcome(name)
        try:
            outcome.resolved = resolve(
                name, self.recipe, self.subject, self.budget.num_gpus, self.budget.gpus_per_node
            )
        except UserError as error:
            outcome.refused = "; ".join(error.problems)
            return outcome
        outcome.refused = check(outcome.resolved)
        if outcome.refused:
            return outcome
        candidates = self._possible(sizes or range(1, max_batch_size + 1))
        if not candidates:
            outcome.refused = self._no_batch(sizes)
        elif sizes:
            outcome.predictions = [self.predict(outcome.resolved, size) for size in candidates]
        else:
            outcome.predictions = self._search(outcome.resolved, candidates)
        fitting = [one for one in outcome.predictions if one.fits]
        others = [one for one in outcome.predictions if not one.fits]
        outcome.largest = max(fitting, key=lambda one: one.micro_batch, default=None)
        outcome.smallest_misfit = min(others, key=lambda one: one.micro_batch, default=None)
        return outcome

    def predict(self, resolved: Resolved, micro_batch: int) -> Prediction:
        """One micro-batch under one strategy."""
        accumulation = self._accumulation(micro_batch)
        states = resolved.states(self.subject, accumulation > 1)
        with_deepspeed = resolved.zero is not None
        training = self.subject.tracer(resolved.precision, with_deepspeed).steps(micro_batch)
        evaluation = self.subject.tracer(resolved.precision, with_deepspeed, evaluated=True).steps(
            self.recipe.per_device_eval_batch_size
        )
        on_gpu = self.subject.on_gpu
        peak = find_peak(states, training, evaluation, accumulation, self.budget.num_gpus, on_gpu, with_deepspeed)
        host = peak.host * self.budget.local_ranks
        lacking = max(0, peak.device - self.budget.device)
        if self.budget.host is not None and on_gpu:
            lacking = max(lacking, host - self.budget.host)
        return Prediction(
            resolved.name, resolved.precision, self.budget.num_gpus, micro_batch, accumulation,
            self.recipe.gradient_checkpointing, peak, host, lacking == 0, lacking,
        )  # fmt: skip

    @property
    def checkpoint_bytes(self) -> int:
        return CHECKPOINT_BYTES * self.subject.weights.trained

    def _accumulation(self, micro_batch: int) -> int:
        if self.recipe.global_batch_size is None:
            return self.recipe.gradient_accumulation_steps or 1
        return self.recipe.global_batch_size // (micro_batch * self.budget.num_gpus)

    def _possible(self, sizes) -> list[int]:
        """Those that make the global batch, if there is one."""
        total = self.recipe.global_batch_size
        return [size for size in sizes if total is None or total % (size * self.budget.num_gpus) == 0]

    def _no_batch(self, sizes: list[int] | None) -> str:
        return (
            f"global_batch_size = {self.recipe.global_batch_size} cannot be made of "
            f"{'micro-batches of ' + ', '.join(map(str, sizes)) if sizes else 'whole micro-batches'} on "
            f"{self.budget.num_gpus} GPUs: set --global_batch_size to a multiple of "
            f"{self.budget.num_gpus * (sizes[0] if sizes else 1)}"
        )

    def _search(self, resolved: Resolved, candidates: list[int]) -> list[Prediction]:
        """The largest candidate that fits and the next one: memory grows almost in proportion to the batch, so two
        predictions tell where to look."""
        made: dict[int, Prediction] = {}
        fits, fails = -1, len(candidates)
        while fails - fits > 1:
            place = _next_place(made, candidates, fits, fails, self.budget.device)
            made[place] = self.predict(resolved, candidates[place])
            if made[place].fits:
                fits = place
            else:
                fails = place
        return [made[place] for place in sorted(made)]


def _next_place(made: dict[int, Prediction], candidates: list[int], fits: int, fails: int, limit: int) -> int:
    """Where to look next: four times as large while all fits, then where the line through the bounds reaches the limit
    and, every other time, halfway."""
    if fails == len(candidates):
        return min(4 * max(fits, 0) + 3 if made else 0, fails - 1)
    if fits < 0 or len(made) % 2:
        return (fits + fails) // 2
    low, high = made[fits], made[fails]
    slope = (high.peak.device - low.peak.device) / (high.micro_batch - low.micro_batch)
    size = low.micro_batch + (limit - low.peak.device) / slope
    place = sum(candidate <= size for candidate in candidates) - 1
    return min(max(place, fits + 1), fails - 1)
