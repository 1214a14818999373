"""Which strategy a launcher, or `--strategy`, names, from which files, and how many processes there are.

A strategy that the program's own command line names: `--strategy zero1`, or `--strategy FILE.json`.

torchrun reads no YAML. `accelerate launch` makes environment variables of one, which the Accelerator reads; under
torchrun they are made here (accelerate/utils/launch.py, 1.15).

FSDP2's settings are read from the YAML, or the flags of its launcher: accelerate would pass most of them on, but not
SYNC_KEY and REDUCE_DTYPE, which it does not know.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from zerofit.recipe.base import Recipe
from zerofit.recipe.errors import LAUNCHER_VARIABLE, UserError, did_you_mean, nearest
from zerofit.recipe.files import CONFIG_DIR, configs, counted, read_yaml
from zerofit.recipe.parse import flag_value, option_named
from zerofit.strategy.gpus import use_expandable_segments

RESHARD_KEY = "fsdp_reshard_after_forward"
IGNORED_MODULES = "fsdp_ignored_modules"
EXPERTS = "experts"
FSDP_VERSION = "fsdp_version"
SYNC_KEY = "fsdp_sync_each_batch"  # accelerate's name for it in GradientAccumulationPlugin
REDUCE_DTYPE = "fsdp_reduce_dtype"  # torch's name for it in MixedPrecisionPolicy
REPLICAS_KEY = "parallelism_config_dp_replicate_size"
SHARDS_KEY = "parallelism_config_dp_shard_size"
BOOLEANS = ("true", "false")
GROUP_SIZES = [str(size) for size in range(1, 1025)]
WRAP_KEY = "fsdp_transformer_layer_cls_to_wrap"
ONLY_SIZE_1 = ("parallelism_config_cp_", "parallelism_config_sp_")  # here their size is always 1
FSDP_ALONE = "fsdp2 with one process: there is nobody to share with, so nothing is sharded"
FSDP_VALUES: dict[str, Sequence[str]] = {  # the values of each key that a run honours, the usual one first
    FSDP_VERSION: ("2",),
    RESHARD_KEY: (*BOOLEANS, *GROUP_SIZES[1:]),  # true; false: weights stay until the backward pass; or sharers
    REDUCE_DTYPE: ("fp32", "bf16"),
    SYNC_KEY: BOOLEANS,  # false reduces gradients once an update, from full gradients
    IGNORED_MODULES: (EXPERTS,),  # which are divided among the ranks then
    "fsdp_auto_wrap_policy": ("transformer_based_wrap",),
    "fsdp_state_dict_type": ("sharded_state_dict", "full_state_dict"),  # of accelerate's own checkpoints
    "fsdp_cpu_ram_efficient_loading": BOOLEANS,
    "fsdp_offload_params": ("false",),
    "fsdp_activation_checkpointing": ("false",),
    "fsdp_activation_checkpointing_offload": ("false",),
    REPLICAS_KEY: GROUP_SIZES,
    SHARDS_KEY: GROUP_SIZES,
    "parallelism_config_tp_size": ("1",),
    "parallelism_config_cp_size": ("1",),
    "parallelism_config_sp_size": ("1",),
}


def read_fsdp(environment: Mapping[str, str], content: Mapping[str, Any]) -> dict[str, str] | None:
    """The settings, in lower case, of an accelerate YAML and of its launcher's flags; None: FSDP is not used."""
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    settings = {FSDP_VERSION: "1"}  # accelerate's default
    for section in (content.get("fsdp_config"), content.get("parallelism_config")):
        for key, value in section.items() if isinstance(section, dict) else ():
            if key in FSDP_VALUES and value is not None:
                settings[key] = str(value).lower()
    return settings


