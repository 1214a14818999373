"""A run's configuration, resolved once: recipe, launch environment, strategy pair and earlier run."""

import os
from dataclasses import dataclass

from train.checkpoint.resume import EarlierRuns, ResumePlan
from train.recipe.options import TrainingRecipe
from train.recipe.paths import output_folder
from train.record.run_folder import RunFolder
from train.record.trackers import wanted_trackers
from train.strategy.read import read_strategy
from train.strategy.strategy import Strategy


@dataclass(frozen=True)
class RunConfiguration:
    """What a run is. Nothing in it changes any more; `recipe.source(option)` says who set an option.

    Args:
        recipe: every option with the value that holds; frozen.
        trackers: those that are used.
        notes: for the log.
    """

    task: str
    recipe: TrainingRecipe
    strategy: Strategy
    resume: ResumePlan
    folder: RunFolder
    trackers: tuple[str, ...]
    notes: tuple[str, ...]


def resolve(task: str, recipe: TrainingRecipe) -> RunConfiguration:
    """See that all sources agree. The recipe adopts what it leaves open from the strategy pair or the earlier run.

    Raises:
        UserError: any contradiction between recipe, YAML, JSON and earlier run, with both values and both sources.
        NothingToDo: the output folder holds this very run, and it is finished.
    """
    recipe = recipe.draft()
    folder = RunFolder(output_folder(task, recipe))
    earlier = EarlierRuns.read(recipe, folder)
    note = earlier.keep_global_batch(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    strategy = read_strategy(recipe)
    if task != "seq2seq":  # that one takes bf16 in place of fp16 for some models
        strategy.check_precision()
    plan = earlier.plan(recipe, strategy.batches.global_batch, folder)
    if recipe.quantised:
        from train.model.lora import check_quantisation

        check_quantisation(recipe, strategy)
    if recipe.dataloader_num_workers is None:
        import torch

        recipe.adopt("dataloader_num_workers", 2 if torch.accelerator.is_available() else 0, "")
    trackers = tuple(wanted_trackers(recipe))
    recipe.freeze()
    notes = (*([note] if note else []), *plan.notes)
    return RunConfiguration(task, recipe, strategy, plan, folder, trackers, notes)
