"""`zerofit launch`: start a run on all accelerators and machines by `accelerate launch`, whose command line it prints.

    zerofit launch recipes/clm/stdlib-gpt2.yaml
    zerofit launch --strategy zero2 train/clm.py --config recipes/clm/stdlib-gpt2.yaml --learning_rate 1e-4

There is one process for each accelerator of all machines. The machines are those that a scheduler or a cloud's console
has named.
"""

import dataclasses
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from zerofit.launch.exit_code import ExitCode, find_folder
from zerofit.launch.machines import GENERIC, NODE_RANK_VARIABLES, SCHEDULERS, Machines, launcher_options, read_machines
from zerofit.launch.rendezvous import RENDEZVOUS_LIMIT_S, RENDEZVOUS_LIMIT_VARIABLE
from zerofit.launch.supervisor import Supervisor
from zerofit.recipe.base import Recipe, option
from zerofit.recipe.errors import UserError, did_you_mean
from zerofit.recipe.files import counted, display_path, nearest_recipe, recipe_file, script
from zerofit.recipe.parse import flag_value, option_named, parse_recipe, take_words, wants_help
from zerofit.recipe.tasks import TASKS, task_of_recipe
from zerofit.strategy.gpus import check_devices, num_devices
from zerofit.strategy.launch import find_strategies

PROGRAM_HINT = "Name a recipe, e.g. recipes/clm/NAME.yaml, or a program, e.g. train/clm.py --config FILE"


@dataclass
class LaunchOptions(Recipe):
    """How a run is started; options after the recipe or the program are the recipe's (python train/TASK.py --help)"""

    task: str | None = option(None, "The task; by default the name of the recipe's folder.", choices=tuple(TASKS))
    strategy: str | None = option(
        None, "A name in accelerate_configs/, or a .yaml file; by default ddp, or single for one process."
    )
    num_processes: int | None = option(
        None, "Processes of all machines together; by default one for each accelerator.", positive=True
    )
    num_machines: int | None = option(
        None, "Machines; by default from the scheduler (WORLD_SIZE, Slurm), else 1.", positive=True
    )
    machine_rank: int | None = option(None, "This machine's number, from 0; by default from the scheduler.", minimum=0)
    main_process_ip: str | None = option(None, "Address of machine 0; by default from the scheduler.")
    main_process_port: int | None = option(
        None,
        "Port of machine 0; by default from the scheduler, else 29500; on one machine any free one (0).",
        minimum=0,
    )
    rendezvous_minutes: float = option(
        RENDEZVOUS_LIMIT_S / 60,
        "Machines, and then their ranks, wait this long for one that gives no sign of life.",
        positive=True,
    )
    max_restarts: int = option(
        0,
        "Start the processes of all machines again from the last checkpoint, at most this many times, after one has "
        "crashed or was killed; not after a mistake, an anomaly, out of memory, or two failures at the same update.",
        minimum=0,
    )
    dry_run: bool = option(False, "Print the command line, and do not run it.")


def main(argv: list[str]) -> int:
    """Print the devices, the machines and the command line, and run it. Returns the exit code of the run. Raises
    UserError: a mistake in the options, or in the variables of a scheduler."""
    is_launch = not wants_help(argv) and "--dry_run" not in argv
    with Supervisor(exit_code_of(argv) if is_launch else None) as supervisor:
        options, program = read_options(argv)
        words = [*choose_launcher_options(options, program), *program]
        if options.dry_run:
            return 0
        environment = {**os.environ, RENDEZVOUS_LIMIT_VARIABLE: f"{60 * options.rendezvous_minutes:g}"}
        for name in os.environ:
            if name in SCHEDULERS[GENERIC] or name.startswith("PET_"):  # torchrun gives these another meaning
                del environment[name]
        programs = str(Path(sys.executable).parent)
        path = environment.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):  # DeepSpeed builds with the ninja of this Python
            environment["PATH"] = os.pathsep.join((programs, path))
        return supervisor.run(words, environment)


def exit_code_of(argv: list[str]) -> ExitCode:
    """Return the record of the run's exit code before the command line is checked: `argv` may have mistakes."""
    _, words = take_words(LaunchOptions, argv)
    try:
        file, *options = program_of(words, flag_value(argv, "task"))
    except UserError:  # `read_options` reports it
        file = "clm.py"
        options = words
    number = next((os.environ[name] for name in NODE_RANK_VARIABLES if name in os.environ), "0")
    task = Path(file).stem
    folder = find_folder(task if task in TASKS else "clm", options)
    return ExitCode(folder, {"RANK": flag_value(argv, "machine_rank") or number})


