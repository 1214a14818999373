"""What would let a strategy fit that does not: an option of the recipe, or two together."""

import dataclasses
import itertools
from collections.abc import Callable

from zerofit.estimate.read_model import read_planned_model
from zerofit.recipe.errors import UserError
from zerofit.tools.plan.layouts import Degrees
from zerofit.tools.plan.parallel import find_all
from zerofit.tools.plan.planner import Planner
from zerofit.tools.plan.prediction import LayoutOutcome


@dataclasses.dataclass(frozen=True)
class PlanRemedy:
    """Options, and the largest micro-batch that fits with them."""

    options: tuple[str, ...]
    micro_batch: int

    def __str__(self) -> str:
        return f"{' '.join(f'--{name}' for name in self.options)} (micro-batch {self.micro_batch})"


def find_remedies(planner: Planner, outcomes: list[LayoutOutcome], check: Callable) -> dict[str, list[PlanRemedy]]:
    """{label: what would let it fit}, of those strategies that nothing fits of; those whose ranks share layers or rows
    are left out. First the single option with the largest micro-batch, then a pair of options that holds more.

    Args:
        check: as that of Planner.layouts.
    """
    missing = [one for one in outcomes if not one.refused and not one.largest and one.degrees == Degrees()]
    on_device = any(one.largest and not one.largest.host_bytes for one in outcomes)
    names = _options(planner, on_device) if missing else []
    found: dict[str, list[PlanRemedy]] = {}
    for options in (*((name,) for name in names), *itertools.combinations(names, 2)):
        if "load_in_4bit" in options and not (planner.recipe.lora or "lora" in options):
            continue  # only frozen weights are quantised
        for label, micro_batch in _largest(planner, missing, options, check).items():
            found.setdefault(label, []).append(PlanRemedy(options, micro_batch))
    return {label: _chosen(remedies) for label, remedies in found.items()}


def _options(planner: Planner, on_device: bool) -> list[str]:
    """The options that save memory and are not set yet. An adapter in place of full training is the last resort.

    Args:
        on_device: something fits without offload.
    """
    recipe = planner.recipe
    names = [] if recipe.gradient_checkpointing else ["gradient_checkpointing"]
    if not recipe.lora and (on_device or not recipe.model_name_or_path):
        return names
    names += [] if recipe.lora else ["lora"]
    return names if recipe.quantised or not planner.model.on_gpu else [*names, "load_in_4bit"]


def _largest(
    planner: Planner, missing: list[LayoutOutcome], options: tuple[str, ...], check: Callable
) -> dict[str, int]:
    """{label: the largest micro-batch that fits with these options}."""
    recipe = planner.recipe.draft()
    for name in options:
        recipe.adopt(name, True, f"--{name}")
    try:
        model = read_planned_model(recipe, recipe.task, planner.model.on_gpu)
    except UserError:
        return {}
    changed = Planner(recipe, model, planner.budget)
    again = [one for outcome in missing for one in changed.layouts(outcome.strategy, check)]
    find_all(model, again, lambda one: changed.find(one, None, recipe.max_batch_size))
    return {one.label: one.largest.micro_batch for one in again if one.largest}


def _chosen(remedies: list[PlanRemedy]) -> list[PlanRemedy]:
    single, pairs = ([one for one in remedies if len(one.options) == count] for count in (1, 2))
    best = [max(several, key=lambda one: one.micro_batch) for several in (single, pairs) if several]
    return best[:1] if len(best) == 2 and best[1].micro_batch <= best[0].micro_batch else best
