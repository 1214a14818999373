"""The time of updates of one model on one device."""

import bisect
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.estimate.every_nth import EveryNth
from zerofit.estimate.exchanges import Exchanges, deepspeed_exchanges, fully_sharded_exchanges, torch_exchanges
from zerofit.estimate.fully_sharded import FullyShards
from zerofit.estimate.links import Exchange, Links
from zerofit.estimate.operations import ALL_GATHER, Operation
from zerofit.estimate.pipeline_stages import Stage
from zerofit.estimate.planned_model import DTYPES, PlannedModel
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.estimate.speeds import Speeds
from zerofit.estimate.time_constants import WAITED
from zerofit.estimate.tracer import Tracer
from zerofit.estimate.update_time import AnyLinks, PassTime, UpdateTime, pass_time, update_time
from zerofit.model.parameters import flops_per_pair_token, flops_per_token
from zerofit.strategy.layout import ParallelLayout


@dataclass(frozen=True)
class UpdateSpeed:
    """The time of an update.

    Attributes:
        tokens_per_s: of all replicas, padding not counted.
        mfu: the model's FLOPs of these tokens over the peak of all devices; None where the peak is not known.
        is_known: it is the device's; else another device's, which only ranks layouts.
    """

    time: UpdateTime
    tokens_per_s: float
    mfu: float | None
    is_known: bool = True

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds_per_update": self.time.seconds,
            "seconds": self.time.parts,
            "bound": self.time.bound,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
        }


