"""A run's configuration, resolved once: recipe, launch environment, strategy and earlier run; the stored model or
adapter of a launch that trains nothing; and what `--torch_compile auto` compiles, decided from the recipe and the kind
of machine, never from a clock.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from zerofit.checkpoint.manager import EarlierRuns, ResumePlan
from zerofit.data.collate import GPU_MULTIPLE, round_up
from zerofit.data.lengths import DEFAULT_BLOCK_SIZE, LENGTH_OPTIONS, choose_length, length_warmup
from zerofit.model.adapter_folder import (
    AdapterFolder,
    adapter_to_train_on,
    find_base,
    open_adapter,
    trained_config,
)
from zerofit.model.chat import read_template
from zerofit.model.compilation import MAX_GRAPHS, check_float8, failing_compiler
from zerofit.model.configuration import (
    TRAINED_WITH,
    check_quantiser,
    is_adapter,
    load_configuration,
    model_folder,
    name_some,
    work_offline_without_network,
)
from zerofit.model.lora import check_quantisation, inject_adapter
from zerofit.model.stages import check_stages
from zerofit.model.tensor_parallel import check_split
from zerofit.recipe.errors import Problems, UserError
from zerofit.recipe.files import counted, read_record
from zerofit.recipe.paths import answers_folder, output_folder
from zerofit.recipe.tasks import CAUSAL_TASKS, TaskRecipe, model_kind
from zerofit.record.recorder import wanted_trackers
from zerofit.record.run_folder import RunFolder, differing_options, identity_options
from zerofit.strategy.batches import RESUMED_RUN
from zerofit.strategy.expert_parallel import check_experts
from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.optimizers import check_optimizer_installed
from zerofit.strategy.read import read_strategy
from zerofit.strategy.sequence import check_sequence_parallel as check_rows
from zerofit.strategy.strategy import Strategy, all_gather_objects


@dataclass(frozen=True)
class StoredModel:
    """A trained model or adapter that is evaluated, or answers the records of a file."""

    task: str
    recipe: TaskRecipe  # it names the model that is loaded: of a run its model/, of an adapter its base
    asked_for: str  # value of --model_name_or_path
    base: str  # the model that is loaded: an adapter's base
    adapter: AdapterFolder | None  # None: the model is whole
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, task: str, recipe: TaskRecipe) -> "StoredModel":
        """Resolve the model and its base, and check that output_dir holds no training run. Raises UserError: it holds
        one; the model is an adapter without a base, or for another task."""
        recipe = recipe.draft()
        asked_for = recipe.model_name_or_path
        assert asked_for, "the recipe's own check"
        if not recipe.is_flag("output_dir"):
            recipe.adopt("output_dir", answers_folder(task, recipe), "")
        folder = RunFolder(recipe.output_dir or "")
        refuse_a_training_run(folder)
        if not recipe.overwrite_output_dir:
            refuse_other_answers(folder, recipe)
        adapter = None
        name = model_folder(asked_for)
        recipe.adopt("lora", is_adapter(name), "")
        if recipe.lora:
            adapter = open_adapter(name, "model_name_or_path", task)
            if adapter.has_tokenizer and not recipe.tokenizer_name:
                recipe.adopt("tokenizer_name", name, "the adapter")
            name = find_base(adapter, trust_remote_code=recipe.trust_remote_code).name
        reads_as = str(adapter.path) if adapter is not None and adapter.has_tokenizer else name
        notes = recipe.adopt_inputs(trained_with(reads_as))
        recipe.adopt("model_name_or_path", name, "--model_name_or_path")
        stored = cls(task, recipe, asked_for, name, adapter, notes)
        if recipe.evaluate_only and recipe.train_file:
            stored.notes.append(
                f"evaluated is what is held out of train_file ({recipe.validation_split_percentage:g} %); "
                "--validation_file names data of its own"
            )
        if recipe.without_effect:
            stored.notes.append(f"without effect, since nothing is trained: {', '.join(recipe.without_effect)}")
        return stored

    def configuration(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return the configuration that the model was trained with: an adapter may change that of its base."""
        if self.adapter is not None:
            config = trained_config(self.adapter, config, self.recipe.config_overrides)
        return config

    @property
    def full_weights(self) -> list[str]:
        """Return the names of the weights that the adapter stores in full, instead of its base's."""
        return self.adapter.full_weights if self.adapter else []

    def inject(self, model: torch.nn.Module, strategy: Strategy) -> None:
        """Put the adapter onto its base. Raises UserError: it was trained on a different base model, or weights of the
        model are in neither."""
        if self.adapter is not None:
            inject_adapter(self.adapter, model, self.base, strategy)
        missing = [name for name in getattr(model, "initialized_weights", ()) if name not in self.full_weights]
        if missing:
            raise UserError(
                f"model_name_or_path = {self.asked_for!r} has no weights for {name_some(missing)}: it would answer at "
                f"random. Name a model that was trained for {self.task}"
            )


