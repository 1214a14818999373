r"""`zerofit evaluate`: tasks of EleutherAI's lm-evaluation-harness on a run's model, an adapter, or a hub's model.

    zerofit evaluate --model outputs/notes --tasks hellaswag arc_easy --num_fewshot 5
    zerofit evaluate --model outputs/notes --tasks my_task.yaml --num_processes 4

Without --num_processes it runs in this process; with it, each of so many processes has the whole model and its share
of the requests.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from zerofit.launch.runs import LAUNCHER, layout_of
from zerofit.model.folders import model_folder
from zerofit.recipe.errors import UserError
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.places import configs
from zerofit.tools.evaluate.evaluate_options import ENDINGS, EvaluateOptions

VERSION = "0.4.13"  # that the tests have run with


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(EvaluateOptions, argv, prog="zerofit evaluate", tool=True)
    missing = [task for task in options.tasks or [] if task.endswith(ENDINGS) and not Path(task).is_file()]
    if missing:
        raise UserError(f"tasks: there is no file {', '.join(missing)}")
    if find_spec("lm_eval") is None:
        raise UserError(f"lm-evaluation-harness is not installed: pip install lm-eval=={VERSION}, or '.[tasks]'")
    if options.num_processes and "WORLD_SIZE" not in os.environ:
        layout = layout_of(configs() / "ddp.yaml", options.num_processes)
        os.execv(sys.executable, [*LAUNCHER, *layout, "-m", "zerofit.cli", "evaluate", *(argv or [])])
    from zerofit.tools.evaluate.harness import evaluate

    return evaluate(options, Path(model_folder(options.model or "")))
