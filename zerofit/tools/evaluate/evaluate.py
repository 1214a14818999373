r"""`zerofit evaluate`: run tasks of EleutherAI's lm-evaluation-harness on a run's model, an adapter, or a hub model.

    zerofit evaluate --model outputs/notes --tasks hellaswag arc_easy --num_fewshot 5
    zerofit evaluate --model outputs/notes --tasks my_task.yaml --num_processes 4

Without --num_processes it runs in this process; with it, each process has the whole model and a part of the requests.
"""

import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from zerofit.launch.machines import LAUNCH_COMMAND, launcher_options
from zerofit.model.configuration import model_folder
from zerofit.recipe.base import option
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import configs
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe
from zerofit.tools.tool_recipe import PRECISIONS

HARNESS_VERSION = "0.4.13"  # the version that was tested


@dataclass
class EvaluateOptions(Recipe):
    """Evaluate a model on tasks of lm-evaluation-harness."""

    model: str = option(
        None,
        "The model: a folder, a hub name, an adapter's folder, or a run's.",
        common=True,
        required="no model: set --model to a folder or a hub name",
    )
    tasks: list[str] = option(
        None,
        "Names of the harness's tasks, or .yaml files of your own.",
        common=True,
        required="no tasks: set --tasks to names of the harness, or to .yaml files",
    )
    adapter: str | None = option(None, "A LoRA adapter's folder, to be put on the model.")
    num_fewshot: int | None = option(None, "Examples before each question; by default the task's own.", minimum=0)
    limit: int | None = option(None, "Only the first questions of each task, this many: a trial.", positive=True)
    batch_size: int = option(8, "Requests at a time.", positive=True)
    apply_chat_template: bool = option(False, "Ask through the tokenizer's chat template.")
    num_processes: int | None = option(None, "Processes, each with the whole model.", positive=True)
    precision: str | None = option(None, "By default that of the weights; without a GPU fp32.", choices=PRECISIONS)
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")
    output: str | None = option(None, "Folder of the results; by default that of the run, or model, and -tasks.")

    @property
    def results(self) -> Path:
        """The folder of the results."""
        name = Path(self.model.rstrip("/"))
        run = name.parent if name.name == "model" else name
        return Path(self.output or (f"{run}-tasks" if run.is_dir() else Path("outputs") / f"{name.name}-tasks"))


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(EvaluateOptions, argv, prog="zerofit evaluate", tool=True)
    missing = [task for task in options.tasks if Path(task).suffix in (".yaml", ".yml") and not Path(task).is_file()]
    if missing:
        raise UserError(f"tasks: there is no file {', '.join(missing)}")
    if find_spec("lm_eval") is None:
        package = f"lm-eval=={HARNESS_VERSION}"
        raise UserError(f"lm-evaluation-harness is not installed: pip install {package}, or '.[tasks]'")
    if options.num_processes and "WORLD_SIZE" not in os.environ:
        layout = launcher_options(configs() / "ddp.yaml", options.num_processes)
        os.execv(sys.executable, [*LAUNCH_COMMAND, *layout, "-m", "zerofit.cli", "evaluate", *(argv or [])])
    from zerofit.tools.evaluate.harness import evaluate

    return evaluate(options, Path(model_folder(options.model)))