def trained_with(name: str) -> dict[str, Any]:
    """Return the options that shaped the inputs of a model in training; empty if they are not recorded."""
    if not Path(name).is_dir():
        work_offline_without_network()
    try:
        options = get_tokenizer_config(name).get(TRAINED_WITH)
    except (OSError, ValueError):  # loading it reports the error
        return {}
    return options if isinstance(options, dict) else {}


def refuse_a_training_run(folder: RunFolder) -> None:
    """Check that no training run's record would be replaced. Raises UserError: one would."""
    existing = [name for name in ("model", "checkpoints") if (folder.path / name).exists()]
    if existing or folder.recorded() is not None:
        raise UserError(
            f"output_dir = {str(folder.path)!r} holds a training run, whose record would be replaced. Choose "
            f"another --output_dir, or leave it out"
        )


def refuse_other_answers(folder: RunFolder, recipe: TaskRecipe) -> None:
    """Check that no answers of another model, or to other data, would be replaced. Raises UserError: some would."""
    if not (folder.metrics.read() or any(folder.path.glob("predictions*.jsonl"))):
        return  # nothing was answered
    option_names = ("model_name_or_path", "predict_file", *recipe.names_with(phase="data"))
    recorded = read_record(folder.path / "recipe.yaml")
    earlier = {name: value for name, value in recorded.items() if name in option_names}
    if differing := differing_options(identity_options(recipe, 0), earlier):
        folder.refuse_a_different_run(differing)


