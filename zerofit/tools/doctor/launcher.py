"""What `accelerate launch` would do: its own code, up to the point where it starts processes."""

import argparse
import contextlib
import io
import logging
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch as utils

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.parsing import read_yaml
from zerofit.strategy.named import problems_of_yaml
from zerofit.tools.doctor.doctor_report import Finding, error, note, warning
from zerofit.tools.rank_environment import RANKS, environment_replaced, without_launcher

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES")
STANDARD = "standard"  # the launcher of several machines that this program is started with
NOBODY = "127.0.0.1"  # in place of machine 0, whose address is not known here


@dataclass
class ExaminedLaunch:
    """A launch that is only looked at.

    Attributes:
        config_file: the accelerate YAML; None: there is none.
        content: of the YAML.
        world_size, local_world_size, num_machines: processes of all machines, those of this one, machines.
        environment: variables of a process.
        sources: {num_processes, num_machines: who set it}.
        refused: by accelerate.
        devices: those that `gpu_ids` leaves; None: all.
        leftovers: variables of accelerate that an earlier launch has left in the shell, and that reach the processes.
    """

    config_file: str | None
    content: dict[str, Any] = field(default_factory=dict)
    world_size: int = 1
    local_world_size: int = 1
    num_machines: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    refused: bool = False
    devices: int | None = None
    leftovers: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)


Chosen = dict[str, tuple[int, str]]  # {num_processes, num_machines: (how many, who has chosen that)}


def look_at_torchrun(chosen: Chosen, shell: Mapping[str, str]) -> ExaminedLaunch:
    """A launch by torchrun, where the program's own command line names the DeepSpeed JSON."""
    launch = ExaminedLaunch(None, environment=dict(shell))
    _count(launch, chosen, 0)
    several = launch.num_machines > 1
    words = ["--nproc_per_node", str(launch.local_world_size), *(["--nnodes", str(launch.num_machines)] * several)]
    launch.command = ["torchrun", *words]
    return launch


def look_at_launch(config_file: Path, chosen: Chosen, num_devices: int, shell: Mapping[str, str]) -> ExaminedLaunch:
    """A launch by accelerate.

    Args:
        chosen: what overrides the YAML.
        num_devices: of this machine, where nobody says how many processes there are.
        shell: the environment in which the launch would be typed.

    Raises:
        UserError: the YAML cannot be read.
    """
    launch = ExaminedLaunch(str(config_file), _read(config_file))
    _count(launch, chosen, num_devices)
    words = ["--config_file", str(config_file), "--num_processes", str(launch.world_size)]
    if "num_machines" in chosen or launch.num_machines > 1:
        words += ["--num_machines", str(launch.num_machines), "--machine_rank", "0"]
    address = launch.content.get("main_process_ip")
    several = launch.num_machines > 1
    launch.command = ["accelerate", "launch", *words, *(["--main_process_ip", address or "MACHINE_0"] * several)]
    words += ["--main_process_ip", address or NOBODY] if several else []
    made, clean = {}, {name: value for name, value in without_launcher(shell).items() if name not in RANKS}
    with environment_replaced(clean | {"HF_HUB_OFFLINE": "1"}):
        try:
            made = _of_accelerate(launch, words)
        except (Exception, SystemExit) as refusal:  # whatever it is, the launch would end with it
            launch.refused = True
            what = f"accelerate launch refuses {config_file}: {_said(refusal)}"
            launch.findings.append(error(f"{what}. Name one of accelerate_configs/ with --strategy"))
    launch.environment = {**shell, **made}
    launch.findings += _leftovers(launch, shell, made)
    return launch


def _read(config_file: Path) -> dict[str, Any]:
    content = read_yaml(config_file) or {}
    if problems := problems_of_yaml(content, str(config_file)):
        raise UserError(problems)
    return content


