"""The time of updates of one subject on one device."""

import bisect
from collections.abc import Callable

from zerofit.model.parameters import flops_per_pair_token, flops_per_token
from zerofit.strategy.layout import ParallelLayout
from zerofit.tools.plan.exchanges import Exchanges, deepspeed_exchanges, fully_sharded_exchanges, torch_exchanges
from zerofit.tools.plan.fully_sharded import FullyShards
from zerofit.tools.plan.links import Exchange, Links, MeasuredLinks
from zerofit.tools.plan.operations import ALL_GATHER, Operation
from zerofit.tools.plan.prediction import Budget, Speed
from zerofit.tools.plan.resolve import Resolved
from zerofit.tools.plan.speeds import Speeds
from zerofit.tools.plan.stages import Stage
from zerofit.tools.plan.subject import DTYPES, Subject
from zerofit.tools.plan.trace import Tracer
from zerofit.tools.plan.update_time import PassTime, pass_time, update_time


class Timing:
    """Predicts the time of updates; the same traces serve memory and time.

    Args:
        speeds, links: None where they are not known: then there is no prediction.
        mean_length: tokens of a row, for time; None: the recipe's maximum.
        is_known: the speeds are the device's own; else they only rank layouts.
    """

    def __init__(
        self, subject: Subject, budget: Budget, speeds: Speeds | None, links: Links | MeasuredLinks | None,
        mean_length: float | None, is_known: bool = True,
    ):  # fmt: skip
        self.subject, self.budget, self.speeds, self.links = subject, budget, speeds, links
        self.rows = subject.rows.shortened(mean_length) if mean_length else subject.rows
        self.mean_length, self.is_known = mean_length, is_known
        self._times: dict[tuple[Tracer, Stage], dict[int, PassTime]] = {}
        self._flops_per_token: float | None = None

    def predict(self, resolved: Resolved, micro_batch: int, accumulation: int) -> Speed | None:
        """The speed of an update; None where it is not known."""
        half = resolved.precision != "fp32"
        layout = resolved.layout
        world_size = layout.world_size
        if self.speeds is None or (self.links is None and world_size > 1) or not self.speeds.computes(half):
            return None
        passes = self.passes(resolved, micro_batch)
        time = update_time(
            passes, self.exchanges(resolved, accumulation > 1), self.speeds, self.links, accumulation,
            layout.shard_size, max(1, self.budget.gpus_per_node // layout.tensor), half, layout.pipeline,
            self._handed_over(layout, self.subject.hidden_bytes(resolved.precision, layout, micro_batch), half),
        )  # fmt: skip
        tokens_per_s = self.rows.tokens * micro_batch * accumulation * layout.data_size / time.seconds
        peak = self.speeds.peak_half if half else None
        mfu = tokens_per_s * self.flops_per_token / (peak * world_size) if peak else None
        return Speed(time, tokens_per_s, mfu, self.is_known)

    def passes(self, resolved: Resolved, micro_batch: int) -> PassTime:
        """Of the whole model, or of the stage that takes longest: the others wait for it."""
        stages = self.subject.stages(resolved.layout)
        times = (self._passes_of(resolved, micro_batch, stage) for stage in stages)
        return max(times, key=lambda one: one.forward + one.backward)

    def _passes_of(self, resolved: Resolved, micro_batch: int, stage: Stage) -> PassTime:
        """Of a size that is traced already, or was asked for first; else on the line through its neighbours."""
        about = resolved.precision, resolved.sharding, resolved.layout
        tracer = self.subject.tracer(*about, rows=self.rows)
        exchanged = self._exchanged(resolved)
        times = self._times.setdefault((tracer, stage), {})

        def add(size: int) -> None:
            if size not in times:
                steps = self.subject.steps(*about, stage, size, rows=self.rows)
                times[size] = pass_time(steps, self.speeds, exchanged)

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
        far = layout.world_size > self.budget.gpus_per_node  # some stage has its next one there, and all wait for it
        both = Exchange(ALL_GATHER, 2 * hidden, 1, half)  # of two processes: each sends half of it
        return self.links.seconds(both, 2, 1 if far else 2)

    def _exchanged(self, resolved: Resolved) -> Callable[[Operation], float]:
        """Seconds of a collective of the ranks that share layers or rows, which stand side by side, or experts: these
        are all ranks."""
        layout = resolved.layout
        together = layout.data_size if resolved.divides_experts else layout.tensor * layout.sequence

        def seconds(operation: Operation) -> float:
            exchange = Exchange(operation.kind, operation.bytes, 1, operation.half)
            return self.links.seconds(exchange, together, self.budget.gpus_per_node)

        return seconds

    def exchanges(self, resolved: Resolved, accumulates: bool) -> Exchanges:
        weights, world_size = self.subject.weights_of(resolved.layout), resolved.layout.shard_size
        if isinstance(resolved.sharding, FullyShards):
            width = DTYPES[resolved.precision].itemsize
            divided = resolved.divided(self.subject)
            return fully_sharded_exchanges(weights, world_size, width, resolved.sharding.reshards, divided)
        if resolved.zero is None:
            return torch_exchanges(weights, world_size, self.subject.on_gpu, self.subject.recipe.optim)
        return deepspeed_exchanges(
            weights,
            resolved.zero,
            world_size,
            DTYPES[resolved.precision].itemsize,
            accumulates,
            self.subject.keeps_layers,
        )

    @property
    def flops_per_token(self) -> float:
        """As a run counts them (zerofit/record/meters.py)."""
        if self._flops_per_token is None:
            rows, full = self.rows, self.subject.full
            if rows.target_length:
                self._flops_per_token = flops_per_pair_token(full, rows.length, rows.target_length)
            else:
                self._flops_per_token = flops_per_token(full, rows.length)
        return self._flops_per_token