def check_replicas(settings: Mapping[str, str], world_size: int, source: str) -> None:
    """Raises UserError where the processes cannot form the replicas that are asked for, or groups that share weights
    between the passes, or where replicas and divided experts are asked for."""
    if world_size == 1:
        return
    replicas = int(settings.get(REPLICAS_KEY, "1"))
    shards = int(settings.get(SHARDS_KEY, "1"))
    among = settings.get(RESHARD_KEY, "true")
    sharers = world_size // replicas
    if among.isdigit() and (sharers % int(among) or int(among) >= sharers):
        possible = [str(size) for size in range(2, sharers) if sharers % size == 0]
        raise UserError(
            f"{source}: {RESHARD_KEY} = {among} is not a part of the {sharers} processes that share weights. "
            f"Write {', '.join((*possible, *BOOLEANS))}"
        )
    stated = f"{source}: {REPLICAS_KEY} = {replicas}"
    if replicas > 1 and settings.get(IGNORED_MODULES) == EXPERTS:
        raise UserError(f"{stated} does not go together with {IGNORED_MODULES}: {EXPERTS}. Remove one of them")
    if replicas > 1 and (world_size % replicas or world_size == replicas):
        raise UserError(
            f"{stated} needs a multiple of it as num_processes, {2 * replicas} or more, and there are {world_size}. "
            f"Use --num_processes {2 * replicas}, or write another size"
        )
    if shards not in (1, sharers):
        raise UserError(
            f"{source}: {SHARDS_KEY} = {shards}, and {world_size} processes in {counted(replicas, 'replica')} are "
            f"{sharers} each. Remove it"
        )


def fsdp_problems(settings: dict[str, str], content: Mapping[str, Any], source: str) -> list[str]:
    """Return a problem for each setting that a run would not honour."""
    if settings[FSDP_VERSION] == "1":
        translate = "accelerate to-fsdp2 --config_file FILE --output_file NEW_FILE"
        return [
            f"{source}: {FSDP_VERSION} = 1 is not supported. Write 2; of FSDP1's keys this makes those of 2: "
            f"{translate}"
        ]
    problems = []
    for key, value in settings.items():
        if value not in (honoured := FSDP_VALUES[key]):
            number = (*filter(BOOLEANS.__contains__, honoured), "a number of processes")
            words = honoured if len(honoured) < 4 else number
            remedy = f"Write {' or '.join(words)}, or use another strategy, such as zero3_offload, tp or sp"
            if key.startswith("fsdp_activation_checkpointing"):
                remedy = "Write false, and say --gradient_checkpointing"
            problems.append(f"{key} = {value} is not supported. {remedy}")
    for key, value in (content.get("fsdp_config") or {}).items():
        if key not in (*FSDP_VALUES, WRAP_KEY):
            problems.append(f"{key} = {value!r} is of FSDP1, or not supported. Remove it")
    for key in content.get("parallelism_config") or {}:
        if key not in FSDP_VALUES and not key.startswith(ONLY_SIZE_1):
            remedy = did_you_mean(key, (REPLICAS_KEY, SHARDS_KEY))
            problems.append(f"accelerate has no setting {key} in parallelism_config. {remedy}")
    return [f"{source}: {problem}" for problem in problems]


# {key of deepspeed_config: what accelerate launch calls it in the environment}
DEEPSPEED_ENV = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
# Other keys of deepspeed_config that accelerate 1.15 reads; it ignores any other without a word.
UNMAPPED_KEYS = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
)
JSON_EXTRAS = ("deepspeed_config_file", "zero3_init_flag", "deepspeed_moe_layer_cls_names")  # others are in it
SECTION_TYPES = {  # and the distributed_type that each is for
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "parallelism_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
PREFIXES = {"fsdp_": "fsdp_config", "parallelism_config_": "parallelism_config", "megatron_lm_": "megatron_lm_config"}
USE_FLAGS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}
LAUNCH_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
PRECISION_NAMES = ("no", "fp16", "bf16", "fp8")
FP8_BACKEND = "AO"
FP8_KEYS = {"backend", "pad_inner_dim", "enable_fsdp_float8_all_gather"}  # of torchao, in accelerate 1.15
SINGLE_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def take_named(recipe: Recipe) -> str | None:
    """Take the strategy that the recipe's flags name out of the recipe, which says what is trained, and not how.
    Returns the file of its accelerate YAML, or of a DeepSpeed JSON alone; None: no strategy is named.
    Raises UserError where a recipe's file names one, or there is no such strategy."""
    value = getattr(recipe, "strategy", None)
    if not value:
        return None
    if not recipe.is_flag("strategy"):
        raise UserError(
            f"{recipe.source('strategy')}: strategy = {value!r}: a recipe says what is trained, and not how. "
            f"Use the flag --strategy {value}"
        )
    recipe.reset_option("strategy")
    if not value.endswith(".json"):
        return str(find_strategies([value])[value])
    if not Path(value).is_file():
        raise UserError(f"--strategy {value!r}: there is no such file. Name a DeepSpeed JSON, as in ds_configs/")
    return str(value)


