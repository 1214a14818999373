"""The stored model or adapter of a launch that trains nothing: found, read, and put onto its base."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from zerofit.model.adapter_folder import (
    AdapterFolder,
    find_base,
    open_adapter,
    trained_config,
)
from zerofit.model.configuration import (
    TRAINED_WITH,
    is_adapter,
    model_folder,
    name_some,
    work_offline_without_network,
)
from zerofit.model.lora import inject_adapter
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_record
from zerofit.recipe.paths import answers_folder
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.run_folder import RunFolder, differing_options, identity_options
from zerofit.strategy.strategy import Strategy


@dataclass(frozen=True)
class StoredModel:
    """A trained model or adapter that is evaluated, or answers the records of a file."""

    task: str
    recipe: TaskRecipe  # it names the model that is loaded: of a run its model/, of an adapter its base
    asked_for: str  # what --model_name_or_path says
    base: str  # what is loaded: of an adapter its base
    adapter: AdapterFolder | None  # None: the model is whole
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, task: str, recipe: TaskRecipe) -> "StoredModel":
        """See also that no training run's folder is written to. Raises UserError: it would be; the model is an adapter
        without a base, or for another task."""
        recipe = recipe.draft()
        asked_for = recipe.model_name_or_path
        assert asked_for, "the recipe's own check"
        if not recipe.is_flag("output_dir"):
            recipe.adopt("output_dir", answers_folder(task, recipe), "")
        folder = RunFolder(recipe.output_dir or "")
        refuse_a_training_run(folder)
        if not recipe.overwrite_output_dir:
            refuse_other_answers(folder, recipe)
        adapter, name = None, model_folder(asked_for)
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
        """The configuration that the model was trained with, where the adapter changes that of its base."""
        if self.adapter is not None:
            config = trained_config(self.adapter, config, self.recipe.config_overrides)
        return config

    @property
    def swapped_in(self) -> list[str]:
        """Weights of the model that the adapter has and its base has not, or otherwise."""
        return self.adapter.full_weights if self.adapter else []

    def inject(self, model: PreTrainedModel, strategy: Strategy) -> None:
        """Put the adapter onto its base. Raises UserError: it was trained on a different base model, or weights of the
        model are nowhere."""
        if self.adapter is not None:
            inject_adapter(self.adapter, model, self.base, strategy)
        lacking = [name for name in getattr(model, "initialized_weights", ()) if name not in self.swapped_in]
        if lacking:
            raise UserError(
                f"model_name_or_path = {self.asked_for!r} has no weights for {name_some(lacking)}: it would answer at "
                f"random. Name a model that was trained for {self.task}"
            )


def trained_with(name: str) -> dict[str, Any]:
    """The options that shaped the inputs of a model in training; empty where nothing says it."""
    if not Path(name).is_dir():
        work_offline_without_network()
    try:
        found = get_tokenizer_config(name).get(TRAINED_WITH)
    except (OSError, ValueError):  # what is wrong with it is said when it is loaded
        return {}
    return found if isinstance(found, dict) else {}


def refuse_a_training_run(folder: RunFolder) -> None:
    """Raises UserError where a training run's record would be replaced."""
    held = [name for name in ("model", "checkpoints") if (folder.path / name).exists()]
    if held or folder.recorded() is not None:
        raise UserError(
            f"output_dir = {str(folder.path)!r} holds a training run, whose record would be replaced. Choose "
            f"another --output_dir, or leave it out"
        )


def refuse_other_answers(folder: RunFolder, recipe: TaskRecipe) -> None:
    """Raises UserError where answers of another model, or to other data, would be replaced."""
    if not (folder.metrics.read() or any(folder.path.glob("predictions*.jsonl"))):
        return  # nothing was answered
    asked = ("model_name_or_path", "predict_file", *recipe.names_with(phase="data"))
    recorded = read_record(folder.path / "recipe.yaml")
    earlier = {name: value for name, value in recorded.items() if name in asked}
    if differing := differing_options(identity_options(recipe, 0), earlier):
        folder.refuse_a_different_run(differing)