class Timing:
    """Predicts the time of updates; the same traces serve memory and time.

    Args:
        links: None: of one process, which exchanges nothing.
        mean_length: tokens of a row, for time; None: the recipe's maximum.
        is_known: the speeds are the device's own; else they only rank layouts.
    """

    def __init__(
        self, model: PlannedModel, gpus_per_node: int, speeds: Speeds, links: AnyLinks | None,
        mean_length: float | None, is_known: bool = True,
    ):  # fmt: skip
        self.model, self.gpus_per_node, self.speeds = model, gpus_per_node, speeds
        self.links: AnyLinks = links or Links(math.inf, math.inf)
        self.rows = model.rows.shortened(mean_length) if mean_length else model.rows
        self.mean_length, self.is_known = mean_length, is_known
        self._times: dict[tuple[Tracer | EveryNth, Stage], dict[int, PassTime]] = {}
        self._flops_per_token: float | None = None
        self._exchanges: dict[tuple[int, bool], tuple[PlannedStrategy, Exchanges]] = {}

    def of(self, model: PlannedModel) -> "Timing":
        """The same for a model that shares its tracers; what is known of their passes is shared too."""
        other = copy.copy(self)
        other.model, other._exchanges = model, {}
        other.rows = model.rows.shortened(self.mean_length) if self.mean_length else model.rows
        return other

    def predict(self, resolved: PlannedStrategy, micro_batch: int, accumulation: int) -> UpdateSpeed | None:
        """The speed of an update; None where it is not known."""
        half = resolved.precision != "fp32"
        layout = resolved.layout
        world_size = layout.world_size
        if not self.speeds.computes(half):
            return None
        passes = self.passes(resolved, micro_batch)
        time = update_time(
            passes, self._exchanges_of(resolved, accumulation > 1), self.speeds, self.links, accumulation,
            layout.shard_size, max(1, self.gpus_per_node // layout.tensor), half, layout.pipeline,
            self._handed_over(layout, self.model.hidden_bytes(resolved.precision, layout, micro_batch), half),
        )  # fmt: skip
        tokens_per_s = self.rows.tokens * micro_batch * accumulation * layout.data_size / time.seconds
        peak = self.speeds.peak_half if half else None
        mfu = tokens_per_s * self.flops_per_token / (peak * world_size) if peak else None
        return UpdateSpeed(time, tokens_per_s, mfu, self.is_known)

    def passes(self, resolved: PlannedStrategy, micro_batch: int) -> PassTime:
        """Of the whole model, or of the stage that takes longest: the others wait for it."""
        stages = self.model.stages(resolved.layout)
        times = (self._passes_of(resolved, micro_batch, stage) for stage in stages)
        return max(times, key=lambda one: one.forward + one.backward)

    def _passes_of(self, resolved: PlannedStrategy, micro_batch: int, stage: Stage) -> PassTime:
        """Of a size that is traced already, or was asked for first; else on the line through its neighbours."""
        about = resolved.precision, resolved.sharding, resolved.layout
        tracer = self.model.tracer(*about, rows=self.rows)
        exchanged = self._exchanged(resolved)
        times = self._times.setdefault((tracer, stage), {})

        def add(size: int) -> None:
            if size not in times:
                steps = self.model.steps(*about, stage, size, rows=self.rows)
                times[size] = pass_time(steps, self.speeds, exchanged, bool(self.model.recipe.torch_compile))

        for size in tracer.traced_sizes:
            add(size)
        largest = tracer.largest_traced
        if len(times) < 2 or micro_batch > largest:
            for size in [micro_batch] if micro_batch <= largest else [largest // 2, largest]:
                add(size)
        if micro_batch in times:
            return times[micro_batch]
        sizes = sorted(times)
        place = min(max(bisect.bisect(sizes, micro_batch), 1), len(sizes) - 1)
        low, high = sizes[place - 1], sizes[place]
        return times[low].towards(times[high], (micro_batch - low) / (high - low))

    def _handed_over(self, layout: ParallelLayout, hidden: int, half: bool) -> float:
        """Seconds in which a stage sends hidden states of so many bytes to the next one."""
        if layout.pipeline == 1:
            return 0.0
        far = layout.world_size > self.gpus_per_node  # some stage has its next one there, and all wait for it
        both = Exchange(ALL_GATHER, 2 * hidden, 1, half)  # of two processes: each sends half of it
        return self.links.seconds(both, 2, 1 if far else 2)

    def _exchanged(self, resolved: PlannedStrategy) -> Callable[[Operation], float]:
        """Seconds of a collective of the ranks that share layers or rows, which stand side by side, or experts: these
        are all ranks."""
        layout = resolved.layout
        together = layout.data_size if resolved.divides_experts else layout.tensor * layout.sequence

        def seconds(operation: Operation) -> float:
            exchange = Exchange(operation.kind, operation.bytes, 1, operation.half)
            return WAITED * self.links.seconds(exchange, together, self.gpus_per_node)

        return seconds

    def _exchanges_of(self, resolved: PlannedStrategy, accumulates: bool) -> Exchanges:
        """Kept with the strategy: as long as it is there, its id is its own."""
        key = id(resolved), accumulates
        if key not in self._exchanges:
            self._exchanges[key] = resolved, self.exchanges(resolved, accumulates)
        return self._exchanges[key][1]

    def exchanges(self, resolved: PlannedStrategy, accumulates: bool) -> Exchanges:
        weights, world_size = self.model.weights_of(resolved.layout), resolved.layout.shard_size
        if isinstance(resolved.sharding, FullyShards):
            width = DTYPES[resolved.precision].itemsize
            divided = resolved.divided(self.model)
            return fully_sharded_exchanges(
                weights, world_size, width, resolved.sharding.reshards, divided, resolved.sharding.syncs,
                resolved.layout.replicas,
            )  # fmt: skip
        if resolved.zero is None:
            return torch_exchanges(weights, world_size, self.model.on_gpu, self.model.recipe.optim)
        return deepspeed_exchanges(
            weights,
            resolved.zero,
            world_size,
            DTYPES[resolved.precision].itemsize,
            accumulates,
            self.model.keeps_layers,
        )

    @property
    def flops_per_token(self) -> float:
        """As a run counts them (zerofit/record/meters.py)."""
        if self._flops_per_token is None:
            rows, full = self.rows, self.model.full
            if rows.target_length:
                self._flops_per_token = flops_per_pair_token(full, rows.length, rows.target_length)
            else:
                self._flops_per_token = flops_per_token(full, rows.length)
        return self._flops_per_token
