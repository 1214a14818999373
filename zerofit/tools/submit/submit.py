"""`zerofit submit`: the file with which a scheduler runs a recipe on several machines, and starts it again.

    zerofit submit slurm recipes/clm/llama2-7b-continual.yaml --strategy zero3 --nodes 2 --site site.sh > job.sh
    zerofit submit jobset recipes/clm/llama2-7b-continual.yaml --strategy zero3 --nodes 2 --claim data > job.yaml

The file is complete, commented and yours to change. Nothing is started without --run.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import EXIT_USER_ERROR, UserError
from zerofit.recipe.help import wants_help
from zerofit.recipe.parse import parse_recipe, take_words
from zerofit.tools.submit import requeue
from zerofit.tools.submit.job import Job, make_job
from zerofit.tools.submit.schedulers import jobset, skypilot_notes, skypilot_task, slurm_script, trainjob
from zerofit.tools.submit.submit_options import KubernetesOptions, SkyPilotOptions, SlurmOptions, SubmitOptions


@dataclass(frozen=True)
class Scheduler:
    """A scheduler: its options, what writes its file, and the command that takes it."""

    options: type[SubmitOptions]
    write: Callable[[Job, Any], str]
    command: tuple[str, ...]
    ending: str = ".yaml"
    program: Callable[[], list[str]] = lambda: ["zerofit"]
    notes: Callable[[Job], list[str]] = lambda job: []


def _own_program() -> list[str]:
    """This environment's `zerofit`, relative to the current folder, where a job of Slurm starts, if it lies below."""
    program = Path(sys.executable).parent / "zerofit"
    if not program.is_file():
        return [sys.executable, "-m", "zerofit.cli"]
    return [str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)]


SCHEDULERS = {
    "slurm": Scheduler(SlurmOptions, slurm_script, ("sbatch",), ".sh", _own_program),
    "trainjob": Scheduler(KubernetesOptions, trainjob, ("kubectl", "apply", "-f")),
    "jobset": Scheduler(KubernetesOptions, jobset, ("kubectl", "apply", "-f")),
    "skypilot": Scheduler(
        SkyPilotOptions,
        skypilot_task,
        ("sky", "jobs", "launch", "--yes"),
        program=lambda: [".venv/bin/zerofit"],  # of `make setup`
        notes=skypilot_notes,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Print the file, or write it and hand it to the scheduler. Returns the exit code.

    Raises:
        UserError: a mistake in the options; the scheduler's program is not installed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        if not argv:
            return EXIT_USER_ERROR
        raise SystemExit(0)
    kind, *words = argv
    if kind == "requeue":
        return requeue.main(words)
    if kind not in SCHEDULERS:
        raise UserError(f"{kind!r}: there is no such scheduler. Use zerofit submit {', '.join(SCHEDULERS)}")
    scheduler = SCHEDULERS[kind]
    options, words = read_options(kind, words)
    if options.plan:
        from zerofit.tools.submit.planned import planned_words  # it loads torch

        nodes, words = planned_words(options, words)
        options.adopt("nodes", nodes, "--plan")
    job, notes = make_job(options, words, scheduler.program())
    text = scheduler.write(job, options)
    if options.run and notes:
        raise UserError(notes)
    for note in [*notes, *scheduler.notes(job)]:
        print(f"note: {note}", file=sys.stderr)
    if not options.output and not options.run:
        print(text, end="")
        return 0
    file = Path(options.output or f"{job.name}{scheduler.ending}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"output = {str(file)!r}: {error.strerror}") from None
    print(f"written   {file}", file=sys.stderr, flush=True)
    return _run([*scheduler.command, str(file)]) if options.run else 0


def read_options(kind: str, words: list[str]) -> tuple[SubmitOptions, list[str]]:
    """(the options of a scheduler's file, the other words: the recipe, and the options of its launch)."""
    cls = SCHEDULERS[kind].options
    taken, rest = take_words(cls, words)
    ours = [word for given in taken for word in given]
    if wants_help(words):
        ours += [word for word in words if word.startswith("--help")] or ["--help"]
    return parse_recipe(cls, ours, prog=f"zerofit submit {kind} RECIPE", tool=True), rest


def _run(command: list[str]) -> int:
    if not shutil.which(command[0]):
        raise UserError(f"{command[0]} is not installed here. Where it is, type: {' '.join(command)}")
    return subprocess.run(command).returncode


def _usage() -> str:
    lines = [f"  {name:<10}{scheduler.options.__doc__}" for name, scheduler in SCHEDULERS.items()]
    return "\n".join(
        [
            "usage: zerofit submit SCHEDULER RECIPE --strategy NAME --nodes N [options]",
            "",
            *lines,
            "",
            "`zerofit submit SCHEDULER --help` lists its options. Others are those of",
            "zerofit launch and of the recipe.",
        ]
    )
