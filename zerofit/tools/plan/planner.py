"""For each strategy: predictions of micro-batches, the largest that fits, and the fastest."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from zerofit.estimate.caching_allocator import Unused, unused_bytes
from zerofit.estimate.model_states import States
from zerofit.estimate.peak import (
    CPU_DEEPSPEED_BYTES,
    CPU_GROUP_BYTES,
    CPU_GROUPS,
    CPU_PROGRAM_BYTES,
    InFlight,
    KeyValueCache,
    Peak,
    cache_of,
    evaluation_moments,
    find_peak,
    pinned,
    training_moments,
)
from zerofit.estimate.pipeline_stages import Stage
from zerofit.estimate.planned_model import DTYPES, PlannedModel
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.estimate.timing import Timing
from zerofit.estimate.traced_steps import TracedStep
from zerofit.model.configuration import usable_positions
from zerofit.recipe.errors import UserError
from zerofit.strategy.layout import ParallelLayout
from zerofit.tools.compare.search import next_size
from zerofit.tools.plan.layouts import possible_degrees, read_pair, resolve_with
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.plan.prediction import Budget, LayoutOutcome, Prediction, UpdateSpeed

FASTEST_TRIED = 3  # of those that ought to be fastest; memory is predicted for them
STEP = 1024  # tokens between the lengths that are looked at where none is named
Check = Callable[[PlannedStrategy], str]  # what stands against a strategy on this device; empty if nothing does
T = TypeVar("T")  # a Prediction, or what else has `fits` and `device_bytes`


class Planner:
    """Predicts; the same trace serves every strategy that computes alike.

    Args:
        timing: None: memory is predicted, and no time.
    """

    def __init__(self, recipe: PlanOptions, model: PlannedModel, budget: Budget, timing: Timing | None = None):
        self.recipe, self.model, self.budget, self.timing = recipe, model, budget, timing

    def layouts(self, name: str, check: Check) -> list[LayoutOutcome]:
        """Those that a strategy can have, without predictions."""
        pair, recipe, budget = read_pair(name), self.recipe_for_layouts(), self.budget
        outcomes, ranks = [], {"world_size": budget.num_gpus, "gpus_per_node": budget.gpus_per_node}
        tried = possible_degrees(name, pair, budget.num_gpus, budget.local_ranks, self.model.num_layers)
        for degrees in tried:
            outcome = LayoutOutcome(name, degrees)
            outcomes.append(outcome)
            try:
                outcome.found = resolve_with(name, pair, degrees, recipe, self.model, **ranks)
            except UserError as error:
                outcome.refused = "; ".join(error.problems)
            else:
                outcome.refused = check(outcome.found)
        return outcomes

    def find(self, outcome: LayoutOutcome, sizes: list[int] | None, max_batch_size: int) -> None:
        """Add the predictions of the named micro-batches, or of the largest that fits and the fastest; or why there
        are none."""
        replicas = outcome.resolved.layout.data_size
        candidates = self.possible(sizes or range(1, max_batch_size + 1), replicas)
        if not candidates:
            outcome.refused = self.no_batch(sizes, outcome.resolved.layout)
        elif sizes:
            outcome.predictions = [self.predict(outcome.resolved, size) for size in candidates]
        else:
            predict = partial(self.predict, outcome.resolved)
            outcome.predictions = search(candidates, predict, self.budget.device)
            self._add_fastest(outcome, candidates)

    def find_longest(self, outcome: LayoutOutcome, lengths: list[int]) -> None:
        """Search for the longest rows that fit, and add the predictions that this took, or why there are none. The
        micro-batch is the recipe's, else one row. Each length is traced.

        Args:
            lengths: tokens of a row, ascending.
        """
        name, layout = "per_device_train_batch_size", outcome.resolved.layout
        size = getattr(self.recipe, name) if self.recipe.source(name) else 1
        if not self.possible([size], layout.data_size):
            outcome.refused = self.no_batch([size], layout)
            return

        def predict(length: int) -> Prediction:
            model = self.model.with_options(self.recipe, replace(self.model.rows, length=length))
            planner = Planner(self.recipe, model, self.budget, self.timing and self.timing.of(model))
            return planner.predict(outcome.resolved, size)

        outcome.predictions = search(lengths, predict, self.budget.device)

    def predict(self, resolved: PlannedStrategy, micro_batch: int) -> Prediction:
        """One micro-batch under one strategy."""
        layout = resolved.layout
        accumulation = self.accumulation(micro_batch, layout.data_size)
        peaks = [self._peak(resolved, micro_batch, accumulation, stage) for stage in self.model.stages(layout)]
        peak, on_gpu = max(peaks, key=lambda one: one.needed), self.model.on_gpu
        host = peak.host * self.budget.local_ranks
        lacking = max(0, peak.needed - self.budget.device)
        if self.budget.host is not None and on_gpu:
            lacking = max(lacking, host - self.budget.host)
        about = resolved.name, resolved.precision, layout, micro_batch, accumulation, peak, host
        disk, speed = peak.disk * self.budget.local_ranks, self.speed(resolved, micro_batch)
        return Prediction(*about, disk, lacking == 0, lacking, self.model.rows.length, speed)

    def _peak(self, resolved: PlannedStrategy, micro_batch: int, accumulation: int, stage: Stage) -> Peak:
        model, layout = self.model, resolved.layout
        states = resolved.states(model, accumulation > 1, stage)
        teacher = model.teacher_weights * DTYPES[resolved.precision].itemsize
        states = replace(states, buffers=states.buffers + teacher)
        about = resolved.precision, resolved.sharding, layout, stage
        training = model.steps(*about, micro_batch)
        in_flight = None
        if layout.pipeline > 1:
            hidden = model.hidden_bytes(resolved.precision, layout, micro_batch)
            in_flight = InFlight(
                stage.in_flight(accumulation),
                hidden * (not stage.is_first),
                hidden * ((not stage.is_first) + (not stage.is_last)),
            )
        moments = [*training_moments(states, training, accumulation, in_flight)]
        unused = _unused(states, training, in_flight.micro_batches if in_flight else 1)
        groups = sum(size > 1 for size in (layout.shard_size, layout.tensor, layout.sequence, layout.pipeline))
        peak_of = partial(
            find_peak,
            states,
            unused=unused,
            num_groups=groups,
            on_gpu=model.on_gpu,
            program=_program_on_cpu(resolved),
            on_host=pinned([step.offloaded for step in training if step.offloaded]),
        )
        peak = peak_of(moments)
        if peak.needed > self.budget.device:  # whatever an evaluation takes: it is not traced
            return peak
        evaluation = model.steps(*about, self.recipe.per_device_eval_batch_size, evaluated=True)
        generated = self._generated(resolved.precision)
        return peak_of([*moments, *evaluation_moments(states, training, evaluation, generated)])

    def _generated(self, precision: str) -> dict[str, int]:
        """{part: bytes} beside weights while texts are generated for an evaluation batch; empty where none are."""
        recipe, config = self.recipe, self.model.config
        if not getattr(recipe, "predict_with_generate", False):
            return {}
        beams = getattr(recipe, "num_beams", None) or getattr(config, "num_beams", None) or 1
        return self._cache.parts(recipe, recipe.per_device_eval_batch_size * beams, DTYPES[precision].itemsize)

    @cached_property
    def _cache(self) -> KeyValueCache:
        return cache_of(self.model.full)

    def speed(self, resolved: PlannedStrategy, micro_batch: int) -> UpdateSpeed | None:
        if self.timing is None:
            return None
        accumulation = self.accumulation(micro_batch, resolved.layout.data_size)
        return self.timing.predict(resolved, micro_batch, accumulation)

    def tokens_per_s(self, resolved: PlannedStrategy, micro_batch: int) -> float:
        """Tokens per second (where speeds are unknown, only good to order candidates); 0 if no time is predicted."""
        speed = self.speed(resolved, micro_batch)
        return speed.tokens_per_s if speed else 0.0

    # -------------------------------------------------------------------------------------------------- global batches

    def accumulation(self, micro_batch: int, replicas: int) -> int:
        """Micro-batches of an update: what the recipe says, or what makes the global batch."""
        if self._global_batch is None:
            return self.recipe.gradient_accumulation_steps or 1
        return self._global_batch // (micro_batch * replicas)

    @property
    def _global_batch(self) -> int | None:
        """The global batch, or the limit to it."""
        return self.recipe.max_global_batch_size or self.recipe.global_batch_size

    def recipe_for_layouts(self) -> PlanOptions:
        """Without the recipe's own global batch where there is only a limit to it."""
        if not self.recipe.max_global_batch_size:
            return self.recipe
        recipe = self.recipe.draft()
        for name in ("global_batch_size", "gradient_accumulation_steps"):
            recipe.reset_option(name)
        return recipe

    def possible(self, sizes: Iterable[int], replicas: int) -> list[int]:
        """Those that make the global batch, if there is one, or stay within its limit."""
        total, most = self.recipe.global_batch_size, self.recipe.max_global_batch_size
        if most:
            return [size for size in sizes if size * replicas <= most]
        return [size for size in sizes if total is None or total % (size * replicas) == 0]

    def no_batch(self, sizes: list[int] | None, layout: ParallelLayout) -> str:
        """Say why no micro-batch is possible."""
        minimum = layout.data_size * (sizes[0] if sizes else 1)
        holders = f"{layout.data_size} replicas of {layout.replica_size} GPUs"
        if self.recipe.max_global_batch_size:
            limit = f"max_global_batch_size = {self.recipe.max_global_batch_size}: too few for {holders}"
            return f"{limit}. Set it to at least {minimum}, or a smaller --num_gpus"
        tried = f"global_batch_size = {self._global_batch}: {' or '.join(map(str, sizes or [1]))} rows"
        return f"{tried} on {holders} do not divide it: set it to a multiple of {minimum}"

    # ---------------------------------------------------------------------------------------------------------- search

    def _add_fastest(self, outcome: LayoutOutcome, candidates: list[int]) -> None:
        """Add the prediction of the fastest candidate that fits. Speeds are interpolated between traced sizes. If no
        global batch is set, all sizes accumulate alike, and a traced one is the fastest: nothing is added."""
        largest, best = outcome.largest, outcome.best
        if largest is None or best is None or largest.speed is None or self._global_batch is None:
            return
        made = {one.micro_batch for one in outcome.predictions}
        smaller = [size for size in candidates if size < largest.micro_batch]
        speeds = {size: self.tokens_per_s(outcome.resolved, size) for size in smaller}
        for size in sorted(speeds, key=lambda size: (-speeds[size], -size))[:FASTEST_TRIED]:
            if speeds[size] <= best.tokens_per_s or size in made:
                return
            found = self.predict(outcome.resolved, size)
            outcome.predictions = sorted([*outcome.predictions, found], key=lambda one: one.micro_batch)
            if found.fits:
                return