def export_environment(named: str, config_file: str | None) -> None:
    """Put the strategy of this YAML, or JSON, into this process' environment, as accelerate launch would have.
    `config_file`: the YAML that an accelerate launch above this process has read. Raises UserError where that has
    another strategy."""
    environment = os.environ
    told = config_file or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if told and Path(told).is_file() and Path(told).samefile(named):
        return
    if told or "true" in (environment.get("ACCELERATE_USE_DEEPSPEED"), environment.get("ACCELERATE_USE_FSDP")):
        kept = "leave --config_file out" if named.endswith(".json") else f"accelerate launch --config_file {named}"
        raise UserError(
            f"--strategy {named}, and accelerate launch was told {told or 'to use DeepSpeed or FSDP'}: keep one. "
            f"To have the first: {kept}"
        )
    if named.endswith(".json"):
        made = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": named}
    else:
        made = environment_of(read_yaml(Path(named)) or {}, named)
    if environment.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        made.pop("ACCELERATE_MIXED_PRECISION", None)  # a flag of the launcher goes before the file
    environment.update(made)
    if "ACCELERATE_USE_DEEPSPEED" in made and "RANK" not in environment:  # a single process, without any launcher
        with socket.socket() as free:
            free.bind((SINGLE_ENV["MASTER_ADDR"], 0))
            environment.update(SINGLE_ENV, MASTER_PORT=str(free.getsockname()[1]))


