"""The machines of a run, from the environment variables that a scheduler or a cloud's console sets.

* `WORLD_SIZE`, `RANK`, `MASTER_ADDR`, `MASTER_PORT`, one command on each machine, as in Alibaba's PAI-DLC
  (alibabacloud.com/help/en/pai/general-environment-variables). There `WORLD_SIZE` is the number of machines and `RANK`
  the number of the machine; torchrun uses the same names for numbers of processes.
* Slurm, one task on each machine (`srun --ntasks-per-node=1`): `SLURM_STEP_NUM_NODES`, `SLURM_NODEID`,
  `SLURM_STEP_NODELIST` (slurm.schedmd.com/srun.html).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zerofit.recipe.errors import UserError

PORT = "29500"  # torchrun's default
NAMES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST")


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


def read_machines(environment: Mapping[str, str]) -> Machines:
    """The machines from the environment; one machine where it names none.

    Raises:
        UserError: torchrun or accelerate has started this process; Slurm has given the job several machines, and
            starts this command on one of them only, or several times on each.
    """
    if "LOCAL_RANK" in environment:
        raise UserError(
            f"LOCAL_RANK = {environment['LOCAL_RANK']!r} is set: a launcher has started this command, and zerofit "
            "launch is a launcher too. Start it directly, or start train/TASK.py --strategy NAME under torchrun"
        )
    if "WORLD_SIZE" in environment:
        variables = {name: environment[name] for name in NAMES if name in environment}
        shown = ", ".join(f"{name} = {value}" for name, value in variables.items())
        source = f"{shown} (environment; WORLD_SIZE is read as the number of machines)"
        count, rank = _number(variables, "WORLD_SIZE"), _number(variables, "RANK") if "RANK" in variables else None
        return Machines(count, rank, variables.get("MASTER_ADDR"), variables.get("MASTER_PORT"), source)
    return _of_slurm(environment)


def _of_slurm(environment: Mapping[str, str]) -> Machines:
    one_machine = Machines(1)
    if int(environment.get("SLURM_NNODES", "1")) == 1:
        return one_machine
    remedy = (
        "Start it once on each: srun --ntasks-per-node=1 zerofit launch ... (or use this machine: --num_machines 1)"
    )
    if "SLURM_STEP_NUM_NODES" not in environment:
        raise UserError(
            f"SLURM_NNODES = {environment['SLURM_NNODES']}, and this command runs on one of them. {remedy}"
        )
    variables = {name: environment[name] for name in SLURM if name in environment}
    count = _number(variables, "SLURM_STEP_NUM_NODES")
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", count))
    if tasks != count:
        raise UserError(f"SLURM_STEP_NUM_TASKS = {tasks} on {count} machines: each needs one launcher. {remedy}")
    if count == 1:
        return one_machine
    source = ", ".join(f"{name} = {value}" for name, value in variables.items()) + " (Slurm)"
    address = environment.get("MASTER_ADDR") or first_host(variables.get("SLURM_STEP_NODELIST", ""))
    return Machines(count, _number(variables, "SLURM_NODEID"), address, environment.get("MASTER_PORT"), source)


def first_host(nodes: str) -> str | None:
    """The first machine of a Slurm list: `gpu01` of `gpu[01-04,07],other`; None where the list is empty."""
    match = re.match(r"([^,\[\]]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[\]]*))?", nodes)
    return None if match is None else "".join(part or "" for part in match.groups())


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if not text.isdigit():
        raise UserError(
            f"{name} = {text!r} in the environment: expected a number. Set --num_machines and --machine_rank"
        )
    return int(text)
