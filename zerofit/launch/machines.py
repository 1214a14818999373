"""The machines of a run, and the command line that starts its ranks there.

The machines come from the environment variables that schedulers and clouds set. One command runs on each machine; a
scheduler says how many machines there are, which one this is, and where the first one is. docs/clusters.md has the
commands. `WORLD_SIZE` and `RANK`, as Alibaba's PAI-DLC and Kubeflow's PyTorchJob set them, count machines; next to the
variables of another scheduler, `WORLD_SIZE` may also count processes, as under torchrun.
"""

import re
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import PACKAGE_FOLDER

DEFAULT_PORT = "29500"  # torchrun's default
# Ports that are derived from a job's name lie below those that Linux gives to connections.
FIRST_DERIVED_PORT = 20_000
NUM_DERIVED_PORTS = 12_000
THIS_MACHINE = "or use this machine alone: --num_machines 1"
MACHINES_REMEDY = "Set --num_machines and --machine_rank"
RANK_REMEDY = "Unset it, since a launcher sets it"
GENERIC = "environment; WORLD_SIZE is read as the number of machines"
# {scheduler: its variables of the number of machines, of this machine's number, of the first machine's address (which
# may begin a list), of that machine's port, and of the job's name}
SCHEDULERS = {
    # slurm.schedmd.com/srun.html: one task on each machine, `srun --ntasks-per-node=1`
    "Slurm": ("SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST", "MASTER_PORT", "SLURM_JOB_ID"),
    # kubeflow.org/docs/components/trainer: torchrun's own variables
    "Kubeflow Trainer": ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", ""),
    # docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
    "SkyPilot": ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "MASTER_PORT", "SKYPILOT_TASK_ID"),
    # dstack.ai/docs/concepts/tasks, distributed tasks
    "dstack": ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", "MASTER_PORT", "DSTACK_RUN_NAME"),
    # docs.open-mpi.org, environment variables: one process on each machine, `mpirun --npernode 1`
    "OpenMPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE"),
    GENERIC: ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", ""),
}
SCHEDULER_NAMES = [name for name in SCHEDULERS if name != GENERIC]
# kubernetes.io/docs/tasks/job: the number of this machine; no variable has the number of machines.
INDEX = "JOB_COMPLETION_INDEX"
NODE_RANK_VARIABLES = (*(SCHEDULERS[name][1] for name in SCHEDULER_NAMES), INDEX, SCHEDULERS[GENERIC][1])


@dataclass(frozen=True)
class Machines:
    """The number of machines, the number of this one, and the address of the first."""

    count: int
    rank: int | None = 0
    address: str | None = None
    port: str | None = None
    source: str = "no scheduler names others"


ONE_MACHINE = Machines(1)


def number_in(
    environment: Mapping[str, str], name: str, remedy: str = RANK_REMEDY, *, default: int = 0, minimum: int = 0
) -> int:
    """Return the number in an environment variable. Raises UserError: it is not a number, or below `minimum`."""
    text = environment.get(name, str(default))
    with suppress(ValueError):
        if int(text) >= minimum:
            return int(text)
    raise UserError(f"{name} = {text!r} in the environment: expected a number, {minimum} or more. {remedy}")


