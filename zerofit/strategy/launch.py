"""Read the launcher's side of a run: the strategy that it or `--strategy` names, the files, the number of processes.

`accelerate launch` turns a YAML into environment variables, which the Accelerator reads. torchrun reads no YAML, so
with `--strategy NAME` or `--strategy FILE.json` the variables are set here (accelerate/utils/launch.py, 1.15).

FSDP2's settings are read from the YAML or the launcher's flags: accelerate does not know SYNC_KEY and REDUCE_DTYPE.
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
FSDP_VALUES: dict[str, Sequence[str]] = {  # the supported values of each key, the usual one first
    FSDP_VERSION: ("2",),
    RESHARD_KEY: (
        *BOOLEANS,
        *GROUP_SIZES[1:],
    ),  # false: weights stay gathered until the backward pass; or a group size
    REDUCE_DTYPE: ("fp32", "bf16"),
    SYNC_KEY: BOOLEANS,  # false reduces gradients once an update, from full gradients
    IGNORED_MODULES: (EXPERTS,),  # the experts are divided among the ranks
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
    """Return the FSDP settings of an accelerate YAML, in lower case; None if FSDP is not used."""
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    settings = {FSDP_VERSION: "1"}  # accelerate's default
    for section in (content.get("fsdp_config"), content.get("parallelism_config")):
        for key, value in section.items() if isinstance(section, dict) else ():
            if key in FSDP_VALUES and value is not None:
                settings[key] = str(value).lower()
    return settings


def check_replicas(settings: Mapping[str, str], world_size: int, source: str) -> None:
    """Check that the processes can form the replicas, and the groups that keep weights sharded between the passes.
    Raises UserError where they cannot, and where both replicas and expert parallelism are asked for."""
    if world_size == 1:
        return
    replicas = int(settings.get(REPLICAS_KEY, "1"))
    shards = int(settings.get(SHARDS_KEY, "1"))
    group_size = settings.get(RESHARD_KEY, "true")
    shard_size = world_size // replicas
    if group_size.isdigit() and (shard_size % int(group_size) or int(group_size) >= shard_size):
        possible = [str(size) for size in range(2, shard_size) if shard_size % size == 0]
        raise UserError(
            f"{source}: {RESHARD_KEY} = {group_size} is not a part of the {shard_size} processes that share weights. "
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
    if shards not in (1, shard_size):
        raise UserError(
            f"{source}: {SHARDS_KEY} = {shards}, and {world_size} processes in {counted(replicas, 'replica')} are "
            f"{shard_size} each. Remove it"
        )


def fsdp_problems(settings: dict[str, str], content: Mapping[str, Any], source: str) -> list[str]:
    """Return a message for each FSDP setting that a run would not honour."""
    if settings[FSDP_VERSION] == "1":
        return [
            f"{source}: {FSDP_VERSION} = 1 is not supported. Write 2; of FSDP1's keys this makes those of 2: "
            "accelerate to-fsdp2 --config_file FILE --output_file NEW_FILE"
        ]
    problems = []
    for key, value in settings.items():
        if value not in (supported := FSDP_VALUES[key]):
            number = (*filter(BOOLEANS.__contains__, supported), "a number of processes")
            words = supported if len(supported) < 4 else number
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


# {key of deepspeed_config: the environment variable that accelerate launch sets, without ACCELERATE_}
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
# Other keys of deepspeed_config that accelerate 1.15 reads; it silently ignores the rest.
UNMAPPED_KEYS = (
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_multinode_launcher",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
)
JSON_EXTRAS = ("deepspeed_config_file", "zero3_init_flag", "deepspeed_moe_layer_cls_names")  # allowed beside a JSON
SECTION_TYPES = {  # the sections of a YAML, and the distributed_type of each
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
FP8_KEYS = {"backend", "pad_inner_dim", "enable_fsdp_float8_all_gather"}  # what accelerate 1.15 reads for torchao
SINGLE_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def take_strategy_flag(recipe: Recipe) -> str | None:
    """Remove `--strategy` from the recipe, which says what is trained and not how, and return its file: an accelerate
    YAML or a DeepSpeed JSON; None without the flag. Raises UserError if a recipe's file sets `strategy`, or the
    strategy does not exist."""
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
    return value


def export_environment(strategy_file: str, config_file: str | None) -> None:
    """Set this process's environment variables for the strategy of a YAML or JSON, as accelerate launch would.
    `config_file`: the YAML that an accelerate launch above this process has read. Raises UserError where that has
    another strategy."""
    environment = os.environ
    launcher_file = config_file or environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if launcher_file and Path(launcher_file).is_file() and Path(launcher_file).samefile(strategy_file):
        return
    is_json = strategy_file.endswith(".json")
    if launcher_file or "true" in map(environment.get, ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")):
        raise UserError(
            f"--strategy {strategy_file}, and accelerate launch was told "
            f"{launcher_file or 'to use DeepSpeed or FSDP'}: keep one. To have the first: "
            f"{'leave --config_file out' if is_json else f'accelerate launch --config_file {strategy_file}'}"
        )
    if is_json:
        variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": strategy_file}
    else:
        variables = launch_variables(read_yaml(Path(strategy_file)) or {}, strategy_file)
    if environment.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        variables.pop("ACCELERATE_MIXED_PRECISION", None)  # a flag of the launcher overrides the file
    environment.update(variables)
    if "ACCELERATE_USE_DEEPSPEED" in variables and "RANK" not in environment:  # a single process without a launcher
        with socket.socket() as free:
            free.bind((SINGLE_ENV["MASTER_ADDR"], 0))
            environment.update(SINGLE_ENV, MASTER_PORT=str(free.getsockname()[1]))


def launch_variables(content: Mapping[str, Any], source: str) -> dict[str, str]:
    """Return the variables that accelerate launch makes of a YAML, without those of the processes, which torchrun
    sets. Raises UserError where the YAML asks for what only accelerate launch can do."""
    kind = str(content.get("distributed_type", "NO"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    problems = problems_of_yaml(content, source)
    if kind == "NO" and world > 1:
        problems.append(f"{source} is for one process, not for {world}. Use --strategy ddp")
    if problems:
        raise UserError(problems)
    precision = content.get("mixed_precision") or ("fp16" if content.get("fp16") else "no")
    variables = {"ACCELERATE_MIXED_PRECISION": str(precision).lower()}
    if content.get("use_cpu"):
        variables["ACCELERATE_USE_CPU"] = "true"
    if kind in ("DEEPSPEED", "FSDP"):
        variables[f"ACCELERATE_USE_{kind}"] = "true"
    if kind == "DEEPSPEED":
        for key, value in (content.get("deepspeed_config") or {}).items():
            if key in DEEPSPEED_ENV and value is not None:
                is_name = key in ("deepspeed_config_file", "deepspeed_moe_layer_cls_names")
                variables[f"ACCELERATE_{DEEPSPEED_ENV[key]}"] = str(value) if is_name else str(value).lower()
    return variables


def problems_of_yaml(content: Any, source: str) -> list[str]:
    """Return a message for each setting of an accelerate YAML that is not supported here, or that accelerate would
    ignore or misread."""
    import torch
    from accelerate.commands.config.config_args import ClusterConfig

    content = content or {}
    problems = []
    if not isinstance(content, dict):
        return [f"{source}: expected `key: value` lines, as in accelerate_configs/ddp.yaml"]
    choices = {"distributed_type": LAUNCH_TYPES, "mixed_precision": PRECISION_NAMES, "downcast_bf16": ("no", "yes")}
    for key, values in choices.items():
        if isinstance(content.get(key), bool):  # YAML 1.1's no, off, yes and on
            remedy = f'"{values[0]}" in quotes' if content[key] is False else f"one of {', '.join(values)}"
            problems.append(f"{key} = {str(content[key]).lower()}, as YAML reads no and yes: write {remedy}")
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
    """Yield a message for each problem in the nested sections of an accelerate YAML."""
    sections = {name: content.get(name) or {} for name in (*SECTION_TYPES, "fp8_config")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            yield f"{name} = {section!r}: expected indented `key: value` lines"
            sections[name] = {}
        elif section and kind in LAUNCH_TYPES and kind != SECTION_TYPES.get(name, kind):
            alternative = ". Or use --strategy tp, sp or hsdp" if name == "parallelism_config" else ""
            stated = f"{name} ({', '.join(map(str, section))}) has no effect with distributed_type = {kind}"
            yield f"{stated}. Write {SECTION_TYPES[name]}, or remove it{alternative}"
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


def merge_flags(content: dict[str, Any], command: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return (a YAML's content with the flags of accelerate launch added, the names of these flags). `command`: the
    launcher's command line. accelerate itself drops flags of another distributed_type, and those beside a JSON."""
    script = next((place for place, word in enumerate(command) if word.endswith(".py") and place > 1), 0)
    launcher_words = list(command[:script])  # what follows the script's name are its own options
    content = dict(content)
    flags = []
    for name in filter(None, map(option_named, launcher_words)):
        prefix = next(filter(name.startswith, PREFIXES), "")
        section = "deepspeed_config" if name in (*DEEPSPEED_ENV, *UNMAPPED_KEYS) else PREFIXES.get(prefix, "")
        value = flag_value(launcher_words, name)
        settings = content.get(section) or {}
        if name in USE_FLAGS:
            content["distributed_type"] = USE_FLAGS[name]
        elif name == "dynamo_backend":
            content[name] = value
        elif section and isinstance(settings, dict):
            content[section] = {**settings, name: value}
        else:
            continue
        flags.append(f"--{name}")
    return content, " ".join(flags)


