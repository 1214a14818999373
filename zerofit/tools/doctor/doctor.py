r"""`zerofit doctor`: the effective value of each setting and its source, problems, and whether a run can start here.

    zerofit doctor
    zerofit doctor --strategy zero3_offload
    zerofit doctor --config recipes/clm/stdlib-gpt2.yaml --strategy zero2 --num_processes 2

Nothing is launched or downloaded: no GPU, data or weights are needed. The code of a run resolves recipe and strategy,
in the environment of its first process.
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
    """Print the report. Returns 0: it can run here; 1: it cannot; 2: bad input."""
    read = read_doctor_options(argv)
    shell = dict(os.environ)
    offline = patch.dict(os.environ, shell | {"HF_HUB_OFFLINE": "1"}, clear=True)
    with offline, contextlib.redirect_stdout(io.StringIO()):  # libraries print
        report = make_report(*read, shell)
    log_lines(report.text())
    return report.exit_code


def read_doctor_options(argv: list[str]) -> tuple[DoctorOptions, str | None, TrainingRecipe, list[str]]:
    """Return (the doctor's options, the task or None, the recipe as a run reads it, the problems of both)."""
    if not any(word.partition("=")[0] in ("--config", "--task") for word in argv):
        recipe_options = {field.name for cls in TASKS.values() for field in dataclasses.fields(cls)}
        remedy = f"it belongs to a recipe: add --config FILE, or --task {' | '.join(TASKS)}"
        options = parse_recipe(DoctorOptions, argv, prog=PROG, tool=True, hints=dict.fromkeys(recipe_options, remedy))
        return options, None, read_recipe(TrainingRecipe, options.flags_given(StrategyOptions), tool=True)[0], []
    task, joined = join_with_recipe(DoctorOptions, argv, PROG)
    options, problems = read_recipe(joined, argv, prog=PROG, tool=True)
    recipe, recipe_problems = read_recipe(TASKS[task], options.flags_given(TASKS[task]), tool=True)
    problems += recipe_problems
    if problems:  # without "no ...", which may follow from a wrong name
        problems += [problem for problem in recipe.problems() if not problem.startswith("no ")]
    return options, task, recipe, problems


def make_report(
    options: DoctorOptions, task: str | None, recipe: TrainingRecipe, problems: list[str], shell: dict[str, str]
) -> DoctorReport:
    """Return the report on this machine and on the launch that the options describe. `shell`: the environment
    variables of the launch."""
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
