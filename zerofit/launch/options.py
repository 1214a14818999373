"""The options of `zerofit launch`."""

from dataclasses import dataclass

from zerofit.recipe.fields import option
from zerofit.recipe.options import AnomalyOptions, Recipe
from zerofit.recipe.tasks import TASKS


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
        AnomalyOptions.rendezvous_minutes,
        "Machines, and then their ranks, wait this long for one that gives no sign of life.",
        positive=True,
    )
    max_restarts: int = option(
        0,
        "Start the processes of all machines again from the last checkpoint, at most so many times, after one has "
        "crashed or was killed; not after a mistake, an anomaly, out of memory, or two failures at the same update.",
        minimum=0,
    )
    dry_run: bool = option(False, "Print the command line, and do not run it.")