def _count(launch: ExaminedLaunch, chosen: Chosen, num_devices: int) -> None:
    """How many processes and machines there are, and who says so."""
    file = launch.config_file or ""
    for name, field_name, default in (
        ("num_processes", "world_size", max(1, num_devices)),
        ("num_machines", "num_machines", 1),
    ):
        of_yaml = launch.content.get(name)
        of_file = (of_yaml, file) if isinstance(of_yaml, int) and of_yaml > 0 else (default, "default")
        value, launch.sources[name] = chosen.get(name, of_file)
        setattr(launch, field_name, value)
        if of_yaml not in (None, value) and launch.sources[name].startswith("--"):
            what = f"{file}: {name} = {of_yaml} has no effect: --{name} {value} overrides the file"
            launch.findings.append(note(what))
    if launch.world_size % launch.num_machines:
        fits = launch.num_machines * max(1, launch.world_size // launch.num_machines)
        what = f"num_processes = {launch.world_size} on {launch.num_machines} machines: each has the same number"
        launch.findings.append(error(f"{what}. Use --num_processes {fits}"))
    launch.local_world_size = max(1, launch.world_size // launch.num_machines)


def _of_accelerate(launch: ExaminedLaunch, words: list[str]) -> dict[str, str]:
    """The variables that accelerate's launcher gives to processes (accelerate/commands/launch.py, 1.15)."""
    printed = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = launch_command_parser().parse_args([*words, "train.py"])
            arguments, defaults, precision_of_file = _validate_launch_command(arguments)
            _look_at_arguments(launch, arguments)
            if arguments.use_deepspeed and not arguments.cpu:
                fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_of_file else [])]
                arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
                made = utils.prepare_deepspeed_cmd_env(arguments)[1]
            elif any((arguments.use_fsdp, arguments.use_megatron_lm, arguments.multi_gpu)) and not arguments.cpu:
                made = utils.prepare_multi_gpu_env(arguments)
            else:
                made = utils.prepare_simple_launcher_cmd_env(arguments)[1]
                if launch.world_size > 1:
                    kind = f"distributed_type = {launch.content.get('distributed_type')}"
                    what = f"{launch.config_file}: {kind} starts one process, and num_processes = {launch.world_size}"
                    launch.findings.append(error(f"{what}. Use --strategy ddp, or --num_processes 1"))
                launch.world_size = launch.local_world_size = 1
    except SystemExit:
        raise ValueError(printed.getvalue().strip().splitlines()[-1]) from None
    finally:
        logging.disable(logging.NOTSET)
    ours = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", *VISIBLE)
    return {name: value for name, value in made.items() if name.startswith(ours)}


def _look_at_arguments(launch: ExaminedLaunch, arguments: argparse.Namespace) -> None:
    """What accelerate accepts, and what then goes wrong."""
    several, name = launch.num_machines > 1, "deepspeed_multinode_launcher"
    kind = getattr(arguments, name, None)
    if several and arguments.use_deepspeed and kind != STANDARD:
        what = f"{launch.config_file}: {name} = {kind}: on several machines it needs a hostfile and ssh"
        launch.findings.append(warning(f"{what}. Write {name}: {STANDARD}"))
    ids = getattr(arguments, "gpu_ids", None)
    launch.devices = len(str(ids).split(",")) if ids not in (None, "all") else None


def _leftovers(launch: ExaminedLaunch, shell: Mapping[str, str], made: Mapping[str, str]) -> list[Finding]:
    """Variables that an earlier launch has left in the shell, and that reach the processes."""
    launch.leftovers = {
        name: value for name, value in sorted(shell.items()) if name.startswith("ACCELERATE_") and name not in made
    }
    findings = [
        warning(f"{name} = {value!r} is set in this shell and overrides the YAML. Type unset {name}")
        for name, value in launch.leftovers.items()
    ]
    ranks = {name: shell[name] for name in RANKS if name in shell}
    if ranks and launch.world_size == 1 and launch.content.get("distributed_type", "NO") == "NO":
        shown = ", ".join(f"{name} = {value}" for name, value in ranks.items())
        what = f"{shown}: set in this shell, they make the single process wait for others"
        findings.append(error(f"{what}. Type unset {' '.join(ranks)}"))
    return findings


def _said(error: BaseException) -> str:
    name = "" if isinstance(error, (ValueError, AssertionError, ConnectionError)) else f"{type(error).__name__}: "
    return name + first_line(error).rstrip(".")


def shown_command(launch: ExaminedLaunch, program: list[str]) -> str:
    return shlex.join([*launch.command, *program])