@dataclass(frozen=True)
class RunConfiguration:
    """The configuration of a run, which does not change any more. `recipe.source(option)` is where an option was set.

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
    adapter: AdapterFolder | None = None  # the adapter that training continues; the recipe names its base
    compiled_before: bool | str | None = None  # torch_compile of the run that this one resumes; None: it resumes none


def resolve(task: str, recipe: TaskRecipe) -> RunConfiguration:
    """Check that all sources agree. The recipe adopts what it leaves open from the strategy or the earlier run.

    Raises:
        UserError: any contradiction between recipe, YAML, JSON and earlier run, with both values and both sources.
        NothingToDo: the output folder holds this very run, and it is finished.
    """
    recipe = recipe.draft()
    problems = Problems()
    adapter = adapter_to_train_on(recipe, task)
    folder = RunFolder(output_folder(task, recipe))
    earlier = EarlierRuns.read(recipe, folder)
    given_for = 1
    notes: list[str] = []

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
    if recipe.source("per_device_train_batch_size") == RESUMED_RUN:
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
    config = load_configuration(recipe, auto_class)
    problems = Problems()
    if recipe.model_name_or_path:
        with problems.collected():
            check_quantiser("model_name_or_path", recipe.model_name_or_path, config)
    with problems.collected():
        if strategy is not None:
            check_layout(config, strategy, recipe)
    for option, default in LENGTH_OPTIONS[model_kind(task)].items():
        with problems.collected():
            asked_length: int = getattr(recipe, option) or default
            length = choose_length(option, asked_length, recipe.source(option), config)
            warmup = getattr(recipe, "block_size_warmup", None)
            if option == "block_size" and warmup and recipe.trains:
                length_warmup(warmup, recipe.source("block_size_warmup"), length, is_chat=False)
    with problems.collected():
        if template := getattr(recipe, "chat_template", None):
            read_template(template)
    problems.raise_found()
    return config


def check_strategy_for_task(task: str, strategy: Strategy) -> None:
    """Check that a task supports the kinds of parallelism of a strategy. Raises UserError: it does not."""
    degrees = {"sequence": strategy.sequence, "tensor": strategy.tensor, "pipeline": strategy.pipeline}
    kinds = " and ".join(kind for kind, degree in degrees.items() if degree > 1)
    if task not in CAUSAL_TASKS and kinds:
        raise UserError(
            f"{strategy.source}: train/{task}.py does not support {kinds} parallelism. Use a strategy without it, "
            "such as zero3"
        )


def check_teacher(recipe: Any, strategy: Strategy) -> None:
    """Check that each process can hold the full teacher besides the student (`--teacher`). Raises UserError: the
    strategy shards or splits the student."""
    splits = strategy.tensor * strategy.pipeline * strategy.sequence > 1
    if getattr(recipe, "teacher", None) and (strategy.shards_parameters or strategy.fully_shards or splits):
        raise UserError(
            f"teacher = {recipe.teacher!r} and {strategy.source}: a teacher is held in full by each process, which "
            "this strategy does not do. Use zero2"
        )


def check_layerdrop(config: Any, processes: int, source: str) -> None:
    """Check that training does not skip whole layers at random. Raises UserError: it does. Each rank would skip other
    layers, and ranks that exchange the gradients of a layer would hang."""
    drops = {name: value for name, value in config.to_dict().items() if name.endswith("layerdrop") and value}
    if drops:
        values = ",".join(f"{name}={value}" for name, value in drops.items())
        remedy = ",".join(f"{name}=0" for name in drops)
        raise UserError(
            f"the model's configuration has {values}: in training each of the {processes} processes would skip other "
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


MIN_UPDATES = 300  # fewer do not pay for compiling, which takes some 10 s: docs/strategies.md
EXPERT_COUNT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")  # fields of a model's configuration


class Compilation(NamedTuple):
    """The part of a model that is compiled ("blocks", "model", False), and the reason, for the log and the record."""

    value: bool | str
    why: str


def choose_compilation(
    recipe: Any,
    strategy: Any,
    config: Any = None,
    num_updates: int | None = None,
    missing: str | None = None,
    *,
    compiled_before: bool | str | None = None,
) -> Compilation:
    """Choose what `--torch_compile auto` compiles for training on CUDA devices.

    Args:
        num_updates: of the whole run; None: unknown, and assumed to be enough.
        compiled_before: the torch_compile of the run that this one resumes; None: it resumes none.
    """
    experts = strategy.divides_experts or any((getattr(config, name, None) or 1) > 1 for name in EXPERT_COUNT_FIELDS)
    widths = count_row_widths(recipe)
    reasons = {  # {why nothing is compiled: True if that is the case}
        "the run that it resumes was not": compiled_before is not None and not compiled_before,
        f"{strategy.name} gathers the weights of each module as it is called": strategy.shards_parameters,
        f"{strategy.name} splits rows": strategy.layout.sequence > 1,
        f"precision is {strategy.precision}": strategy.precision == "fp32",
        "the model has experts": experts,
        f"{recipe.quantised} is on": bool(recipe.quantised),
        "activation_offload is on": recipe.activation_offload,
        f"{missing}": missing is not None,
    }
    if compiled_before is None:
        reasons |= {
            "block_size_warmup lets rows grow": getattr(recipe, "block_size_warmup", None),
            "tokens_per_batch makes batches of many shapes": getattr(recipe, "tokens_per_batch", None),
            f"rows are padded to up to {widths} widths, more than {MAX_GRAPHS}": widths > MAX_GRAPHS,
            f"{num_updates} updates, fewer than {MIN_UPDATES}": num_updates is not None and num_updates < MIN_UPDATES,
        }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return Compilation(False, reason)
    if compiled_before:
        return Compilation(compiled_before, "so was the run that it resumes")
    length = "of" if num_updates is None else f"{num_updates:,} updates in"
    return Compilation("blocks", f"{length} {strategy.precision}, rows of {counted(widths, 'width')}")


def count_row_widths(recipe: Any) -> int:
    """Count the widths that the rows of a run may have on a GPU: 1 if they are packed, or come from a corpus."""
    is_packed = getattr(recipe, "packing", "none") != "none" and not getattr(recipe, "preference_loss", None)
    if is_packed or getattr(recipe, "data_path", None):
        return 1
    lengths = (getattr(recipe, name) or DEFAULT_BLOCK_SIZE for name in LENGTH_OPTIONS[model_kind(recipe.task)])
    return math.prod(len(np.unique(round_up(np.arange(1, length + 1), GPU_MULTIPLE))) for length in lengths)


def decide_compilation(
    recipe: Any,
    strategy: Strategy,
    config: Any,
    num_updates: int,
    compiled_before: bool | str | None,
    *,
    device: torch.device,
) -> tuple[str | None, list[str]]:
    """Set torch_compile to its value if it is "auto". All ranks call it together, before weights are loaded.

    Returns: (the value and the reason, for the record; None if it was not "auto"), notes for the log.

    Raises:
        UserError: it is on, and torch's compiler does not work.
    """
    is_auto = recipe.torch_compile == "auto"
    on_gpu = recipe.trains and device.type == "cuda"
    if not (is_auto or on_gpu):
        return None, []
    chosen = Compilation(recipe.torch_compile, recipe.source("torch_compile") or "")
    if is_auto:
        chosen = Compilation(False, "without a GPU to train on")
        if on_gpu:
            chosen = choose_compilation(recipe, strategy, config, num_updates, compiled_before=compiled_before)
    compiler_error = None
    if on_gpu:
        compiler_errors = all_gather_objects(failing_compiler(device) if chosen.value else None)
        compiler_error = next(filter(None, compiler_errors), None)
    if not is_auto:
        if compiler_error:
            raise UserError(
                f"torch_compile = {chosen.value} ({chosen.why}): {compiler_error}. Install what is missing, or say "
                "--torch_compile false"
            )
        return None, []
    if compiler_error:
        chosen = Compilation(False, compiler_error)
    recipe.torch_compile = chosen.value
    note = f"layers are not compiled: {chosen.why}"
    if chosen.value:
        note = f"layers are compiled: {chosen.why}; the first update takes longer. --torch_compile false turns it off"
    return f"auto: {str(chosen.value).lower()}, {chosen.why}", [note] if on_gpu else []
