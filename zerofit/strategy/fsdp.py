"""FSDP2's settings in an accelerate YAML, or among the flags of its launcher: those that a run honours.

accelerate would pass most of them on as environment variables (utils/launch.py, 1.15), but not SYNCS and REDUCE, which
it does not know. So all are read from the YAML.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from zerofit.recipe.errors import UserError, did_you_mean
from zerofit.recipe.files import counted

RESHARDS = "fsdp_reshard_after_forward"
IGNORED = "fsdp_ignored_modules"
EXPERTS = "experts"
VERSION = "fsdp_version"
SYNCS = "fsdp_sync_each_batch"  # accelerate's name for it in GradientAccumulationPlugin
REDUCE = "fsdp_reduce_dtype"  # torch's name for it in MixedPrecisionPolicy
REPLICAS = "parallelism_config_dp_replicate_size"
SHARDS = "parallelism_config_dp_shard_size"
EITHER = ("true", "false")
SIZES = [str(size) for size in range(1, 1025)]
UNITS = "fsdp_transformer_layer_cls_to_wrap"
SIZED_1 = ("parallelism_config_cp_", "parallelism_config_sp_")  # settings of what has no other size than 1 here
ONE_PROCESS = "fsdp2 with one process: there is nobody to share with, so nothing is sharded"
HONOURED: dict[str, Sequence[str]] = {  # the values of each key that a run honours, the usual one first
    VERSION: ("2",),
    RESHARDS: (
        *EITHER,
        *SIZES[1:],
    ),  # true; false: weights stay from the forward pass to the backward pass; or sharers
    REDUCE: ("fp32", "bf16"),
    SYNCS: EITHER,  # false reduces gradients once an update, from full gradients
    IGNORED: (EXPERTS,),  # which are divided among the ranks then
    "fsdp_auto_wrap_policy": ("transformer_based_wrap",),
    "fsdp_state_dict_type": ("sharded_state_dict", "full_state_dict"),  # of accelerate's own checkpoints
    "fsdp_cpu_ram_efficient_loading": EITHER,
    "fsdp_offload_params": ("false",),
    "fsdp_activation_checkpointing": ("false",),
    "fsdp_activation_checkpointing_offload": ("false",),
    REPLICAS: SIZES,
    SHARDS: SIZES,
    "parallelism_config_tp_size": ("1",),
    "parallelism_config_cp_size": ("1",),
    "parallelism_config_sp_size": ("1",),
}


def read_fsdp(environment: Mapping[str, str], content: Mapping[str, Any]) -> dict[str, str] | None:
    """The settings, in lower case, of an accelerate YAML and of its launcher's flags; None: FSDP is not used."""
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    settings = {VERSION: "1"}  # accelerate's default
    for section in (content.get("fsdp_config"), content.get("parallelism_config")):
        for key, value in section.items() if isinstance(section, dict) else ():
            if key in HONOURED and value is not None:
                settings[key] = str(value).lower()
    return settings


def check_replicas(settings: Mapping[str, str], world_size: int, source: str) -> None:
    """Raises UserError where the processes cannot form the replicas that are asked for, or groups that share weights
    between the passes, or where replicas and divided experts are asked for."""
    if world_size == 1:
        return
    replicas, shards = int(settings.get(REPLICAS, "1")), int(settings.get(SHARDS, "1"))
    among, sharers = settings.get(RESHARDS, "true"), world_size // replicas
    if among.isdigit() and (sharers % int(among) or int(among) >= sharers):
        possible = [str(size) for size in range(2, sharers) if sharers % size == 0]
        raise UserError(
            f"{source}: {RESHARDS} = {among} is not a part of the {sharers} processes that share weights. "
            f"Write {', '.join((*possible, *EITHER))}"
        )
    stated = f"{source}: {REPLICAS} = {replicas}"
    if replicas > 1 and settings.get(IGNORED) == EXPERTS:
        raise UserError(f"{stated} does not go together with {IGNORED}: {EXPERTS}. Remove one of them")
    if replicas > 1 and (world_size % replicas or world_size == replicas):
        raise UserError(
            f"{stated} needs a multiple of it as num_processes, {2 * replicas} or more, and there are {world_size}. "
            f"Use --num_processes {2 * replicas}, or write another size"
        )
    if shards not in (1, sharers):
        raise UserError(
            f"{source}: {SHARDS} = {shards}, and {world_size} processes in {counted(replicas, 'replica')} are "
            f"{sharers} each. Remove it"
        )


def fsdp_problems(settings: dict[str, str], content: Mapping[str, Any], source: str) -> list[str]:
    """Return a problem for each setting that a run would not honour."""
    if settings[VERSION] == "1":
        translate = "accelerate to-fsdp2 --config_file FILE --output_file NEW_FILE"
        return [
            f"{source}: {VERSION} = 1 is not supported. Write 2; of FSDP1's keys this makes those of 2: {translate}"
        ]
    problems = []
    for key, value in settings.items():
        if value not in (honoured := HONOURED[key]):
            number = (*filter(EITHER.__contains__, honoured), "a number of processes")
            words = honoured if len(honoured) < 4 else number
            remedy = f"Write {' or '.join(words)}, or use another strategy, such as zero3_offload, tp or sp"
            if key.startswith("fsdp_activation_checkpointing"):
                remedy = "Write false, and say --gradient_checkpointing"
            problems.append(f"{key} = {value} is not supported. {remedy}")
    for key, value in (content.get("fsdp_config") or {}).items():
        if key not in (*HONOURED, UNITS):
            problems.append(f"{key} = {value!r} is of FSDP1, or not supported. Remove it")
    for key in content.get("parallelism_config") or {}:
        if key not in HONOURED and not key.startswith(SIZED_1):
            remedy = did_you_mean(key, (REPLICAS, SHARDS))
            problems.append(f"accelerate has no setting {key} in parallelism_config. {remedy}")
    return [f"{source}: {problem}" for problem in problems]
