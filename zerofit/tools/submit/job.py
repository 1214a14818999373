"""What is to be run, on how many machines: the same for all schedulers."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from zerofit.launch.command import LaunchOptions, read_options
from zerofit.recipe.errors import UserError
from zerofit.recipe.parse import option_named, parse_recipe, take_words
from zerofit.recipe.paths import name_of_recipe
from zerofit.recipe.tasks import TASKS
from zerofit.strategy.named import find_strategies
from zerofit.tools.submit.submit_options import GRACE_S, SubmitOptions

# torch's agent kills processes that have not ended so long after the first one has
VARIABLES = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_S - 30)}
OF_THE_SCHEDULER = ("num_machines", "machine_rank", "main_process_ip", "dry_run")
NAME_LENGTH = 40  # of 63 that DNS takes: Kubernetes appends its own


@dataclass(frozen=True)
class Job:
    """A run on some machines.

    Attributes:
        words: of `zerofit launch`: the recipe and all options.
        gpus: of one machine.
        program: starts zerofit there.
    """

    name: str
    words: list[str]
    nodes: int
    gpus: int
    program: list[str]

    @property
    def title(self) -> str:
        """For the file's first line."""
        given = self.of("strategy")
        strategy = Path(given).stem if given else "the default strategy"
        return f"{self.name}: {strategy} on {self.nodes} node{'s' if self.nodes > 1 else ''}"

    def of(self, name: str) -> str | None:
        """The value of an option of `zerofit launch`, as it was given."""
        taken, _ = take_words(LaunchOptions, self.words)
        values = [words[-1].partition("=")[2] or words[-1] for words in taken if option_named(words[0]) == name]
        return values[-1] if values else None

    @property
    def start(self) -> str:
        """The words that start `zerofit launch`, for a shell."""
        return shlex.join([*self.program, "launch"])

    def lines(self) -> list[str]:
        """The words for a shell, an option and its values on one line."""
        lines: list[list[str]] = []
        for word in self.words:
            if not lines or word.startswith("--"):
                lines.append([])
            lines[-1].append(word)
        return [shlex.join(words) for words in lines]


def make_job(options: SubmitOptions, words: list[str], default_program: list[str]) -> tuple[Job, list[str]]:
    """(the job, notes: what will go wrong in its launch).

    Args:
        words: the recipe with the options of `zerofit launch` and its own.

    Raises:
        UserError: there is no recipe; a number does not fit the machines; an option is the scheduler's.
    """
    nodes = options.nodes or 1
    taken, _ = take_words(LaunchOptions, words)
    refused = [name for name in OF_THE_SCHEDULER for given in taken if option_named(given[0]) == name]
    if refused:
        raise UserError(f"--{refused[0]} has no place in a job's file. Remove it; the number of machines is --nodes")
    if options.processes_per_node:
        if any(option_named(given[0]) == "num_processes" for given in taken):
            raise UserError("--num_processes and --processes_per_node: keep one of the two")
        words = [*words, "--num_processes", str(nodes * options.processes_per_node)]
    launch, program = read_options(words)
    processes = launch.num_processes or nodes * max(1, options.gpus_per_node)
    problems = []
    if processes % nodes:
        problems.append(f"num_processes = {processes} on {nodes} nodes: each has the same number")
    if launch.strategy == "single" and processes > 1:
        problems.append(f"strategy = single and {processes} processes: use ddp")
    if problems:
        raise UserError(problems)
    if launch.strategy:
        find_strategies([launch.strategy])
    notes = _refused(program, launch.strategy or ("ddp" if processes > 1 else "single"), processes, processes // nodes)
    started = shlex.split(options.program) if options.program else default_program
    return Job(options.name or _name_of(program), words, nodes, options.gpus_per_node, started), notes


def _refused(program: list[str], strategy: str, processes: int, local_processes: int) -> list[str]:
    """What a run of a task will say of its options and of its strategy, before it starts."""
    from zerofit.tools.rank_environment import strategy_of_a_launch  # it loads torch

    script, *words = program
    task = Path(script).stem
    try:
        if task in TASKS:
            strategy_of_a_launch(parse_recipe(TASKS[task], words), strategy, "--strategy", processes, local_processes)
    except UserError as error:
        return [f"the launch will refuse this: {problem}" for problem in error.problems]
    return []


def _name_of(program: list[str]) -> str:
    """Of the recipe, for DNS: letters, digits and -, a letter first."""
    script, *words = program
    recipe = words[words.index("--config") + 1] if "--config" in words[:-1] else None
    name = re.sub(r"[^a-z0-9]+", "-", name_of_recipe(recipe, Path(script).stem).lower())[:NAME_LENGTH].strip("-")
    return name if name[:1].isalpha() else f"run-{name}"
