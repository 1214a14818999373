"""The machines of a run, from the environment variables that schedulers and clouds set.

One command runs on each machine; a scheduler says how many there are, which one this is, and where the first one is.
docs/clusters.md has the commands. `WORLD_SIZE` and `RANK`, as Alibaba's PAI-DLC and Kubeflow's PyTorchJob set them,
count machines; where another scheduler has named these, `WORLD_SIZE` may also count processes, as torchrun has it.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from zerofit.recipe.errors import UserError

PORT = "29500"  # torchrun's default
FIRST_PORT, PORTS = 20_000, 12_000  # derived ones: below those that Linux gives to connections
THIS_MACHINE = "or use this machine alone: --num_machines 1"
GENERIC = "environment; WORLD_SIZE is read as the number of machines"
# {scheduler: variables of the number of machines, of this one's number, of the first one's address (it may begin a
# list), of its port, and of what tells a job from others on the same machines}
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
NAMED = [name for name in SCHEDULERS if name != GENERIC]
INDEX = (
    "JOB_COMPLETION_INDEX"  # kubernetes.io/docs/tasks/job: this machine's number; how many there are no variable says
)
RANK_VARIABLES = (*(SCHEDULERS[name][1] for name in NAMED), INDEX, SCHEDULERS[GENERIC][1])


@dataclass(frozen=True)
class Machines:
    """The number of machines, the number of this one, and the address of the first."""

    count: int
    rank: int | None = 0
    address: str | None = None
    port: str | None = None
    source: str = "no scheduler names others"


ONE_MACHINE = Machines(1)


def read_machines(environment: Mapping[str, str]) -> Machines:
    """The machines from the environment; one machine where it names none. Raises UserError: torchrun or accelerate has
    started this process; a scheduler starts this command on one of several machines only, or several times on each;
    two schedulers contradict each other; a number is none."""
    if "LOCAL_RANK" in environment:
        raise UserError(
            f"LOCAL_RANK = {environment['LOCAL_RANK']!r} is set: a launcher has started this command, and zerofit "
            "launch is a launcher too. Start it directly, or start train/TASK.py --strategy NAME under torchrun"
        )
    _check_tasks(environment)
    named = [machines for name in NAMED if (machines := _read(name, environment)) is not None]
    generic = _read(GENERIC, environment)
    contradicting = [
        (one, other) for one, other in pairwise(named) if (one.rank, one.count) != (other.rank, other.count)
    ]
    if named and generic and (generic.rank not in (None, named[0].rank) or generic.count % named[0].count):
        contradicting.append((named[0], generic))
    for one, other in contradicting:
        raise UserError(
            f"two schedulers contradict each other: {one.source}, and {other.source}. Unset the variables of one, or "
            "set --num_machines, --machine_rank and --main_process_ip"
        )
    machines = named[0] if named else generic
    if machines is None and INDEX in environment:
        raise UserError(
            f"{INDEX} = {environment[INDEX]}: this is one pod of an indexed job, and nothing says how many there are. "
            f"Set --num_machines N and --main_process_ip (the name of pod 0), {THIS_MACHINE}"
        )
    if machines is None or machines.count == 1:
        return Machines(1)
    return replace(machines, address=machines.address or environment.get("MASTER_ADDR"))


def _read(name: str, environment: Mapping[str, str]) -> Machines | None:
    """The machines that a scheduler names; None: it has not started this process, or Slurm has on one machine only."""
    count, rank, address, port, job = variables = SCHEDULERS[name]
    if count not in environment or (
        name == "Slurm" and "1" in (environment.get("SLURM_NNODES", "1"), environment[count])
    ):
        return None
    shown = (f"{each} = {' '.join(environment[each].split())}" for each in variables[:4] if each in environment)
    number = number_in(environment, rank) if rank in environment else None
    own_port = environment.get(port)
    if not own_port and environment.get(job):  # one that two jobs on the same machines do not share
        own_port = str(FIRST_PORT + zlib.crc32(environment[job].encode()) % PORTS)
    first = first_host(environment.get(address, ""))
    if name == "Slurm":
        first = environment.get("MASTER_ADDR") or first
    return Machines(number_in(environment, count), number, first, own_port or None, f"{', '.join(shown)} ({name})")


def _check_tasks(environment: Mapping[str, str]) -> None:
    """Check that Slurm or OpenMPI starts this command once on each machine. Raises UserError: it does not."""
    if environment.get("SLURM_NNODES", "1") != "1":
        remedy = f"Start it once on each: srun --ntasks-per-node=1 zerofit launch ... ({THIS_MACHINE})"
        count, tasks = environment.get("SLURM_STEP_NUM_NODES"), environment.get("SLURM_STEP_NUM_TASKS")
        if count is None:
            raise UserError(
                f"SLURM_NNODES = {environment['SLURM_NNODES']}, and this command runs on one of them. {remedy}"
            )
        if tasks not in (None, count):
            raise UserError(f"SLURM_STEP_NUM_TASKS = {tasks} on {count} machines: each needs one launcher. {remedy}")
    local = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if "OMPI_COMM_WORLD_SIZE" in environment and local != "1":
        raise UserError(
            f"OMPI_COMM_WORLD_LOCAL_SIZE = {local}: each machine needs one launcher. Start one on each, {THIS_MACHINE}"
        )


def first_host(machines: str) -> str | None:
    """The first machine of a list: of lines, or as Slurm writes it, `gpu01` of `gpu[01-04,07],other`."""
    first = next(iter(machines.split()), None)
    match = re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[\]]*))?", first or "")
    return first if match is None else "".join(part or "" for part in match.groups())


def given_machines(count: int, environment: Mapping[str, str]) -> Machines:
    """So many machines; the number of this one is that of whatever scheduler names it."""
    name = next((name for name in RANK_VARIABLES if name in environment), None)
    if count == 1 or name is None:
        return Machines(count, 0 if count == 1 else None, source="--num_machines")
    rank = number_in(environment, name)
    return Machines(count, rank, source=f"--num_machines, {name} = {rank}")


def number_in(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise UserError(
            f"{name} = {text!r} in the environment: expected a number. Set --num_machines and --machine_rank"
        )
    return int(text)