def _unused(states: States, training: list[TracedStep], in_flight: int) -> Unused:
    """Return the bytes that the allocator holds unused, on the stream that computes and on the one that gathers
    weights."""
    forward = [size for step in training if step.phase != "backward" for size in step.blocks]
    blocks, gradients = list[int](), list[int]()
    for step in training:
        blocks += step.blocks
        if step.completed and states.gradients_each:
            gradients.append(step.gradient)
            blocks.append(step.gradient)
    blocks += [-size for size in gradients]
    unused = unused_bytes(tuple(blocks), tuple(forward) * (in_flight - 1), states.late)
    if not (states.gathered and states.overlaps):
        return unused
    gathered = unused_bytes(tuple(states.gathered.blocks(training)))
    return Unused(unused.held + gathered.held, unused.needed + gathered.needed)


def _program_on_cpu(resolved: PlannedStrategy) -> int:
    """Bytes of a process of the CPU beside its tensors, as zerofit/estimate/peak.py has them."""
    if resolved.zero is None:
        return CPU_PROGRAM_BYTES
    groups = [count for degree, count in CPU_GROUPS.items() if getattr(resolved.layout, degree) > 1]
    return CPU_PROGRAM_BYTES + CPU_DEEPSPEED_BYTES + CPU_GROUP_BYTES * max(groups, default=0)


