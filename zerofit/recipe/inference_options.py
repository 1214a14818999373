"""Options of a launch without training: it evaluates a model, or predicts for the records of a file."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from zerofit.recipe.base import quoted
from zerofit.recipe.data_options import SourceOptions
from zerofit.recipe.fields import option
from zerofit.recipe.model_options import ModelOptions

OF_MODEL = "the model"  # the source of such an option
MODEL = "the weights are those of model_name_or_path: a hub name, a folder such as outputs/RUN/model, or an adapter's"


@dataclass
class InferenceOptions(SourceOptions, ModelOptions):
    """Evaluation and predictions, without training"""

    evaluate_only: bool = option(
        False, "Do not train: evaluate model_name_or_path on the held-out data.", common=True, excludes="predict_file"
    )
    predict_file: list[str] | None = option(  # noqa: RUF009
        None,
        "Do not train: predict with model_name_or_path for each record of this file, which needs no labels.",
        aliases=("test_file",),
        common=True,
    )

    @property
    def trains(self) -> bool:
        return not (self.evaluate_only or self.predict_file)

    @property
    def inputs(self) -> dict[str, Any]:
        """The options that shape what the model reads, stored with it."""
        return {name: getattr(self, name) for name in self.names_with(shapes_input=True)}

    def adopt_inputs(self, trained: dict[str, Any]) -> list[str]:
        """Read as in training, but for what the user has set. Returns notes. `trained`: the `inputs` of training."""
        used, notes, of_data = [], [], self.names_with(phase="data")
        for name, value in trained.items():
            of_other_data = name in of_data and (self.predict_file or not getattr(self, "data_path", None))
            if name not in self.inputs or value == getattr(self, name) or of_other_data:
                continue
            if source := self.source(name):
                was = f"trained with {quoted(value)}" if value is not None else "trained without it"
                notes.append(f"{name} = {quoted(getattr(self, name))} ({source}): the model was {was}")
            elif value is not None:
                self.adopt(name, value, OF_MODEL)
                used.append(f"{name} = {quoted(value)}")
        return [f"as in training: {option}" for option in used] + notes

    def columns_in(self, present: Iterable[str]) -> Self:
        """Return this recipe without the columns of training that data of another form lacks: its own are found."""
        present, other = set(present), self
        for name, value in self.inputs.items():
            if self.source(name) != OF_MODEL or not name.endswith(("_column", "_columns")):
                continue
            if not {*([value] if isinstance(value, str) else value)} <= present:
                other = self.draft() if other is self else other
                other.reset_option(name)
        return other

    def settle(self) -> None:
        """Reset the options of training in a launch without training."""
        super().settle()
        if self.trains or not self.model_name_or_path:
            return
        reset = self.names_with(phase="train")
        if self.config_name or self.model_type:
            reset.append("config_overrides")  # they made the architecture, which the weights' folder has
        if self.predict_file:
            reset += self.names_with(phase="data")
        elif self.validation_file:
            reset += ["dataset_name", "dataset_config_name", "train_file", "validation_split_percentage"]
        sources = [self.reset_option(name) for name in reset]
        self.without_effect = [source for source in sources if source and source.startswith("--")]

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.trains and not self.model_name_or_path:
            problems.append(f"--{'evaluate_only' if self.evaluate_only else 'predict_file'}: {MODEL}. Name it")
        if self.evaluate_only and self.train_file and not self.validation_split_percentage:
            problems.append(
                "evaluate_only: nothing is held out (validation_split_percentage = 0). Name a validation_file"
            )
        return problems