def find_strategies(names: list[str]) -> dict[str, Path]:
    """Return {name: its accelerate YAML}: a file of accelerate_configs/, or a name that ends in .yaml. Raises
    UserError where a file is missing or is not supported as a strategy."""
    folder = configs()
    files = {name: Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml" for name in names}
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    problems = []
    for name, path in files.items():
        if name.endswith(".json"):
            problems.append(
                f"strategy {name!r}: a JSON alone is for torchrun. Name a YAML that names it, as zero2.yaml"
            )
        elif not path.is_file():
            remedy = did_you_mean(name, known, f"There are {', '.join(known)}")
            problems.append(f"strategy {name!r}: there is no file {path}. {remedy}")
        else:
            problems += problems_of_yaml(read_yaml(path), str(path))
    if problems:
        raise UserError(problems)
    return files


SHARES_DEVICES = "ZEROFIT_SHARES_DEVICES"  # set by `zerofit compare`: processes may share a device
ACCELERATE_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

UNSUPPORTED_VARIABLES = (  # variables of accelerate, their values without effect here, and the option to use
    ("ACCELERATE_MIXED_PRECISION", ACCELERATE_PRECISIONS, "precision"),
    ("ACCELERATE_DYNAMO_BACKEND", ("no",), "torch_compile"),
    ("ACCELERATE_FP8_BACKEND", ("no", "ao"), "float8"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", ("no", "1"), "gradient_accumulation_steps"),
    ("ACCELERATE_GRADIENT_CLIPPING", ("no",), "max_grad_norm"),
)


@dataclass
class Launch:
    """The launcher's side of a run: processes, files and settings, read before torch is imported."""

    world_size: int
    rank: int
    deepspeed: bool
    precision: str | None  # None where the launcher says nothing
    json_path: str | None  # DeepSpeed JSON
    config_file: str | None  # accelerate YAML, where it can be found out
    yaml: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    flags: str = ""  # the launcher's flags that are merged into `yaml`
    fsdp: dict[str, str] | None = None  # FSDP's settings; None: it is not used
    threads_are_the_users: bool = False  # the user set OMP_NUM_THREADS; else the launcher sets it to 1

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
    """Read the environment that `accelerate launch` made, and its YAML file. `named`: the YAML or JSON of
    `--strategy`, from which the environment is made here. Raises UserError where the launcher has another strategy."""
    environment = os.environ
    # OpenMP's threads, which read this as torch is imported, sleep while they wait. By default they spin, and a run is
    # ten times slower as soon as another process uses the same cores.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    use_expandable_segments()
    launcher = find_launcher()
    config_file = None
    threads_are_the_users = "OMP_NUM_THREADS" in environment
    command = [] if launcher is None else launcher.command
    if launcher is not None:
        path = flag_value(command, "config_file") or default_config()
        config_file = path if path and Path(path).is_file() else None
        threads_are_the_users = launcher.has_threads or bool(flag_value(command, "num_cpu_threads_per_process"))
    elif "TORCHELASTIC_RUN_ID" in environment:  # torchrun, which sets it to 1 where the user has not
        with contextlib.suppress(psutil.Error):
            threads_are_the_users = "OMP_NUM_THREADS" in psutil.Process().parent().environ()
    if named is not None:
        export_environment(named, config_file)
        config_file = config_file if named.endswith(".json") else named
    content = (read_yaml(Path(config_file)) if config_file else None) or {}
    flags = ""
    if isinstance(content, dict):
        content, flags = merge_flags(content, command)
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
    """Check the YAML, flags and variables of a launch. Raises UserError where accelerate would ignore a setting, or
    the strategy is not supported."""
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
        is_ignored = kind in ("DEEPSPEED", "FSDP") and not (launch.deepspeed or launch.fsdp)
        if is_ignored or (asked.isdigit() and int(asked) > 1 == launch.world_size):
            problems.append(
                f"{source}: distributed_type = {kind} and num_processes = {asked}, and accelerate launch has started "
                "one process of its own kind. Remove --cpu, use_cpu and MULTI_CPU: the CPU is found without them"
            )
    if problems:
        raise UserError(problems)


def tell_deepspeed_of_a_cpu() -> None:
    """Tell DeepSpeed, before it is imported, that a host has no GPU, and how many processes share its CPU. Else it
    warns on every rank, and ZeRO-3 starts `numactl` for every bucket of gradients (zero/stage3.py)."""
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1")
        os.environ["LOCAL_SIZE"] = here


@dataclass(frozen=True)
class Launcher:
    """The `accelerate launch` above this process."""

    command: list[str]
    started: float  # time of its start, as time.time()
    has_threads: bool  # the user set OMP_NUM_THREADS; else the launcher sets it to 1


def find_launcher() -> Launcher | None:
    """Return the launcher above this process; None if it is neither `zerofit launch` nor accelerate. The first names
    itself in a variable. accelerate passes no file name on: its command line is read."""
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
    """Return the file that accelerate reads without --config_file; None if there is none."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    files = (home / "accelerate" / f"default_config.{extension}" for extension in ("json", "yaml"))
    return next((str(file) for file in files if file.is_file()), None)
