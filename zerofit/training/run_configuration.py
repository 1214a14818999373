"""A run's configuration, resolved once: recipe, launch environment, strategy and earlier run."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zerofit.checkpoint.resume import EarlierRuns, ResumePlan
from zerofit.data.lengths import LENGTHS, choose_length, length_warmup
from zerofit.model.adapter_folder import AdapterFolder, adapter_to_train_on
from zerofit.model.chat import named_template
from zerofit.model.compilation import check_float8
from zerofit.model.configuration import check_quantiser, load_configuration
from zerofit.model.lora import check_quantisation
from zerofit.model.stages import check_stages
from zerofit.model.tensor_parallel import check_split
from zerofit.recipe.errors import Problems, UserError
from zerofit.recipe.files import counted
from zerofit.recipe.paths import output_folder
from zerofit.recipe.tasks import CAUSAL, TaskRecipe, model_kind
from zerofit.record.recorder import wanted_trackers
from zerofit.record.run_folder import RunFolder
from zerofit.strategy.batches import RESUMED
from zerofit.strategy.expert_parallel import check_experts
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.optimizers import check_optimizer_installed
from zerofit.strategy.read import read_strategy
from zerofit.strategy.sequence import check_sequence_parallel as check_rows
from zerofit.strategy.strategy import Strategy


@dataclass(frozen=True)
class RunConfiguration:
    """The configuration of a run. Nothing in it changes any more; `recipe.source(option)` says who set an option.

    Args:
        options_given_for: the number of data-parallel processes with which the recipe's own accumulation makes the
            global batch.
    """

    task: str
    recipe: TaskRecipe
    strategy: Strategy
    resume: ResumePlan
    folder: RunFolder
    trackers: tuple[str, ...]
    options_given_for: int
    notes: tuple[str, ...]
    adapter: AdapterFolder | None = None  # that is trained on; the recipe names its base
    compiled_before: bool | str | None = None  # torch_compile of the run that this one resumes; None: it resumes none


def resolve(task: str, recipe: TaskRecipe) -> RunConfiguration:
    """Check that all sources agree. The recipe adopts what it leaves open from the strategy or the earlier run.

    Raises:
        UserError: any contradiction between recipe, YAML, JSON and earlier run, with both values and both sources.
        NothingToDo: the output folder holds this very run, and it is finished.
    """
    recipe, problems = recipe.draft(), Problems()
    adapter = adapter_to_train_on(recipe, task)
    folder = RunFolder(output_folder(task, recipe))
    earlier = EarlierRuns.read(recipe, folder)
    given_for, notes = 1, list[str]()

    def keep_global_batch(layout: ParallelLayout) -> bool:
        nonlocal given_for
        given_for, stays, note = earlier.keep_global_batch(recipe, layout.data_size)
        notes.extend(filter(None, [note]))
        return stays

    with problems.collected():
        trackers = tuple(wanted_trackers(recipe))
    with problems.collected():
        check_optimizer_installed(recipe)
    with problems.collected():
        strategy = read_strategy(recipe, keep_global_batch)
    problems.raise_found()
    if recipe.source("per_device_train_batch_size") == RESUMED:
        notes.append(
            f"per_device_train_batch_size = {recipe.per_device_train_batch_size}: the largest with which "
            f"{counted(strategy.layout.data_size, 'replica')} make the global batch of {strategy.batches.global_batch}"
        )
    with problems.collected():
        check_strategy_for_task(task, strategy)
    with problems.collected():
        if recipe.quantised:
            check_quantisation(recipe, strategy)
    with problems.collected():
        check_float8(recipe)
    with problems.collected():
        check_teacher(recipe, strategy)
    with problems.collected():
        plan = earlier.plan(recipe, strategy.batches.global_batch, folder)
    problems.raise_found()
    if recipe.dataloader_num_workers is None:
        recipe.adopt("dataloader_num_workers", 2 if torch.accelerator.is_available() else 0, "")
    notes += [*recipe.left_out, *recipe.idle_options(), *plan.notes]
    if recipe.trust_remote_code:
        notes.append(f"trust_remote_code ({recipe.source('trust_remote_code')}): the model's own Python code runs")
    before = earlier.compiled(plan)
    return RunConfiguration(task, recipe, strategy, plan, folder, trackers, given_for, tuple(notes), adapter, before)


def check_model(task: str, recipe: TaskRecipe, strategy: Strategy | None, auto_class: Any) -> Any:
    """Check what can be checked of a model before its weights or any data are read. Returns its configuration. Raises
    UserError: there is no such model, the strategy cannot split it, it has too few positions.

    Args:
        strategy: None: it is not known.
    """
    config, problems = load_configuration(recipe, auto_class), Problems()
    if recipe.model_name_or_path:
        with problems.collected():
            check_quantiser("model_name_or_path", recipe.model_name_or_path, config)
    with problems.collected():
        if strategy is not None:
            check_layout(config, strategy, recipe)
    for option, default in LENGTHS[model_kind(task)].items():
        with problems.collected():
            asked: int = getattr(recipe, option) or default
            length = choose_length(option, asked, recipe.source(option), config)
            warmup = getattr(recipe, "block_size_warmup", None)
            if option == "block_size" and warmup and recipe.trains:
                length_warmup(warmup, recipe.source("block_size_warmup"), length, is_chat=False)
    with problems.collected():
        if template := getattr(recipe, "chat_template", None):
            named_template(template)
    problems.raise_found()
    return config


def check_strategy_for_task(task: str, strategy: Strategy) -> None:
    """Check that a task supports the kinds of parallelism of a strategy. Raises UserError: it does not."""
    degrees = {"sequence": strategy.sequence, "tensor": strategy.tensor, "pipeline": strategy.pipeline}
    kinds = " and ".join(kind for kind, degree in degrees.items() if degree > 1)
    if task not in CAUSAL and kinds:
        raise UserError(
            f"{strategy.source}: train/{task}.py does not support {kinds} parallelism. Use a strategy without it, "
            "such as zero3"
        )


def check_teacher(recipe: Any, strategy: Strategy) -> None:
    """Check that a teacher can be held beside the student (`--teacher`). Raises UserError: the strategy shards or
    splits what a process computes; the teacher would be in full on each."""
    splits = strategy.tensor * strategy.pipeline * strategy.sequence > 1
    if getattr(recipe, "teacher", None) and (strategy.shards_parameters or strategy.fully_shards or splits):
        raise UserError(
            f"teacher = {recipe.teacher!r} and {strategy.source}: a teacher is held in full by each process, which "
            "this strategy does not do. Use zero2"
        )


def check_layerdrop(config: Any, processes: int, source: str) -> None:
    """Raises UserError where training skips whole layers at random: each rank skips others, and ranks that exchange
    the gradients of a layer would wait for each other for ever."""
    drops = {name: value for name, value in config.to_dict().items() if name.endswith("layerdrop") and value}
    if drops:
        stated = ",".join(f"{name}={value}" for name, value in drops.items())
        remedy = ",".join(f"{name}=0" for name in drops)
        raise UserError(
            f"the model's configuration has {stated}: in training each of the {processes} processes would skip other "
            f"layers, and wait for the others for ever. Say --config_overrides {remedy}, or use one process"
        )


def check_layout(config: Any, strategy: Strategy, recipe: TaskRecipe) -> None:
    """Check that a model can be laid out as the strategy says. Raises UserError: ranks cannot split its rows or its
    layers, or share its layers."""
    experts = strategy.launch.world_size if strategy.divides_experts else 1
    checks = (
        (strategy.sequence, partial(check_rows, recipe=recipe, precision=strategy.precision)),
        (strategy.tensor, check_split),
        (strategy.pipeline, check_stages),
        (experts, check_experts),
        (strategy.launch.world_size if recipe.trains else 1, check_layerdrop),
    )
    problems = Problems()
    for degree, check in checks:
        if degree > 1:
            with problems.collected():
                check(config, degree, strategy.source)
    problems.raise_found()
