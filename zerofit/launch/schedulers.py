"""The machines of a run, from the environment variables that schedulers and clouds set.

One command runs on each machine; a scheduler says how many there are, which one this is, and where the first one is:

* Slurm (slurm.schedmd.com/srun.html): one task on each machine, `srun --ntasks-per-node=1`.
* Kubeflow Trainer (kubeflow.org/docs/components/trainer): torchrun's own variables, `PET_*`.
* SkyPilot (docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html).
* dstack (dstack.ai/docs/concepts/tasks, distributed tasks).
* OpenMPI (docs.open-mpi.org, environment variables): one process on each machine, `mpirun --npernode 1`.
* An indexed Kubernetes Job, and a JobSet of such: `JOB_COMPLETION_INDEX` (kubernetes.io/docs/tasks/job) names this
  machine; how many there are no variable says.
* `WORLD_SIZE`, `RANK`, `MASTER_ADDR`, `MASTER_PORT`, as Alibaba's PAI-DLC (alibabacloud.com/help/en/pai) and
  Kubeflow's PyTorchJob set them. `RANK` is the number of the machine. `WORLD_SIZE` is the number of machines; where
  another scheduler has told that, it may also be the number of processes, as torchrun has it.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NoReturn

from zerofit.recipe.errors import UserError

PORT = "29500"  # torchrun's default
FIRST_PORT, PORTS = 20_000, 12_000  # derived ones: below those that Linux gives to connections
INDEX = "JOB_COMPLETION_INDEX"
THIS_MACHINE = "or use this machine alone: --num_machines 1"


@dataclass(frozen=True)
class Machines:
    """The number of machines, the number of this one, and the address of the first.

    Attributes:
        source: where this comes from, in words.
    """

    count: int
    rank: int | None = 0
    address: str | None = None
    port: str | None = None
    source: str = "no scheduler names others"


@dataclass(frozen=True)
class Scheduler:
    """The names of a scheduler's variables.

    Attributes:
        port: may be missing.
        job: what tells this job from another one on the same machines; empty: nothing does.
        first: (text of `address`) -> the address of the first machine.
        local: counts the processes that were started on this machine.
    """

    name: str
    count: str
    rank: str
    address: str
    port: str = "MASTER_PORT"
    job: str = ""
    first: Callable[[str], str | None] = str.strip
    local: str = ""

    def read(self, environment: Mapping[str, str]) -> Machines | None:
        """None: it has not started this process."""
        if self.count not in environment:
            return None
        if environment.get(self.local, "1") != "1":
            raise UserError(
                f"{self.local} = {environment[self.local]}: each machine needs one launcher. Start one on each, "
                f"{THIS_MACHINE}"
            )
        used = (self.count, self.rank, self.address, self.port)
        shown = ", ".join(f"{name} = {' '.join(environment[name].split())}" for name in used if name in environment)
        rank = number_in(environment, self.rank) if self.rank in environment else None
        address = self.first(environment[self.address]) if self.address in environment else None
        port = environment.get(self.port) or self._port(environment)
        return Machines(number_in(environment, self.count), rank, address, port, f"{shown} ({self.name})")

    def _port(self, environment: Mapping[str, str]) -> str | None:
        """A port that two jobs on the same machines do not share; the same on all machines of a job."""
        job = environment.get(self.job)
        return None if not job else str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)


def first_host(nodes: str) -> str | None:
    """The first machine of a Slurm list: `gpu01` of `gpu[01-04,07],other`; None where the list is empty."""
    match = re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[\]]*))?", nodes)
    return None if match is None else "".join(part or "" for part in match.groups())


def _first_line(text: str) -> str | None:
    return next(iter(text.split()), None)


SLURM = Scheduler(
    "Slurm",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NODEID",
    "SLURM_STEP_NODELIST",
    job="SLURM_JOB_ID",
    first=first_host,
)
OTHERS = (
    Scheduler("Kubeflow Trainer", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    Scheduler(
        "SkyPilot",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NODE_IPS",
        job="SKYPILOT_TASK_ID",
        first=_first_line,
    ),
    Scheduler("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_MASTER_NODE_IP", job="DSTACK_RUN_NAME"),
    Scheduler(
        "OpenMPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "MASTER_ADDR",
        job="PMIX_NAMESPACE",
        local="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)
GENERIC = Scheduler(
    "environment; WORLD_SIZE is read as the number of machines", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"
)
RANK_VARIABLES = (SLURM.rank, *(each.rank for each in OTHERS), INDEX, GENERIC.rank)


def read_machines(environment: Mapping[str, str]) -> Machines:
    """The machines from the environment; one machine where it names none.

    Raises:
        UserError: torchrun or accelerate has started this process; a scheduler starts this command on one of several
            machines only, or several times on each; two schedulers contradict each other; a number is none.
    """
    if "LOCAL_RANK" in environment:
        raise UserError(
            f"LOCAL_RANK = {environment['LOCAL_RANK']!r} is set: a launcher has started this command, and zerofit "
            "launch is a launcher too. Start it directly, or start train/TASK.py --strategy NAME under torchrun"
        )
    found = (_of_slurm(environment), *(each.read(environment) for each in OTHERS))
    named, generic = [machines for machines in found if machines is not None], GENERIC.read(environment)
    for one, other in pairwise(named):
        if (one.rank, one.count) != (other.rank, other.count):
            _contradict(one, other)
    if named and generic and (generic.rank not in (None, named[0].rank) or generic.count % named[0].count):
        _contradict(named[0], generic)
    machines = named[0] if named else generic
    if machines is None and INDEX in environment:
        raise UserError(
            f"{INDEX} = {environment[INDEX]}: this is one pod of an indexed job, and nothing says how many there are. "
            f"Set --num_machines N and --main_process_ip (the name of pod 0), {THIS_MACHINE}"
        )
    if machines is None or machines.count == 1:
        return Machines(1)
    if machines.address is None:
        machines = replace(machines, address=environment.get("MASTER_ADDR"))
    return machines


def without_machines(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables that torchrun's agent or its processes would read in another sense."""
    generic = (GENERIC.count, GENERIC.rank, GENERIC.address, GENERIC.port)
    return {name: value for name, value in environment.items() if name not in generic and not name.startswith("PET_")}


