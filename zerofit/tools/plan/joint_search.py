"""`zerofit plan --search`: the fastest of all layouts, micro-batches and options that save memory, together.

Every combination gets a bound first: the speed of its fastest micro-batch, whatever memory that takes. Then memory is
asked in the order of the bounds, and the search ends when no bound left is above what was found; so the result is that
of trying everything (tests/unit/test_plan_search.py), as far as memory grows with the micro-batch.
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

EACH = 64
MAX_REMEDIES = 2
Options = dict[str, Any]


@dataclass
class Combination:
    """A layout with options of the recipe.

    Attributes:
        options: {name: value} that differ from the recipe.
        bound: tokens/s of its fastest micro-batch, fitting or not.
    """

    options: Options
    planner: Planner
    outcome: LayoutOutcome
    bound: float = 0.0

    def best(self) -> Prediction | None:
        """The fastest micro-batch that fits; None: not even the smallest does."""
        planner = self.planner
        outcome = self.outcome
        sizes = candidates_of(planner, outcome)
        made = search(sizes, lambda size: planner.predict(outcome.resolved, size), planner.budget.device)
        largest = max((one.micro_batch for one in made if one.fits), default=0)
        speeds = {size: planner.tokens_per_s(outcome.resolved, size) for size in sizes if size <= largest}
        for size in sorted(speeds, key=lambda size: (-speeds[size], -size)):
            found = planner.predict(outcome.resolved, size)
            if found.fits:  # accumulation takes gradients that a larger micro-batch may not have
                return found
        return None


def variants(recipe: PlanOptions) -> Iterator[Options]:
    """Yield the options that are tried: recomputation, its inputs on the host, the loss, and the optimizer where none
    is named."""
    recomputed = [False, "selective", True]
    others = [name for name in OPTIMIZERS if name != "muon"]  # which is no matter of memory
    optimizers = [recipe.optim] if recipe.source("optim") else others
    for again, loss, optim in itertools.product(recomputed, ("chunked", "full"), optimizers):
        for offloaded in (False, True) if again is True else (False,):
            if recipe.task == "cls" and loss == "full":
                continue
            options = {"gradient_checkpointing": again, "activation_offload": offloaded, "optim": optim}
            options |= {"loss": loss} if recipe.task != "cls" else {}
            yield {name: value for name, value in options.items() if getattr(recipe, name) != value}


def words_of(options: Options) -> list[str]:
    """Return the options as they are typed."""
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value).lower()]
    return words


def candidates_of(planner: Planner, outcome: LayoutOutcome) -> list[int]:
    """The micro-batches that are tried: all up to EACH, then powers of two."""
    sizes = [size for size in range(1, planner.recipe.max_batch_size + 1) if size <= EACH or size & (size - 1) == 0]
    return planner.possible(sizes, outcome.resolved.layout.data_size)


def combinations(planner: Planner, names: list[str]) -> list[list[Combination]]:
    """Every combination that is possible, without bounds; those with the same options together. A strategy is resolved
    once for each optimizer: the other options change the passes alone."""
    resolved: dict[str, list[LayoutOutcome]] = {}
    found = []
    for options in variants(planner.recipe):
        changed = _changed(planner, options)
        if changed is None:
            continue
        if changed.recipe.optim not in resolved:
            several = [outcome for name in names for outcome in changed.layouts(name)]
            resolved[changed.recipe.optim] = [one for one in several if not one.refused]
        outcomes = [replace(outcome, predictions=[]) for outcome in resolved[changed.recipe.optim]]
        group = [Combination(options, changed, one) for one in outcomes if candidates_of(changed, one)]
        found += [group] if group else []
    return found


def _changed(planner: Planner, options: Options) -> Planner | None:
    """The planner with these options; None: they do not go together, or the model does not have them."""
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
    """The options that save memory, those first that change least of what is trained: one, then two together."""
    options: list[Options] = [{"gradient_checkpointing": True}]
    options += [{"loss": "chunked"}] if recipe.task != "cls" else []
    options += [{"per_device_eval_batch_size": 1}, {"activation_offload": True}]
    options += [{"precision": "bf16"}] if on_gpu else []
    adapters: list[Options] = [{"lora": True}] if recipe.model_name_or_path else []
    if on_gpu and recipe.model_name_or_path:
        adapters.append({"lora": True, "load_in_4bit": True})
    options += adapters + [{"optim": name} for name in ("adamw_8bit", "adafactor") if recipe.optim == "adamw"]
    changed = [{name: value for name, value in one.items() if getattr(recipe, name) != value} for one in options]
    changed = [one for one in changed if one]
    yield from changed
    for one, other in itertools.combinations(changed, 2):
        if not one.keys() & other.keys():
            yield one | other


def _may_fit(planner: Planner, outcome: LayoutOutcome) -> bool:
    """Return whether there is room for the model states, which no batch makes smaller: then passes are worth a
    trace."""
    resolved = outcome.resolved
    device = planner.budget.device
    several = [resolved.states(planner.model, False, stage) for stage in planner.model.stages(resolved.layout)]
    return all(each.weights + each.gradients + each.optimizer + each.buffers <= device for each in several)


class Remedies:
    """Changes that make a layout fit that does not: options of the recipe, each predicted as a plan of its own."""

    def __init__(self, planner: Planner):
        self.planner = planner
        self._planners: dict[tuple[tuple[str, Any], ...], Planner | None] = {}

    def add(self, outcome: LayoutOutcome) -> None:
        """Add the first remedies of a layout: options that are enough alone, else two together."""
        alone = False
        misfit = outcome.smallest_misfit
        for options in _saving(self.planner.recipe, self.planner.model.on_gpu):
            is_single = len(options) == 1 or options.keys() == {"lora", "load_in_4bit"}
            if len(outcome.remedies) == MAX_REMEDIES or (alone and not is_single):
                return
            key = tuple(options.items())
            if key not in self._planners:
                self._planners[key] = _changed(self.planner, options)
            changed = self._planners[key]
            if changed is None:
                continue
            for again in changed.layouts(outcome.strategy):
                if again.degrees == outcome.degrees and not again.refused and _may_fit(changed, again):
                    changed.find(again, [misfit.micro_batch] if misfit and changed.recipe.micro_batches else None)
                    if again.best is not None:
                        outcome.remedies.append((options, again.best))
                        alone = alone or is_single


def find_best(planner: Planner, names: list[str], top: int = 1) -> list[tuple[Combination, Prediction]]:
    """The `top` combinations that are the fastest of those that fit, in this order."""
    groups = combinations(planner, names)
    for group, bounds in zip(groups, in_processes(_bounds, groups), strict=True):
        for one, bound in zip(group, bounds, strict=True):
            one.bound = bound
    found: list[tuple[Combination, Prediction]] = []
    for one in sorted(itertools.chain(*groups), key=lambda one: -one.bound):
        if len(found) >= top and one.bound <= found[-1][1].tokens_per_s:
            break
        best = one.best()
        # The strategy, resolved with all options, has to be what it was without them.
        again = one.planner.layouts(one.outcome.strategy) if best is not None else []
        if best is not None and any(each.degrees == one.outcome.degrees and not each.refused for each in again):
            found = sorted([*found, (one, best)], key=lambda pair: -pair[1].tokens_per_s)[:top]
    return found


def _bounds(group: list[Combination]) -> list[float]:
    return [
        max(one.planner.tokens_per_s(one.outcome.resolved, size) for size in candidates_of(one.planner, one.outcome))
        for one in group
    ]