def choose_launcher_options(options: LaunchOptions, program: list[str]) -> list[str]:
    """Choose the options of `accelerate launch`. Prints them, the devices and the machines. Raises UserError: options
    or scheduler contradict each other."""
    machines = choose_machines(options)
    check_devices()
    devices = num_devices()
    processes = options.num_processes or max(1, devices) * machines.count
    if processes % machines.count:
        raise UserError(
            f"--num_processes {processes} on {machines.count} machines: each has the same number. Use "
            f"--num_processes {machines.count * max(1, processes // machines.count)}"
        )
    strategy = options.strategy or ("ddp" if processes > 1 else "single")
    if strategy == "single" and processes > 1:
        raise UserError(f"--strategy single and {processes} processes: use ddp, or --num_processes 1")
    words = launcher_options(find_strategies([strategy])[strategy], processes, machines, options.main_process_port)
    if options.max_restarts:
        if processes == 1:
            raise UserError(
                f"--max_restarts {options.max_restarts} with one process: it is for several. Start the same command "
                "again, which resumes (docs/resume.md)"
            )
        words += ["--max_restarts", str(options.max_restarts)]
    if machines.count > 1:
        words += ["--rdzv_conf", f"timeout={60 * options.rendezvous_minutes:.0f}"]
    devices_text = f"{devices} on this machine" if devices else "no accelerator (more processes: --num_processes N)"
    machines_text = f", {machines.count} machines" if machines.count > 1 else ""
    print(f"devices   {devices_text}{machines_text}: {counted(processes, 'process')}")
    print(f"machines  {machines.count}: {machines.source}")
    print(shlex.join(["accelerate", "launch", *words, *program]), flush=True)
    return words


def read_options(argv: list[str]) -> tuple[LaunchOptions, list[str]]:
    """Return (options of this command, the program and its options). The former may come before and after the program.
    Raises UserError: there is no recipe and no program; all that parse_recipe raises."""
    launch_words, program_words = take_words(LaunchOptions, argv)
    if wants_help(argv):
        launch_words.append("--help")
    options = parse_recipe(LaunchOptions, launch_words, prog="zerofit launch RECIPE|PROGRAM", tool=True)
    return options, program_of(program_words, options.task)


def program_of(words: list[str], task: str | None = None) -> list[str]:
    """Return [train/TASK.py, its options ...] for a recipe or a program with options, or for `--config RECIPE`. Raises
    UserError: there is no such file, or the task is unknown. `task`: by default the name of the recipe's folder."""
    if not words:
        raise UserError(f"nothing to train. {PROGRAM_HINT}")
    first, *options = words
    if task is not None and (first.endswith(".py") or first in TASKS):
        raise UserError(f"--task {task} and {first}: name one of them")
    if first in TASKS:
        return [display_path(script(first)), *options]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UserError(f"{first!r}: there is no such file. {PROGRAM_HINT}")
        return words
    if not first.startswith("--"):
        words = ["--config", *words]
    elif task is not None:
        return [display_path(script(task)), *words]
    elif "--config" not in words[:-1]:
        names = [f"--{field.name}" for field in dataclasses.fields(LaunchOptions)]
        remedy = did_you_mean(f"--{option_named(first)}", names, PROGRAM_HINT)
        raise UserError(f"{first} is where a recipe or a program was expected. {remedy}")
    place = words.index("--config") + 1
    recipe = recipe_file(words[place])
    if not Path(recipe).is_file():
        close = nearest_recipe(recipe)
        raise UserError(f"{recipe!r}: there is no such recipe. {f'Did you mean {close}?' if close else PROGRAM_HINT}")
    task = task or task_of_recipe(recipe)
    if task is None:
        raise UserError(f"{recipe!r} does not say the task: its folder is not one of {', '.join(TASKS)}. Use --task")
    return [display_path(script(task)), *words[:place], recipe, *words[place + 1 :]]


def choose_machines(options: LaunchOptions) -> Machines:
    """Return the machines that the options name, else the environment. Raises UserError: the port is wrong; of several
    machines, the number of this one or the address of the first is missing or wrong."""
    machines = read_machines(os.environ, options.num_machines)
    rank = machines.rank if options.machine_rank is None else options.machine_rank
    machines = dataclasses.replace(machines, rank=rank, address=options.main_process_ip or machines.address)
    needed = {"--machine_rank N": machines.rank, "--main_process_ip": machines.address}
    missing = [option for option, value in needed.items() if value is None and machines.count > 1]
    described = f"{counted(machines.count, 'machine')} ({machines.source})"
    problems = [f"{described}: set {' and '.join(missing)} as well"] if missing else []
    if machines.rank is not None and machines.rank >= machines.count:
        remedy = f"they are 0 to {machines.count - 1}" if machines.count > 1 else "set --num_machines as well"
        problems.append(f"machine_rank {machines.rank} of {described}: {remedy}")
    port = machines.port if options.main_process_port is None else str(options.main_process_port)
    min_port = 0 if machines.count == 1 else 1  # 0 is any free port, which other machines would not know
    if port is not None and not (port.isdigit() and min_port <= int(port) < 2**16):
        problems.append(f"port {port} of machine 0: expected {min_port} to 65535. Set --main_process_port")
    if problems:
        raise UserError(problems)
    return machines
