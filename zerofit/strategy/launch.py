"""Read from the launcher how many processes there are, which strategy, and from which files."""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import OUR_LAUNCHER, UserError
from zerofit.recipe.parse import flag_value
from zerofit.recipe.parsing import read_yaml
from zerofit.recipe.places import CONFIGS
from zerofit.strategy.fsdp import fsdp_problems, read_fsdp
from zerofit.strategy.gpus import use_expandable_segments
from zerofit.strategy.named import FP8_BACKEND, export_environment, is_json, problems_of_yaml, with_flags

SHARES_DEVICES = "ZEROFIT_SHARES_DEVICES"  # set by `zerofit compare`: processes may share a device
PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

SAID_OTHERWISE = (  # variables of accelerate, the values that change nothing here, and the option to use
    ("ACCELERATE_MIXED_PRECISION", PRECISIONS, "precision"),
    ("ACCELERATE_DYNAMO_BACKEND", ("no",), "torch_compile"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("no", "1"), "gradient_accumulation_steps"),
    ("ACCELERATE_GRADIENT_CLIPPING", ("no",), "max_grad_norm"),
)


@dataclass
class Launch:
    """The launcher's side of a run, read from the environment before anything heavy is imported."""

    world_size: int
    rank: int
    deepspeed: bool
    precision: str | None  # None where the launcher says nothing
    json_path: str | None  # DeepSpeed JSON
    config_file: str | None  # accelerate YAML, where it can be found out
    yaml: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    flags: str = ""  # those of the launcher that `yaml` has, too
    fsdp: dict[str, str] | None = None  # FSDP's settings; None: it is not used
    threads_are_the_users: bool = False  # OMP_NUM_THREADS was set before the launcher, which would set it to 1

    @property
    def strategy_name(self) -> str | None:
        """The name of the strategy; None where the YAML is not one of accelerate_configs/, and where there is none."""
        path = Path(self.config_file or "")
        return path.stem if path.resolve().parent.name == CONFIGS.name else None

    @property
    def source(self) -> str:
        """The name of the accelerate configuration in messages."""
        return self.config_file or "accelerate launch"


def find_launch(named: str | None = None) -> Launch:
    """Read the environment that `accelerate launch` made, and the YAML file behind it. `named`: the YAML or JSON that
    the program's own command line names: the environment is made of it here. Raises UserError where the launcher names
    another strategy."""
    environment = os.environ
    # Before torch is imported: OpenMP's threads sleep while they wait. Those that spin, as they do by default, make a
    # run ten times slower as soon as another process wants the same cores.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    use_expandable_segments()
    command, config_file, threads_are_the_users = _launcher()
    if named is not None:
        export_environment(named, config_file)
        config_file = config_file if is_json(named) else named
    content = (read_yaml(Path(config_file)) if config_file else None) or {}
    flags = ""
    if isinstance(content, dict):
        content, flags = with_flags(content, command)
    return Launch(
        world_size=int(environment.get("WORLD_SIZE", "1")),
        rank=int(environment.get("RANK", "0")),
        deepspeed=environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true",
        precision=PRECISIONS.get(environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()),
        json_path=environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"),
        config_file=config_file,
        yaml=content,
        command=command,
        flags=flags,
        fsdp=read_fsdp(environment, content),
        threads_are_the_users=threads_are_the_users,
    )


def check_launch(launch: Launch) -> None:
    """Raises UserError where the YAML holds nested keys that accelerate would ignore, or names a strategy that is not
    supported."""
    source = f"{launch.source} with {launch.flags}" if launch.flags else launch.source
    problems = problems_of_yaml(launch.yaml, source)
    if launch.fsdp is not None:
        problems += fsdp_problems(launch.fsdp, launch.yaml, source)
        if launch.deepspeed:
            problems.append(f"{launch.source}: FSDP and DeepSpeed are both asked for. unset ACCELERATE_USE_FSDP")
    for name, usable, option in SAID_OTHERWISE:
        value = os.environ.get(name, "no")
        if value.lower() not in usable and not (launch.deepspeed and "_GRADIENT_" in name) and not problems:
            problems.append(f"{name} = {value} is set in this shell. unset {name}, and say --{option}")
    if launch.command and not problems:
        problems += _not_started(launch, source)
    backend = os.environ.get("ACCELERATE_FP8_BACKEND", FP8_BACKEND).upper()
    if launch.precision == "fp8" and backend not in (FP8_BACKEND, "NO") and not problems:  # by a flag
        problems.append(f"--fp8_backend {backend} is not supported. Write {FP8_BACKEND}, which is torchao")
    if problems:
        raise UserError(problems)


