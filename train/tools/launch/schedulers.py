"""Which machines a run has, as a scheduler or a cloud's console says in the environment of the command it starts.

* `WORLD_SIZE`, `RANK`, `MASTER_ADDR`, `MASTER_PORT`, one command on each machine, as in Alibaba's PAI-DLC
  (alibabacloud.com/help/en/pai/general-environment-variables). There `WORLD_SIZE` is the number of machines and `RANK`
  the machine's; torchrun, which starts processes, gives the same names to numbers of processes.
* Slurm, one task on each machine (`srun --ntasks-per-node=1`): `SLURM_STEP_NUM_NODES`, `SLURM_NODEID`,
  `SLURM_STEP_NODELIST` (slurm.schedmd.com/srun.html).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from train.recipe.errors import UserError

PORT = "29500"  # torchrun's own
NAMES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST")


@dataclass(frozen=True)
class Machines:
    """How many machines there are, which one this is, and where the first one listens.

    Attributes:
        source: in words, who says so.
    """

    count: int
    rank: int | None = 0
    address: str | None = None
    port: str | None = None
    source: str = "no scheduler has named others"


def read_machines(environment: Mapping[str, str]) -> Machines:
    """What the environment says; one machine where it says nothing.

    Raises:
        UserError: it is that of a process that torchrun or accelerate has started; Slurm has given the job several
            machines and starts this command on one, or several times on each.
    """
    if "LOCAL_RANK" in environment:
        raise UserError(
            f"LOCAL_RANK = {environment['LOCAL_RANK']!r} is set: a launcher has started this command, and zerofit "
            "launch is one. Start it by itself, or start train/TASK.py --strategy NAME under torchrun"
        )
    if "WORLD_SIZE" in environment:
        said = {name: environment[name] for name in NAMES if name in environment}
        shown = ", ".join(f"{name} = {value}" for name, value in said.items())
        source = f"{shown} (environment; WORLD_SIZE is read as the number of machines)"
        count, rank = _number(said, "WORLD_SIZE"), _number(said, "RANK") if "RANK" in said else None
        return Machines(count, rank, said.get("MASTER_ADDR"), said.get("MASTER_PORT"), source)
    return _of_slurm(environment)


def _of_slurm(environment: Mapping[str, str]) -> Machines:
    alone = Machines(1)
    if int(environment.get("SLURM_NNODES", "1")) == 1:
        return alone
    remedy = (
        "Start it once on each: srun --ntasks-per-node=1 zerofit launch ... (or use this machine: --num_machines 1)"
    )
    if "SLURM_STEP_NUM_NODES" not in environment:
        raise UserError(
            f"SLURM_NNODES = {environment['SLURM_NNODES']}, and this command runs on one machine. {remedy}"
        )
    said = {name: environment[name] for name in SLURM if name in environment}
    count = _number(said, "SLURM_STEP_NUM_NODES")
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", count))
    if tasks != count:
        raise UserError(f"SLURM_STEP_NUM_TASKS = {tasks} on {count} machines: each has one launcher. {remedy}")
    if count == 1:
        return alone
    source = ", ".join(f"{name} = {value}" for name, value in said.items()) + " (Slurm)"
    address = environment.get("MASTER_ADDR") or first_host(said.get("SLURM_STEP_NODELIST", ""))
    return Machines(count, _number(said, "SLURM_NODEID"), address, environment.get("MASTER_PORT"), source)


def first_host(nodes: str) -> str | None:
    """The first machine of a Slurm list: `gpu01` of `gpu[01-04,07],other`; None where the list is empty."""
    found = re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[\]]*))?", nodes)
    return None if found is None else "".join(part or "" for part in found.groups())


def _number(said: Mapping[str, str], name: str) -> int:
    text = said.get(name, "")
    if not text.isdigit():
        raise UserError(
            f"{name} = {text!r} in the environment: expected a number. Set --num_machines and --machine_rank"
        )
    return int(text)