def given_machines(count: int, environment: Mapping[str, str]) -> Machines:
    """So many machines; the number of this one is that of whatever scheduler names it."""
    name = next((name for name in RANK_VARIABLES if name in environment), None)
    if count == 1 or name is None:
        return Machines(count, 0 if count == 1 else None, source="--num_machines")
    rank = number_in(environment, name)
    return Machines(count, rank, source=f"--num_machines, {name} = {rank}")


def _contradict(one: Machines, other: Machines) -> NoReturn:
    raise UserError(
        f"two schedulers contradict each other: {one.source}, and {other.source}. Unset the variables of one, or set "
        "--num_machines, --machine_rank and --main_process_ip"
    )


def _of_slurm(environment: Mapping[str, str]) -> Machines | None:
    """None: Slurm has not given this job several machines."""
    if "SLURM_NNODES" not in environment or number_in(environment, "SLURM_NNODES") == 1:
        return None
    remedy = f"Start it once on each: srun --ntasks-per-node=1 zerofit launch ... ({THIS_MACHINE})"
    if SLURM.count not in environment:
        raise UserError(
            f"SLURM_NNODES = {environment['SLURM_NNODES']}, and this command runs on one of them. {remedy}"
        )
    machines = SLURM.read(environment)
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", machines.count))
    if tasks != machines.count:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS = {tasks} on {machines.count} machines: each needs one launcher. {remedy}"
        )
    return (
        None if machines.count == 1 else replace(machines, address=environment.get("MASTER_ADDR") or machines.address)
    )


def number_in(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise UserError(
            f"{name} = {text!r} in the environment: expected a number. Set --num_machines and --machine_rank"
        )
    return int(text)