def _not_started(launch: Launch, source: str) -> list[str]:
    """Say what accelerate launch was told to start, and has not."""
    kind, asked = launch.yaml.get("distributed_type"), flag_value(launch.command, "num_processes")
    asked = asked or (kind != "NO" and str(launch.yaml.get("num_processes"))) or "1"
    if kind in ("DEEPSPEED", "FSDP") and not (launch.deepspeed or launch.fsdp):
        return [f"{source}: with --cpu accelerate launch leaves {kind} out. Remove --cpu: the CPU is found without it"]
    if asked.isdigit() and int(asked) > 1 == launch.world_size:
        return [
            f"{source}: num_processes = {asked}, and accelerate launch has started one process. Use --config_file "
            "accelerate_configs/ddp.yaml, which starts all without a GPU, too, and no --cpu, use_cpu or MULTI_CPU"
        ]
    return []


def tell_deepspeed_of_a_cpu() -> None:
    """Tell DeepSpeed, before it is imported, what it finds out for itself on a host without a GPU: that there is none,
    of which it warns on every rank; and the number of processes that share the CPU, for which ZeRO-3 starts `numactl`
    with every bucket of gradients (zero/stage3.py)."""
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1")
        os.environ["LOCAL_SIZE"] = here


@dataclass(frozen=True)
class Launcher:
    """The `accelerate launch` above this process."""

    command: list[str]
    started: float  # when it was started, as time.time()
    has_threads: bool  # OMP_NUM_THREADS was set before it, which sets it to 1 otherwise


def find_launcher() -> Launcher | None:
    """Find the launcher of this process. `zerofit launch` names itself in a variable. accelerate hands its settings
    down as variables, without the file that they come from: its command line is read. None: neither of them."""
    import psutil

    if OUR_LAUNCHER in os.environ:
        return Launcher(**json.loads(os.environ[OUR_LAUNCHER]))
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # accelerate always sets it
        return None
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            if is_accelerate_launch(words):
                return Launcher(words, parent.create_time(), "OMP_NUM_THREADS" in parent.environ())
    return None


def _launcher() -> tuple[list[str], str | None, bool]:
    """Return (command line, --config_file, whether OMP_NUM_THREADS was given) of the launcher above this process."""
    import psutil

    launcher = find_launcher()
    if launcher is None:
        threads = "OMP_NUM_THREADS" in os.environ
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, which sets it to 1 where nobody has
            with contextlib.suppress(psutil.Error):
                threads = "OMP_NUM_THREADS" in psutil.Process().parent().environ()
        return [], None, threads
    words = launcher.command
    named = flag_value(words, "config_file") or default_config()
    threads = launcher.has_threads or bool(flag_value(words, "num_cpu_threads_per_process"))
    return words, named if named and Path(named).is_file() else None, threads


def is_accelerate_launch(words: list[str]) -> bool:
    """Return whether a command is `accelerate launch`, `accelerate-launch` or `python -m
    accelerate.commands.launch`."""
    names = ("accelerate-launch", "accelerate.commands.launch", "accelerate/commands/launch.py")
    first = words[:3]  # Python, -m and the program at most
    return any(word.endswith(names) for word in first) or (
        "launch" in words and any("accelerate" in word for word in words)
    )


def default_config() -> str | None:
    """The file that accelerate reads where no --config_file is given, if there is one."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    files = (home / "accelerate" / f"default_config.{ending}" for ending in ("json", "yaml"))
    return next((str(file) for file in files if file.is_file()), None)
