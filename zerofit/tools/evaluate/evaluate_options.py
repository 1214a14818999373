"""The options of `zerofit evaluate`."""

from dataclasses import dataclass
from pathlib import Path

from zerofit.recipe.fields import option
from zerofit.recipe.options import Recipe
from zerofit.tools.tool_recipe import PRECISIONS

ENDINGS = (".yaml", ".yml")  # of a task of the user's


@dataclass
class EvaluateOptions(Recipe):
    """Evaluate a model on tasks of lm-evaluation-harness."""

    model: str | None = option(None, "The model: a folder, a hub name, an adapter's folder, or a run's.", common=True)
    tasks: list[str] | None = option(  # noqa: RUF009
        None, "Names of the harness's tasks, or .yaml files of your own.", common=True
    )
    adapter: str | None = option(None, "A LoRA adapter's folder, to be put on the model.")
    num_fewshot: int | None = option(None, "Examples before each question; by default the task's own.", minimum=0)
    limit: int | None = option(None, "Only so many questions of each task: a trial.", positive=True)
    batch_size: int = option(8, "Requests at a time.", positive=True)
    apply_chat_template: bool = option(False, "Ask through the tokenizer's chat template.")
    num_processes: int | None = option(None, "Processes, each with the whole model.", positive=True)
    precision: str | None = option(None, "By default that of the weights; without a GPU fp32.", choices=PRECISIONS)
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")
    output: str | None = option(None, "Folder of the results; by default that of the run, or model, and -tasks.")

    @property
    def results(self) -> Path:
        """The folder of the results."""
        name = Path((self.model or "").rstrip("/"))
        run = name.parent if name.name == "model" else name
        return Path(self.output or (f"{run}-tasks" if run.is_dir() else Path("outputs") / f"{name.name}-tasks"))

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.model:
            problems.append("no model: set --model to a folder or a hub name")
        if not self.tasks:
            problems.append("no tasks: set --tasks to names of the harness, or to .yaml files")
        return problems
