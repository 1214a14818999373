"""Predicts memory and speed of micro-batches under each strategy, and finds the largest that fits and the fastest."""

import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from zerofit.estimate.allocations import UnusedBytes, unused_bytes
from zerofit.estimate.model_states import ModelStates, pinned_bytes
from zerofit.estimate.peak import (
    CPU_DEEPSPEED_BYTES,
    CPU_GROUP_BYTES,
    CPU_GROUPS,
    CPU_PROGRAM_BYTES,
    PeakMemory,
    PipelineMemory,
    evaluation_moments,
    find_peak,
    trace_cache,
    training_moments,
)
from zerofit.estimate.planned_model import DTYPES, PlannedModel
from zerofit.estimate.planned_strategy import PlannedStrategy
from zerofit.estimate.timing import Timing, UpdateSpeed
from zerofit.estimate.traced_steps import Stage, TracedStep
from zerofit.model.configuration import usable_positions
from zerofit.recipe.errors import UserError
from zerofit.strategy.host_memory import usable_cores
from zerofit.strategy.layout import ParallelLayout
from zerofit.tools.compare.search import choose_next_size
from zerofit.tools.plan.plan_options import (
    Degrees,
    PlanOptions,
    label_strategy,
    possible_degrees,
    read_pair,
    resolve_degrees,
)


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that is available on a device and on a machine.

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
    """The prediction for a micro-batch under a strategy. Sizes are in bytes, for the process that needs the most.

    Attributes:
        speed: None if no time is predicted.
    """

    strategy: str
    precision: str
    layout: ParallelLayout
    micro_batch: int
    accumulation: int
    peak: PeakMemory
    host_bytes: int  # host memory of a machine
    disk_bytes: int  # bytes that are offloaded to a machine's disk
    fits: bool
    lacking: int  # missing bytes on the device or the host; 0 if it fits
    length: int  # tokens of a row; for pairs, of a source
    speed: UpdateSpeed | None = None

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.layout.tensor, self.layout.pipeline, self.layout.sequence)

    @property
    def label(self) -> str:
        """The strategy's name, with its degrees of parallelism if it has some."""
        return label_strategy(self.strategy, self.degrees)

    @property
    def device_bytes(self) -> int:
        """The minimum number of bytes that training needs on a device."""
        return self.peak.needed

    @property
    def timed(self) -> UpdateSpeed | None:
        """The speed if the device's is known; None if it only ranks layouts."""
        return self.speed if self.speed and self.speed.is_known else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, even if they only rank layouts; 0 if no time is predicted."""
        return self.speed.tokens_per_s if self.speed else 0.0

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.layout.data_size

    @property
    def size(self) -> tuple[int, int]:
        """The size that is searched: predictions of one strategy differ in the length or in the micro-batch."""
        return self.length, self.micro_batch

    @property
    def rank(self) -> tuple[float, int]:
        """The sort key among predictions of one strategy: the fastest first, then the largest."""
        return -self.tokens_per_s, -self.micro_batch

    def to_dict(self) -> dict[str, Any]:
        peak = asdict(self.peak)
        layout = self.layout
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
        planned: the resolved strategy; None if the layout is refused.
        largest: the prediction of the largest micro-batch, or of the longest rows, that fit; None if none fits.
        best: the fastest prediction that fits.
        smallest_misfit: the smallest prediction that does not fit; None if all that were tried fit.
        refused: the reason why this layout is not possible; empty: it is possible.
        remedies: if nothing fits: (options with which it fits, the prediction with them).
    """

    strategy: str
    degrees: Degrees = field(default_factory=Degrees)
    planned: PlannedStrategy | None = None
    predictions: list[Prediction] = field(default_factory=list)
    refused: str = ""
    remedies: list[tuple[dict[str, Any], Prediction]] = field(default_factory=list)

    @property
    def label(self) -> str:
        return label_strategy(self.strategy, self.degrees)

    @property
    def resolved(self) -> PlannedStrategy:
        """The resolved strategy of a layout that is not refused."""
        if self.planned is None:
            raise ValueError(f"{self.label} is refused: {self.refused}")
        return self.planned

    @property
    def largest(self) -> Prediction | None:
        return max(self._fitting, key=lambda prediction: prediction.size, default=None)

    @property
    def best(self) -> Prediction | None:
        return min(self._fitting, key=lambda prediction: prediction.rank, default=None)

    @property
    def smallest_misfit(self) -> Prediction | None:
        misfits = [prediction for prediction in self.predictions if not prediction.fits]
        return min(misfits, key=lambda prediction: prediction.size, default=None)

    @property
    def _fitting(self) -> list[Prediction]:
        return [prediction for prediction in self.predictions if prediction.fits]


A = TypeVar("A")
B = TypeVar("B")