def search(candidates: Sequence[int], predict: Callable[[int], T], limit: int) -> list[T]:
    """The predictions that were needed, by size; with the largest candidate that fits and the next one.

    Args:
        candidates: micro-batches, or lengths of rows; ascending.
        limit: bytes of a device.
    """
    made: dict[int, Any] = {}
    peaks: dict[int, int | None] = {}
    while (size := next_size(candidates, peaks, limit)) is not None:
        made[size] = predict(size)
        peaks[size] = made[size].device_bytes if made[size].fits else None
    return [made[size] for size in sorted(made)]


def possible_lengths(options: PlanOptions, config: Any) -> list[int]:
    """The lengths to look at, ascending: those that were named; auto: multiples of 1024 up to the model's positions.

    Raises:
        UserError: the model has fewer positions, or none that limit the length.
    """
    positions = usable_positions(config)
    if options.lengths == ["auto"]:
        if positions is None:
            raise UserError(f"lengths = auto: a {config.model_type} has no limit. Set --lengths 8k,16k,32k")
        return sorted({*range(STEP, positions + 1, STEP), positions})
    if positions and options.named_lengths[-1] > positions:
        given = " ".join(options.lengths or ())
        raise UserError(f"lengths = {given}: the model has {positions} positions. Choose less")
    return options.named_lengths