def environment_of(content: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return the variables that accelerate launch makes of a YAML; not those of processes, which torchrun has made.
    Raises UserError where it asks for what only accelerate launch can do."""
    kind = str(content.get("distributed_type", "NO"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    problems = problems_of_yaml(content, source)
    if kind == "NO" and world > 1:
        problems.append(f"{source} is for one process, not for {world}. Use --strategy ddp")
    if problems:
        raise UserError(problems)
    precision = content.get("mixed_precision") or ("fp16" if content.get("fp16") else "no")
    made = {"ACCELERATE_MIXED_PRECISION": str(precision).lower()}
    if content.get("use_cpu"):
        made["ACCELERATE_USE_CPU"] = "true"
    if kind == "DEEPSPEED":
        made["ACCELERATE_USE_DEEPSPEED"] = "true"
        for key, value in (content.get("deepspeed_config") or {}).items():
            if key in DEEPSPEED_ENV and value is not None:
                is_name = key in ("deepspeed_config_file", "deepspeed_moe_layer_cls_names")
                made[f"ACCELERATE_{DEEPSPEED_ENV[key]}"] = str(value) if is_name else str(value).lower()
    if kind == "FSDP":
        made["ACCELERATE_USE_FSDP"] = "true"
    return made


def problems_of_yaml(content: Any, source: str) -> list[str]:
    """Return a problem for each thing in an accelerate YAML that is not a strategy here, or that accelerate would
    stumble over."""
    import torch
    from accelerate.commands.config.config_args import ClusterConfig

    content = content or {}
    problems = []
    if not isinstance(content, dict):
        return [f"{source}: expected `key: value` lines, as in accelerate_configs/ddp.yaml"]
    choices = {"distributed_type": LAUNCH_TYPES, "mixed_precision": PRECISION_NAMES, "downcast_bf16": ("no", "yes")}
    for key, words in choices.items():
        if isinstance(content.get(key), bool):  # YAML 1.1's no, off, yes and on
            meant = f'"{words[0]}" in quotes' if content[key] is False else f"one of {', '.join(words)}"
            problems.append(f"{key} = {str(content[key]).lower()}, as YAML reads no and yes: write {meant}")
    kind = content.get("distributed_type", "NO")
    precision = content.get("mixed_precision")
    known = (*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend")  # the last two in its older files
    problems += [f"accelerate has no setting {key}. {did_you_mean(str(key), known)}" for key in content.keys() - known]
    device = torch.accelerator.current_accelerator()
    if not isinstance(kind, bool) and kind not in (*LAUNCH_TYPES, f"MULTI_{device.type.upper()}" if device else "NO"):
        problems.append(
            f"distributed_type = {kind} is not supported here. Use --strategy ddp, zero1, zero2, zero3, fsdp2, tp, pp "
            f"or 3d, or write {nearest(str(kind).upper(), LAUNCH_TYPES) or 'MULTI_GPU'}"
        )
    if not isinstance(precision, bool) and str(precision or "no").lower() not in PRECISION_NAMES:
        remedy = did_you_mean(str(precision), PRECISION_NAMES, f"Use {', '.join(PRECISION_NAMES[:3])}")
        problems.append(f"mixed_precision = {precision} is unknown. {remedy}")
    if str(content.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        problems.append(f"compute_environment = {content['compute_environment']}: write LOCAL_MACHINE")
    if isinstance(content.get("use_cpu"), str):
        problems.append(f"use_cpu = {content['use_cpu']!r} is a text, which counts as true: no quotes")
    dynamo = content.get("dynamo_config") or {}
    backend = dynamo.get("dynamo_backend", "no") if isinstance(dynamo, dict) else dynamo
    if str(content.get("dynamo_backend") or backend).lower() not in ("no", "false"):
        problems.append("dynamo_config is not supported. Remove it, and say --torch_compile")
    return [f"{source}: {problem}" for problem in (*problems, *_problems_of_sections(content, str(kind)))]


def _problems_of_sections(content: dict[str, Any], kind: str) -> Iterator[str]:
    """Yield the problems of what is nested in a YAML."""
    sections = {name: content.get(name) or {} for name in (*SECTION_TYPES, "fp8_config")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            yield f"{name} = {section!r}: expected indented `key: value` lines"
            sections[name] = {}
        elif section and kind in LAUNCH_TYPES and kind != SECTION_TYPES.get(name, kind):
            other = ". Or use --strategy tp, sp or hsdp" if name == "parallelism_config" else ""
            stated = f"{name} ({', '.join(map(str, section))}) has no effect with distributed_type = {kind}"
            yield f"{stated}. Write {SECTION_TYPES[name]}, or remove it{other}"
    for key, value in sections["deepspeed_config"].items():
        if key not in (*DEEPSPEED_ENV, *UNMAPPED_KEYS):
            yield f"deepspeed_config has the unknown key {key}. {did_you_mean(key, (*DEEPSPEED_ENV, *UNMAPPED_KEYS))}"
        elif "deepspeed_config_file" in sections["deepspeed_config"] and key not in (*JSON_EXTRAS, *UNMAPPED_KEYS):
            yield f"{key} = {value!r} stands beside deepspeed_config_file. Keep it in the JSON only"
    fp8 = sections["fp8_config"]
    if str(fp8.get("backend", FP8_BACKEND)).upper() != FP8_BACKEND:
        yield f"fp8_config.backend = {fp8['backend']} is not supported. Write {FP8_BACKEND}, which is torchao"
    for key in fp8.keys() - FP8_KEYS:
        yield f"fp8_config.{key} is of another backend than torchao. Remove it"
    if fp8 and str(content.get("mixed_precision")).lower() != "fp8":
        yield "fp8_config has no effect without mixed_precision: fp8. Remove it"


def with_flags(content: dict[str, Any], words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return (a YAML's content with what the flags of accelerate launch state beside it, these flags). accelerate
    hands no flag down that is for another distributed_type, or stands beside a DeepSpeed JSON.

    Args:
        words: the command line; what stands behind the script is the script's.
    """
    script = next((place for place, word in enumerate(words) if word.endswith(".py") and place > 1), 0)
    content = dict(content)
    flags = []
    for name in filter(None, map(option_named, words[:script])):
        prefix = next(filter(name.startswith, PREFIXES), "")
        section = "deepspeed_config" if name in (*DEEPSPEED_ENV, *UNMAPPED_KEYS) else PREFIXES.get(prefix, "")
        value = flag_value(list(words[:script]), name)
        beside = content.get(section) or {}
        if name in USE_FLAGS:
            content["distributed_type"] = USE_FLAGS[name]
        elif name == "dynamo_backend":
            content[name] = value
        elif section and isinstance(beside, dict):
            content[section] = {**beside, name: value}
        else:
            continue
        flags.append(f"--{name}")
    return content, " ".join(flags)


def find_strategies(names: list[str]) -> dict[str, Path]:
    """Find the accelerate YAML of each name: one in accelerate_configs/, or a .yaml file. Raises UserError where there
    is none, or it is not a strategy here."""
    folder = configs()
    files = {name: Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml" for name in names}
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    missing = []
    for name, path in files.items():
        if name.endswith(".json"):
            missing.append(
                f"strategy {name!r}: a JSON alone is for torchrun. Name a YAML that names it, as zero2.yaml"
            )
        elif not path.is_file():
            remedy = did_you_mean(name, known, f"There are {', '.join(known)}")
            missing.append(f"strategy {name!r}: there is no file {path}. {remedy}")
    if missing:
        raise UserError(missing)
    problems = [each for path in files.values() for each in problems_of_yaml(read_yaml(path), str(path))]
    if problems:
        raise UserError(problems)
    return files


SHARES_DEVICES = "ZEROFIT_SHARES_DEVICES"  # set by `zerofit compare`: processes may share a device
ACCELERATE_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

UNSUPPORTED_VARIABLES = (  # variables of accelerate, the values that change nothing here, and the option to use
    ("ACCELERATE_MIXED_PRECISION", ACCELERATE_PRECISIONS, "precision"),
    ("ACCELERATE_DYNAMO_BACKEND", ("no",), "torch_compile"),
    ("ACCELERATE_FP8_BACKEND", ("no", "ao"), "float8"),
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
        return path.stem if path.resolve().parent.name == CONFIG_DIR.name else None

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
    launcher = find_launcher()
    config_file = None
    threads_are_the_users = "OMP_NUM_THREADS" in environment
    command = [] if launcher is None else launcher.command
    if launcher is not None:
        told = flag_value(command, "config_file") or default_config()
        config_file = told if told and Path(told).is_file() else None
        threads_are_the_users = launcher.has_threads or bool(flag_value(command, "num_cpu_threads_per_process"))
    elif "TORCHELASTIC_RUN_ID" in environment:  # torchrun, which sets it to 1 where nobody has
        with contextlib.suppress(psutil.Error):
            threads_are_the_users = "OMP_NUM_THREADS" in psutil.Process().parent().environ()
    if named is not None:
        export_environment(named, config_file)
        config_file = config_file if named.endswith(".json") else named
    content = (read_yaml(Path(config_file)) if config_file else None) or {}
    flags = ""
    if isinstance(content, dict):
        content, flags = with_flags(content, command)
    return Launch(
        world_size=int(environment.get("WORLD_SIZE", "1")),
        rank=int(environment.get("RANK", "0")),
        deepspeed=environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true",
        precision=ACCELERATE_PRECISIONS.get(environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()),
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
    for name, usable, option in UNSUPPORTED_VARIABLES:
        value = os.environ.get(name, "no")
        if value.lower() not in usable and not (launch.deepspeed and "_GRADIENT_" in name) and not problems:
            problems.append(f"{name} = {value} is set in this shell. unset {name}, and say --{option}")
    if launch.command and not problems:
        kind = launch.yaml.get("distributed_type")
        asked = flag_value(launch.command, "num_processes")
        asked = asked or (kind != "NO" and str(launch.yaml.get("num_processes"))) or "1"
        leaves_out = kind in ("DEEPSPEED", "FSDP") and not (launch.deepspeed or launch.fsdp)
        if leaves_out or (asked.isdigit() and int(asked) > 1 == launch.world_size):
            problems.append(
                f"{source}: distributed_type = {kind} and num_processes = {asked}, and accelerate launch has started "
                "one process of its own kind. Remove --cpu, use_cpu and MULTI_CPU: the CPU is found without them"
            )
    if problems:
        raise UserError(problems)


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
    if LAUNCHER_VARIABLE in os.environ:
        return Launcher(**json.loads(os.environ[LAUNCHER_VARIABLE]))
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # accelerate always sets it
        return None
    modules = ("accelerate-launch", "accelerate.commands.launch", "accelerate/commands/launch.py")
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            is_command = "launch" in words and any("accelerate" in word for word in words)
            if is_command or any(word.endswith(modules) for word in words[:3]):  # Python, -m and the program at most
                return Launcher(words, parent.create_time(), "OMP_NUM_THREADS" in parent.environ())
    return None


def default_config() -> str | None:
    """The file that accelerate reads where no --config_file is given, if there is one."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    files = (home / "accelerate" / f"default_config.{ending}" for ending in ("json", "yaml"))
    return next((str(file) for file in files if file.is_file()), None)