def read_machines(environment: Mapping[str, str], count: int | None = None) -> Machines:
    """Return the machines that the environment names, else this machine alone. Raises UserError: torchrun or
    accelerate has started this process; a scheduler starts this command on one of several machines only, or several
    times on each; two schedulers contradict each other; a variable is not a number. `count`: --num_machines, with
    which the environment has only the number of this machine; None: it is not given."""
    if count is not None:
        name = next((name for name in NODE_RANK_VARIABLES if name in environment), None)
        if count == 1 or name is None:
            return Machines(count, 0 if count == 1 else None, source="--num_machines")
        rank = number_in(environment, name, MACHINES_REMEDY)
        return Machines(count, rank, source=f"--num_machines, {name} = {rank}")
    if "LOCAL_RANK" in environment:
        raise UserError(
            f"LOCAL_RANK = {environment['LOCAL_RANK']!r} is set: a launcher has started this command, and zerofit "
            "launch is a launcher too. Start it directly, or start train/TASK.py --strategy NAME under torchrun"
        )
    slurm_machines = environment.get("SLURM_NNODES", "1")
    if slurm_machines != "1":
        remedy = f"Start it once on each: srun --ntasks-per-node=1 zerofit launch ... ({THIS_MACHINE})"
        step_machines = environment.get("SLURM_STEP_NUM_NODES")
        tasks = environment.get("SLURM_STEP_NUM_TASKS", step_machines)
        if step_machines is None:
            raise UserError(f"SLURM_NNODES = {slurm_machines}, and this command runs on one of them. {remedy}")
        if tasks != step_machines:
            raise UserError(
                f"SLURM_STEP_NUM_TASKS = {tasks} on {step_machines} machines: each needs one launcher. {remedy}"
            )
    local = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if "OMPI_COMM_WORLD_SIZE" in environment and local != "1":
        raise UserError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE = {local}: each machine needs one launcher. Start one on each, {THIS_MACHINE}"
        )
    named = [machines for name in SCHEDULER_NAMES if (machines := _read(name, environment)) is not None]
    generic = _read(GENERIC, environment)
    machines = named[0] if named else generic
    contradicting = [each for each in named if (each.rank, each.count) != (named[0].rank, named[0].count)]
    if named and generic and (generic.rank not in (None, named[0].rank) or generic.count % named[0].count):
        contradicting.append(generic)
    if machines is not None and contradicting:
        raise UserError(
            f"two schedulers contradict each other: {machines.source}, and {contradicting[0].source}. Unset the "
            "variables of one, or set --num_machines, --machine_rank and --main_process_ip"
        )
    if machines is None and INDEX in environment:
        raise UserError(
            f"{INDEX} = {environment[INDEX]}: this is one pod of an indexed job, and nothing says how many there are. "
            f"Set --num_machines N and --main_process_ip (the name of pod 0), {THIS_MACHINE}"
        )
    if machines is None or machines.count == 1:
        return Machines(1)
    return replace(machines, address=machines.address or environment.get("MASTER_ADDR"))


def _read(name: str, environment: Mapping[str, str]) -> Machines | None:
    """Return the machines that a scheduler names; None: it names none, or it is Slurm and names this one only."""
    count, rank, address, port, job = variables = SCHEDULERS[name]
    if count not in environment:
        return None
    if name == "Slurm" and "1" in (environment.get("SLURM_NNODES", "1"), environment[count]):
        return None
    settings = [f"{each} = {' '.join(environment[each].split())}" for each in variables[:4] if each in environment]
    port_of_job = environment.get(port)
    if not port_of_job and environment.get(job):  # another job on the same machines derives another port
        port_of_job = str(FIRST_DERIVED_PORT + zlib.crc32(environment[job].encode()) % NUM_DERIVED_PORTS)
    # The variable is a list of lines, or a list as Slurm writes it: the first of `gpu[01-04,07],other` is `gpu01`.
    first = next(iter(environment.get(address, "").split()), None)
    if match := re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[\]]*))?", first or ""):
        first = "".join(filter(None, match.groups()))
    if name == "Slurm":
        first = environment.get("MASTER_ADDR") or first
    return Machines(
        number_in(environment, count, MACHINES_REMEDY, minimum=1),
        number_in(environment, rank, MACHINES_REMEDY) if rank in environment else None,
        first,
        port_of_job or None,
        f"{', '.join(settings)} ({name})",
    )


LAUNCH_COMMAND = (sys.executable, "-P", str(PACKAGE_FOLDER / "launch" / "supervisor.py"))  # `accelerate launch`


def launcher_options(
    config: Path, processes: int, machines: Machines = ONE_MACHINE, port: int | None = None
) -> list[str]:
    """Return the options of `accelerate launch` for a run, which override numbers in the YAML (`config`). `port`: by
    default that of the machines, or on one machine any free port."""
    words = ["--config_file", str(config), "--num_processes", str(processes)]
    words += ["--num_machines", str(machines.count), "--machine_rank", str(machines.rank)]
    if machines.count > 1:
        words += ["--main_process_ip", machines.address or ""]
    default = machines.port or DEFAULT_PORT if machines.count > 1 else "0"
    return [*words, "--main_process_port", default if port is None else str(port)]
