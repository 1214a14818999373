"""`zerofit plan --search`: finds the fastest combination of layout, micro-batch and options that save memory.

Every combination first gets an upper bound: the speed of its fastest micro-batch, for any amount of memory. Then
memory is predicted in the order of the bounds, until no remaining bound is above the best speed. The result is that of
trying everything (tests/unit/test_plan_search.py) if memory grows with the micro-batch.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zerofit.estimate.planned_model import longest_rows, read_planned_model
from zerofit.model.recomputation import check_recomputation
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import OPTIMIZERS
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.plan.planner import LayoutOutcome, Planner, Prediction, in_processes, search

MAX_CONSECUTIVE_SIZES = 64
MAX_LAYOUT_REMEDIES = 2
Options = dict[str, Any]


@dataclass
class Combination:
    """A layout with changed options of the recipe.

    Attributes:
        options: {name: value} of the options that differ from the recipe.
        bound: tokens/s of its fastest micro-batch, whether it fits or not.
    """

    options: Options
    planner: Planner
    outcome: LayoutOutcome
    bound: float = 0.0

    def best(self) -> Prediction | None:
        """Return the fastest micro-batch that fits; None if not even the smallest fits."""
        planner = self.planner
        outcome = self.outcome
        sizes = candidate_sizes(planner, outcome)
        predictions = search(sizes, lambda size: planner.predict(outcome.resolved, size), planner.budget.device)
        largest = max((prediction.micro_batch for prediction in predictions if prediction.fits), default=0)
        speeds = {size: planner.tokens_per_s(outcome.resolved, size) for size in sizes if size <= largest}
        for size in sorted(speeds, key=lambda size: (-speeds[size], -size)):
            prediction = planner.predict(outcome.resolved, size)
            if prediction.fits:  # with accumulation a smaller one may need more, for accumulated gradients
                return prediction
        return None


def memory_options(recipe: PlanOptions) -> Iterator[Options]:
    """Yield the options that are tried: recomputation, offload of its inputs, the loss, and the optimizer if none is
    named."""
    recomputations = [False, "selective", True]
    candidates = [name for name in OPTIMIZERS if name != "muon"]  # Muon is not chosen to save memory
    optimizers = [recipe.optim] if recipe.source("optim") else candidates
    for recomputation, loss, optim in itertools.product(recomputations, ("chunked", "full"), optimizers):
        for offloaded in (False, True) if recomputation is True else (False,):
            if recipe.task == "cls" and loss == "full":
                continue
            options = {"gradient_checkpointing": recomputation, "activation_offload": offloaded, "optim": optim}
            options |= {"loss": loss} if recipe.task != "cls" else {}
            yield {name: value for name, value in options.items() if getattr(recipe, name) != value}


def option_words(options: Options) -> list[str]:
    """Return the words of the options on a command line."""
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value).lower()]
    return words


def candidate_sizes(planner: Planner, outcome: LayoutOutcome) -> list[int]:
    """Return the micro-batches that are tried: all up to MAX_CONSECUTIVE_SIZES, then powers of two."""
    sizes = [
        size
        for size in range(1, planner.recipe.max_batch_size + 1)
        if size <= MAX_CONSECUTIVE_SIZES or size & (size - 1) == 0
    ]
    return planner.possible(sizes, outcome.resolved.layout.data_size)


def list_combinations(planner: Planner, names: list[str]) -> list[list[Combination]]:
    """Return all possible combinations, without bounds, grouped by their options. A strategy is resolved once for each
    optimizer: the other options change only the passes."""
    resolved: dict[str, list[LayoutOutcome]] = {}
    groups = []
    for options in memory_options(planner.recipe):
        changed = _changed(planner, options)
        if changed is None:
            continue
        if changed.recipe.optim not in resolved:
            layouts = [outcome for name in names for outcome in changed.layouts(name)]
            resolved[changed.recipe.optim] = [outcome for outcome in layouts if not outcome.refused]
        outcomes = [replace(outcome, predictions=[]) for outcome in resolved[changed.recipe.optim]]
        possible = [outcome for outcome in outcomes if candidate_sizes(changed, outcome)]
        group = [Combination(options, changed, outcome) for outcome in possible]
        groups += [group] if group else []
    return groups


def _changed(planner: Planner, options: Options) -> Planner | None:
    """Return the planner with these options; None if they exclude each other, or the model does not support them."""
    recipe = planner.recipe.draft()
    model = planner.model
    timing = planner.timing
    for name, value in options.items():
        recipe.adopt(name, value, f"--{name}")
    try:
        if recipe.problems():
            return None
        if recipe.gradient_checkpointing:
            check_recomputation(model.full, recipe.gradient_checkpointing)
    except UserError:
        return None
    if "lora" in options or "load_in_4bit" in options or "optim" in options:  # other weights, or states
        model = read_planned_model(recipe, model.task, model.on_gpu)
    else:
        model = model.with_options(recipe, longest_rows(recipe, model.task, model.config, model.full, model.on_gpu))
    return Planner(recipe, model, planner.budget, timing and timing.of(model))


def _saving(recipe: PlanOptions, on_gpu: bool) -> Iterator[Options]:
    """Yield options that save memory: single ones, those first that change training the least, then pairs."""
    options: list[Options] = [{"gradient_checkpointing": True}]
    options += [{"loss": "chunked"}] if recipe.task != "cls" else []
    options += [{"per_device_eval_batch_size": 1}, {"activation_offload": True}]
    options += [{"precision": "bf16"}] if on_gpu else []
    adapters: list[Options] = [{"lora": True}] if recipe.model_name_or_path else []
    if on_gpu and recipe.model_name_or_path:
        adapters.append({"lora": True, "load_in_4bit": True})
    options += adapters + [{"optim": name} for name in ("adamw_8bit", "adafactor") if recipe.optim == "adamw"]
    changed = [{name: value for name, value in entry.items() if getattr(recipe, name) != value} for entry in options]
    changed = [entry for entry in changed if entry]
    yield from changed
    for first, second in itertools.combinations(changed, 2):
        if not first.keys() & second.keys():
            yield first | second


def _may_fit(planner: Planner, outcome: LayoutOutcome) -> bool:
    """Return True if the model states fit, which do not depend on the batch: only then passes are traced."""
    resolved = outcome.resolved
    device = planner.budget.device
    all_states = [resolved.states(planner.model, False, stage) for stage in planner.model.stages(resolved.layout)]
    return all(
        states.weights + states.gradients + states.optimizer + states.buffers <= device for states in all_states
    )


class RemedySearch:
    """Searches for options of the recipe that make a layout fit. Each is predicted as a separate plan."""

    def __init__(self, planner: Planner):
        self.planner = planner
        self._planners: dict[tuple[tuple[str, Any], ...], Planner | None] = {}

    def add(self, outcome: LayoutOutcome) -> None:
        """Add the first remedies of a layout: single options that are enough, otherwise pairs."""
        has_single = False
        misfit = outcome.smallest_misfit
        for options in _saving(self.planner.recipe, self.planner.model.on_gpu):
            is_single = len(options) == 1 or options.keys() == {"lora", "load_in_4bit"}
            if len(outcome.remedies) == MAX_LAYOUT_REMEDIES or (has_single and not is_single):
                return
            key = tuple(options.items())
            if key not in self._planners:
                self._planners[key] = _changed(self.planner, options)
            changed = self._planners[key]
            if changed is None:
                continue
            for layout in changed.layouts(outcome.strategy):
                if layout.degrees == outcome.degrees and not layout.refused and _may_fit(changed, layout):
                    changed.find(layout, [misfit.micro_batch] if misfit and changed.recipe.micro_batches else None)
                    if layout.best is not None:
                        outcome.remedies.append((options, layout.best))
                        has_single = has_single or is_single


def find_best(planner: Planner, names: list[str], top: int = 1) -> list[tuple[Combination, Prediction]]:
    """Return the `top` fastest combinations that fit, the fastest first, with their predictions."""
    groups = list_combinations(planner, names)
    for group, bounds in zip(groups, in_processes(_bounds, groups), strict=True):
        for combination, bound in zip(group, bounds, strict=True):
            combination.bound = bound
    found: list[tuple[Combination, Prediction]] = []
    for combination in sorted(itertools.chain(*groups), key=lambda combination: -combination.bound):
        if len(found) >= top and combination.bound <= found[-1][1].tokens_per_s:
            break
        best = combination.best()
        outcome = combination.outcome
        # With all options resolved, the strategy must still be possible in this layout.
        layouts = combination.planner.layouts(outcome.strategy) if best is not None else []
        if best is not None and any(layout.degrees == outcome.degrees and not layout.refused for layout in layouts):
            found = sorted([*found, (combination, best)], key=lambda pair: -pair[1].tokens_per_s)[:top]
    return found


def _bounds(group: list[Combination]) -> list[float]:
    bounds = []
    for combination in group:
        sizes = candidate_sizes(combination.planner, combination.outcome)
        bounds.append(max(combination.planner.tokens_per_s(combination.outcome.resolved, size) for size in sizes))
    return bounds
