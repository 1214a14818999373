r"""`zerofit doctor`: which value of each setting holds and who set it, what is wrong, and whether a run can start.

    zerofit doctor
    zerofit doctor --strategy zero3_offload
    zerofit doctor --config recipes/clm/stdlib-gpt2.yaml --strategy zero2 --num_processes 2

Nothing is launched or downloaded: no GPU, data or weights are needed. Recipe and strategy pair are resolved by the
code of a run, in the environment of its first process.
"""

import contextlib
import dataclasses
import io
import os
from unittest.mock import patch

from zerofit.recipe.options import StrategyOptions, TrainingRecipe
from zerofit.recipe.parse import parse_recipe, read_recipe
from zerofit.recipe.tasks import TASKS
from zerofit.record.environment import untried_versions
from zerofit.record.terminal import log_lines
from zerofit.tools.doctor.report import ERROR, WARNING, DoctorOptions, DoctorReport
from zerofit.tools.tool_recipe import join_with_recipe

PROG = "zerofit doctor"


def main(argv: list[str]) -> int:
    """Print the report. Returns 0; 1: it cannot run here; 2: bad input."""
    read = read_doctor_options(argv)
    shell = dict(os.environ)
    offline = patch.dict(os.environ, shell | {"HF_HUB_OFFLINE": "1"}, clear=True)
    with offline, contextlib.redirect_stdout(io.StringIO()):  # libraries talk
        report = make_report(*read, shell)
    log_lines(report.text())
    return report.exit_code


def read_doctor_options(argv: list[str]) -> tuple[DoctorOptions, str | None, TrainingRecipe, list[str]]:
    """Return (the doctor's options; the task, where one is named; the recipe as a run reads it; its problems)."""
    if not any(word.partition("=")[0] in ("--config", "--task") for word in argv):
        of_recipes = {field.name for cls in TASKS.values() for field in dataclasses.fields(cls)}
        remedy = f"it belongs to a recipe: add --config FILE, or --task {' | '.join(TASKS)}"
        options = parse_recipe(DoctorOptions, argv, prog=PROG, tool=True, hints=dict.fromkeys(of_recipes, remedy))
        return options, None, read_recipe(TrainingRecipe, options.flags_given(StrategyOptions), tool=True)[0], []
    task, joined = join_with_recipe(DoctorOptions, argv, PROG)
    options, problems = read_recipe(joined, argv, prog=PROG, tool=True)
    recipe, of_recipe = read_recipe(TASKS[task], options.flags_given(TASKS[task]), tool=True)
    problems += of_recipe
    if problems:  # what follows from a wrong name is not said again
        problems += [problem for problem in recipe.problems() if not problem.startswith("no ")]
    return options, task, recipe, problems


def make_report(
    options: DoctorOptions, task: str | None, recipe: TrainingRecipe, problems: list[str], shell: dict[str, str]
) -> DoctorReport:
    """The report on this machine, and on the launch that the options name, as it would be typed in this shell."""
    report = DoctorReport(bad_input=bool(problems))
    report.add(ERROR, *problems)
    report.add(WARNING, *untried_versions())
    try:
        from zerofit.tools.doctor.examine import examine
    except (ImportError, OSError) as error:  # OSError: a library that torch needs
        report.add(ERROR, f"a package cannot be imported: {error}. Run make setup")
    else:
        examine(report, options, task, recipe, shell)
    return report