def predict_layouts(
    model: PlannedModel,
    outcomes: list[LayoutOutcome],
    predict: Callable[[LayoutOutcome], None],
    show: Callable[[str], None],
    activity: str,
) -> None:
    """Call `predict` for each layout, which adds predictions, or the reason why there are none. Layouts that share
    traces stay together in their order: nothing is traced twice, and the predictions are the same on any number of
    cores. `show` is called with the progress of `activity`."""
    shares: dict[Any, list[LayoutOutcome]] = {}
    for outcome in outcomes:
        if not outcome.refused:
            shares.setdefault(model.trace_settings(outcome.resolved), []).append(outcome)

    def find(share: list[LayoutOutcome]) -> list[tuple[Any, ...]]:
        for outcome in share:
            predict(outcome)
        return [(outcome.predictions, outcome.refused, outcome.remedies) for outcome in share]

    for done, (share, results) in enumerate(zip(shares.values(), in_processes(find, [*shares.values()])), 1):
        for outcome, (predictions, refused, remedies) in zip(share, results):
            outcome.predictions = predictions
            outcome.refused = refused
            outcome.remedies = remedies
        show(f"{activity}: {done} of {len(shares)} groups of layouts")


def in_processes(function: Callable[[A], B], items: list[A]) -> Iterator[B]:
    """Yield function(item) of each item. The calls run in copies of this process, one per core, if that is possible.
    Errors are raised in this process."""
    workers = min(usable_cores(), len(items))
    if workers > 1 and _can_fork():
        _shared["work"] = function, items  # closures cannot be pickled: copies find them here
        # One thread each, like DataLoader's workers: a copy has none of the OpenMP threads of this process.
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(workers, fork, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            if pool.submit(_can_differentiate).result():
                yield from pool.map(_call_shared, range(len(items)))
                return
    yield from map(function, items)


_shared: dict[str, Any] = {}


def _call_shared(number: int) -> Any:
    function, items = _shared["work"]
    return function(items[number])


def _can_differentiate() -> bool:
    """Return True if autograd works in this copy: some builds of torch refuse it after the parent has used it."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        return False
    return True


def _can_fork() -> bool:
    """Return True if a copy of this process can run: not if another thread may hold a lock, or with a CUDA context."""
    return sys.platform == "linux" and threading.active_count() == 1 and not torch.cuda.is_initialized()


MAX_FASTEST_TRIED = 3  # number of fastest candidates for which memory is predicted
LENGTH_STEP = 1024  # tokens between the lengths that are tried if none is named
T = TypeVar("T")  # a Prediction, or another type with `fits` and `device_bytes`


class Planner:
    """Makes predictions for a model. Strategies whose passes are the same share their traces.

    Args:
        timing: None: only memory is predicted, without time.
    """

    def __init__(self, recipe: PlanOptions, model: PlannedModel, budget: MemoryBudget, timing: Timing | None = None):
        self.recipe = recipe
        self.model = model
        self.budget = budget
        self.timing = timing

    def layouts(self, name: str) -> list[LayoutOutcome]:
        """Return the layouts that a strategy can have, without predictions."""
        pair = read_pair(name)
        recipe = self.recipe_for_layouts()
        budget = self.budget
        outcomes = []
        ranks = {"world_size": budget.num_gpus, "gpus_per_node": budget.gpus_per_node}
        gpu = recipe.known_gpu
        for degrees in possible_degrees(name, pair, budget.num_gpus, budget.local_ranks, self.model.num_layers):
            outcome = LayoutOutcome(name, degrees)
            outcomes.append(outcome)
            try:
                outcome.planned = resolve_degrees(name, pair, degrees, recipe, self.model, **ranks)
            except UserError as error:
                outcome.refused = "; ".join(error.problems)
                continue
            if outcome.planned.precision == "bf16" and gpu is not None and not gpu.has_bf16:
                outcome.refused = f"precision = bf16: not supported by {gpu.name}. Use --precision fp16"
            if outcome.planned.precision == "fp16" and not self.model.on_gpu:
                outcome.refused = "precision = fp16 needs a GPU. Use --precision bf16 or fp32"
        return outcomes

    def find(self, outcome: LayoutOutcome, sizes: list[int] | None = None) -> None:
        """Add predictions to a layout, or the reason why there are none: the micro-batches in the options, or the
        largest that fits and the fastest; with --lengths the longest rows that fit. `sizes` override the options."""
        lengths = self.lengths
        name = "per_device_train_batch_size"
        sizes = sizes or self.recipe.micro_batches
        if lengths:  # the micro-batch is the recipe's, else one row
            sizes = [getattr(self.recipe, name) if self.recipe.source(name) else 1]
        replicas = outcome.resolved.layout.data_size
        candidates = self.possible(sizes or range(1, self.recipe.max_batch_size + 1), replicas)

        def predict_rows(length: int) -> Prediction:
            model = self.model.with_options(self.recipe, replace(self.model.rows, length=length))
            planner = Planner(self.recipe, model, self.budget, self.timing and self.timing.of(model))
            return planner.predict(outcome.resolved, candidates[0])

        if not candidates:
            outcome.refused = self.no_batch(sizes, outcome.resolved.layout)
        elif lengths:
            outcome.predictions = search(lengths, predict_rows, self.budget.device)
        elif sizes:
            outcome.predictions = [self.predict(outcome.resolved, size) for size in candidates]
        else:
            predict = partial(self.predict, outcome.resolved)
            outcome.predictions = search(candidates, predict, self.budget.device)
            self._add_fastest(outcome, candidates)

    @cached_property
    def lengths(self) -> list[int] | None:
        """The lengths of rows to try, ascending: those that were named; for auto, multiples of 1024 up to the model's
        positions. None: micro-batches are searched. Raises UserError: the model has fewer positions, or no limit."""
        if not self.recipe.lengths:
            return None
        positions = usable_positions(self.model.config)
        if self.recipe.lengths == ["auto"]:
            if positions is None:
                kind = self.model.config.model_type
                raise UserError(f"lengths = auto: a {kind} has no limit. Set --lengths 8k,16k,32k")
            return sorted({*range(LENGTH_STEP, positions + 1, LENGTH_STEP), positions})
        named = self.recipe.named_lengths
        if positions and named[-1] > positions:
            given = " ".join(self.recipe.lengths)
            raise UserError(f"lengths = {given}: the model has {positions} positions. Choose less")
        return named

    def predict(self, resolved: PlannedStrategy, micro_batch: int) -> Prediction:
        """Return the prediction for a micro-batch under a strategy."""
        layout = resolved.layout
        accumulation = self.accumulation(micro_batch, layout.data_size)
        peaks = [self._peak(resolved, micro_batch, accumulation, stage) for stage in self.model.stages(layout)]
        peak = max(peaks, key=lambda peak: peak.needed)
        on_gpu = self.model.on_gpu
        host = peak.host * self.budget.local_ranks
        lacking = max(0, peak.needed - self.budget.device)
        if self.budget.host is not None and on_gpu:
            lacking = max(lacking, host - self.budget.host)
        fields = resolved.name, resolved.precision, layout, micro_batch, accumulation, peak, host
        disk = peak.disk * self.budget.local_ranks
        speed = self.speed(resolved, micro_batch)
        return Prediction(*fields, disk, lacking == 0, lacking, self.model.rows.length, speed)

    def _peak(self, resolved: PlannedStrategy, micro_batch: int, accumulation: int, stage: Stage) -> PeakMemory:
        model = self.model
        layout = resolved.layout
        states = resolved.states(model, accumulation > 1, stage)
        teacher = model.teacher_weights * DTYPES[resolved.precision].itemsize
        states = replace(states, buffers=states.buffers + teacher)
        training = model.steps(resolved, stage, micro_batch)
        in_flight = None
        if layout.pipeline > 1:
            hidden = model.hidden_bytes(resolved, micro_batch)
            in_flight = PipelineMemory(
                stage.in_flight(accumulation),
                hidden * (not stage.is_first),
                hidden * ((not stage.is_first) + (not stage.is_last)),
            )
        moments = [*training_moments(states, training, accumulation, in_flight)]
        unused = _unused(states, training, in_flight.micro_batches if in_flight else 1)
        num_groups = sum(size > 1 for size in (layout.shard_size, layout.tensor, layout.sequence, layout.pipeline))
        program = CPU_PROGRAM_BYTES
        if resolved.zero is not None:
            groups = [count for degree, count in CPU_GROUPS.items() if getattr(layout, degree) > 1]
            program += CPU_DEEPSPEED_BYTES + CPU_GROUP_BYTES * max(groups, default=0)
        peak_of = partial(
            find_peak,
            states,
            unused=unused,
            num_groups=num_groups,
            on_gpu=model.on_gpu,
            program=program,
            on_host=pinned_bytes([step.offloaded for step in training if step.offloaded]),
        )
        peak = peak_of(moments)
        if peak.needed > self.budget.device:  # it does not fit, so the evaluation is not traced
            return peak
        recipe = self.recipe
        rows = self.recipe.per_device_eval_batch_size
        evaluation = model.steps(resolved, stage, rows, evaluated=True)
        generated: dict[str, int] = {}  # {name: bytes}, without weights, while texts are generated in an evaluation
        if getattr(recipe, "predict_with_generate", False):
            beams = getattr(recipe, "num_beams", None) or getattr(model.config, "num_beams", None) or 1
            width = DTYPES[resolved.precision].itemsize
            generated = trace_cache(model.full).parts(recipe, rows * beams, width)
        return peak_of([*moments, *evaluation_moments(states, training, evaluation, generated)])

    def speed(self, resolved: PlannedStrategy, micro_batch: int) -> UpdateSpeed | None:
        if self.timing is None:
            return None
        accumulation = self.accumulation(micro_batch, resolved.layout.data_size)
        return self.timing.predict(resolved, micro_batch, accumulation)

    def tokens_per_s(self, resolved: PlannedStrategy, micro_batch: int) -> float:
        """Return tokens per second, which only rank candidates if the device's speed is unknown; 0 without timing."""
        speed = self.speed(resolved, micro_batch)
        return speed.tokens_per_s if speed else 0.0

    # -------------------------------------------------------------------------------------------------- global batches

    def accumulation(self, micro_batch: int, replicas: int) -> int:
        """Return the number of micro-batches of an update: the recipe's, or the one that gives the global batch."""
        if self._global_batch is None:
            return self.recipe.gradient_accumulation_steps or 1
        return self._global_batch // (micro_batch * replicas)

    @property
    def _global_batch(self) -> int | None:
        """The global batch size, or its limit."""
        return self.recipe.max_global_batch_size or self.recipe.global_batch_size

    def recipe_for_layouts(self) -> PlanOptions:
        """Return the recipe, without its global batch size if there is a limit to search up to."""
        if not self.recipe.max_global_batch_size:
            return self.recipe
        recipe = self.recipe.draft()
        for name in ("global_batch_size", "gradient_accumulation_steps"):
            recipe.reset_option(name)
        return recipe

    def possible(self, sizes: Iterable[int], replicas: int) -> list[int]:
        """Return the sizes that divide the global batch, if there is one, or stay within its limit."""
        total = self.recipe.global_batch_size
        limit = self.recipe.max_global_batch_size
        if limit:
            return [size for size in sizes if size * replicas <= limit]
        return [size for size in sizes if total is None or total % (size * replicas) == 0]

    def no_batch(self, sizes: list[int] | None, layout: ParallelLayout) -> str:
        """Return the message that says why no micro-batch is possible."""
        minimum = layout.data_size * (sizes[0] if sizes else 1)
        holders = f"{layout.data_size} replicas of {layout.replica_size} GPUs"
        if self.recipe.max_global_batch_size:
            limit = f"max_global_batch_size = {self.recipe.max_global_batch_size}: too few for {holders}"
            return f"{limit}. Set it to at least {minimum}, or a smaller --num_gpus"
        tried = f"global_batch_size = {self._global_batch}: {' or '.join(map(str, sizes or [1]))} rows"
        return f"{tried} on {holders} do not divide it: set it to a multiple of {minimum}"

    # ---------------------------------------------------------------------------------------------------------- search

    def _add_fastest(self, outcome: LayoutOutcome, candidates: list[int]) -> None:
        """Add the prediction of the fastest candidate that fits. Speeds are interpolated between traced sizes. Nothing
        is added if no global batch is set: then all sizes have the same accumulation, and a traced one is fastest."""
        largest = outcome.largest
        best = outcome.best
        if largest is None or best is None or largest.speed is None or self._global_batch is None:
            return
        predicted = {prediction.micro_batch for prediction in outcome.predictions}
        smaller = [size for size in candidates if size < largest.micro_batch]
        speeds = {size: self.tokens_per_s(outcome.resolved, size) for size in smaller}
        for size in sorted(speeds, key=lambda size: (-speeds[size], -size))[:MAX_FASTEST_TRIED]:
            if speeds[size] <= best.tokens_per_s or size in predicted:
                return
            prediction = self.predict(outcome.resolved, size)
            outcome.predictions = sorted([*outcome.predictions, prediction], key=lambda entry: entry.micro_batch)
            if prediction.fits:
                return


def _unused(states: ModelStates, training: list[TracedStep], in_flight: int) -> UnusedBytes:
    """Return the unused bytes of the allocator, on the stream that computes and on the one that gathers weights."""
    forward = [size for step in training if step.phase != "backward" for size in step.blocks]
    blocks: list[int] = []
    gradients: list[int] = []
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
    return UnusedBytes(unused.held + gathered.held, unused.needed + gathered.needed)


def search(candidates: Sequence[int], predict: Callable[[int], T], limit: int) -> list[T]:
    """Search for the largest candidate that fits. Returns the predictions that were made, in the order of their sizes.

    Args:
        candidates: micro-batches, or lengths of rows; ascending.
        limit: bytes of a device.
    """
    predictions: dict[int, Any] = {}
    peaks: dict[int, int | None] = {}
    while (size := choose_next_size(candidates, peaks, limit)) is not None:
        predictions[size] = predict(size)
        peaks[size] = predictions[size].device_bytes if predictions[size].fits else None
    return [predictions[size] for size in sorted(predictions)]
