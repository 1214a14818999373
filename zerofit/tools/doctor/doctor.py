r"""`zerofit doctor`: what holds, who set it, what contradicts it or has no effect, and whether it can run here.

    zerofit doctor
    zerofit doctor --strategy zero3_offload
    zerofit doctor --config recipes/clm/stdlib-gpt2.yaml --strategy zero2 --num_processes 2

Nothing is launched or downloaded: no GPU, data or weights are needed. accelerate's own launcher is followed up to the
point where it starts processes; then the recipe and the strategy pair are resolved as a run resolves them.
"""

import contextlib
import dataclasses
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from zerofit.recipe.fields import option
from zerofit.recipe.files import read_text
from zerofit.recipe.options import StrategyOptions
from zerofit.recipe.parse import parse_recipe, read_recipe
from zerofit.recipe.places import script
from zerofit.recipe.tasks import TASKS
from zerofit.record.terminal import say, screen_width
from zerofit.tools.doctor.doctor_report import ERROR, DoctorReport, shown_value
from zerofit.tools.rank_environment import environment_replaced
from zerofit.tools.tool_recipe import join_with_recipe


@dataclass
class DoctorOptions(StrategyOptions):
    """What holds, who set it, and whether it can run here; options of the training recipe are looked at as well"""

    task: str | None = option(
        None,
        "The task; by default the name of the recipe's folder.",
        choices=("clm", "cls", "seq2seq"),
        common=True,
    )
    strategy: str | None = option(
        None, "A name in accelerate_configs/, or a .yaml file; else accelerate's own, ddp or single.", common=True
    )
    deepspeed_config: str | None = option(None, "A DeepSpeed JSON without a YAML, as under torchrun.")
    num_processes: int | None = option(
        None, "Processes of all machines; else the YAML's, or one for each accelerator.", positive=True, common=True
    )
    num_machines: int | None = option(None, "Machines; by default those of the YAML, else 1.", positive=True)


PROG = "zerofit doctor"


def main(argv: list[str] | None = None) -> int:
    """Print the report. Returns 0; 1: it cannot run here; 2: bad input."""
    options, task, problems = read_options(list(argv or []))
    shell = dict(os.environ)
    offline = environment_replaced(shell | {"HF_HUB_OFFLINE": "1"})
    with offline, contextlib.redirect_stdout(io.StringIO()):  # libraries talk
        report = make_report(options, task, problems, shell)
    say(report.for_terminal(screen_width()))
    return report.exit_code


def read_options(argv: list[str]) -> tuple[DoctorOptions, str | None, list[str]]:
    """(options, with those of the recipe where a task is named; the task; what is wrong in the recipe).

    Raises:
        UserError: the recipe's file cannot be read, or its task is unknown; without a recipe, any problem.
    """
    named = any(word.partition("=")[0] in ("--config", "--task") for word in argv)
    if not named:
        return parse_recipe(DoctorOptions, argv, prog=PROG, tool=True, hints=_hints()), None, []
    task, joined = join_with_recipe(DoctorOptions, argv, PROG)
    options, problems = read_recipe(joined, argv, prog=PROG, tool=True)
    problems = [*_launchers_options(options), *problems]
    if problems:  # what follows from a wrong name is not said again
        more = (problem for problem in options.problems() if not problem.startswith("no "))
        problems += [problem for problem in more if problem not in problems]
    return options, task, problems


def _launchers_options(options: DoctorOptions) -> list[str]:
    """Options of the doctor that stand in a recipe, where a run would refuse them; they have their defaults now."""
    config, problems = options.source("config"), []
    if config is None:
        return problems
    content = yaml.safe_load(read_text(Path(config)))
    for name in (field.name for field in dataclasses.fields(DoctorOptions)):
        if content.get(name) is not None:
            given = f"{config}: {name} = {content[name]!r}"
            problems.append(f"{given}: a recipe says what is trained, and not how. Use the flag --{name}")
            if not (options.source(name) or "").startswith("--"):
                options.reset_option(name)
    return problems


def _hints() -> dict[str, str]:
    """{option of a recipe: what to say as well}, where no recipe is named."""
    names = {field.name for cls in TASKS.values() for field in dataclasses.fields(cls)}
    own = {field.name for field in dataclasses.fields(DoctorOptions)}
    return dict.fromkeys(names - own, f"it belongs to a recipe: add --config FILE, or --task {' | '.join(TASKS)}")


def make_report(options: DoctorOptions, task: str | None, problems: list[str], shell: dict[str, str]) -> DoctorReport:
    """The report on this machine, and on the launch that the options name.

    Args:
        shell: the environment in which the launch would be typed.
    """
    report = DoctorReport(bad_input=bool(problems))
    report.add(ERROR, problems)
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: a library that it needs
        report.add(ERROR, [f"torch cannot be imported: {error}. Run make setup"])
        return report

    from zerofit.tools.doctor.examine import Examination

    examination = Examination(options, task, report, shell, is_sound=not problems)
    report.findings += examination.machines()
    if task or options.strategy or options.deepspeed_config:
        report.examined = "this recipe" if task else "this strategy"
        examination.of_launch(_program(options, task))
    examination.of_machine()
    return report


def _program(options: DoctorOptions, task: str | None) -> list[str]:
    """The program and its options, for the launch line."""
    if task is None:
        return ["train/TASK.py", "--config", "RECIPE"]
    folder, program = Path.cwd(), script(task)
    words = [str(program.relative_to(folder) if program.is_relative_to(folder) else program)]
    config = options.source("config")
    words += ["--config", config] if config else []
    own = {"task", "strategy", "num_processes", "num_machines"}
    for name, value in options.to_dict().items():
        if name not in own and (options.source(name) or "").startswith("--"):
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *(() if value is True else map(shown_value, values))]
    for name in sorted(options.unset):
        words += [f"--{name}", "null"]
    return words


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
