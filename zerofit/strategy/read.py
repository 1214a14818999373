"""Read the strategy of a run from the launcher's environment and files, and check it before any data is read.
Settings of the recipe and of the strategy that do not go together are refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

from zerofit.model.compilation import is_emulated
from zerofit.recipe.errors import Problems, UserError
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.parse import flag_value
from zerofit.strategy.batches import resolve_batches
from zerofit.strategy.deepspeed_config import resolve_config
from zerofit.strategy.deepspeed_json import read_deepspeed_config, stated_precision
from zerofit.strategy.gpus import check_devices
from zerofit.strategy.launch import WRAP_KEY, Launch, check_launch, check_replicas, find_launch, take_strategy_flag
from zerofit.strategy.layout import (
    OFFLOAD_KEYS,
    PIPELINE_KEY,
    SEQUENCE_KEY,
    TENSOR_KEY,
    ParallelLayout,
    offload_device,
    take_degrees,
)
from zerofit.strategy.optimizers import SHARDABLE
from zerofit.strategy.strategy import PrecisionSetting, Strategy

Conflict = tuple[str, str, str]  # a setting with its source, what does not go together with it, the remedy

UNUSED_PARTITIONS = {"zero_hpz_partition_size": 1, "mics_shard_size": -1}  # ZeRO keys, the value that turns each off
MASKED_ATTENTION = ("eager", "flex_attention")  # kinds that need a mask made by the model
REMOVE_ONE = "Remove one of them"
MUON_REMEDY = "Use --strategy zero1, zero2, zero3 or fsdp2, or --optim adamw"
LAUNCHER_PRECISION_FLAG = "accelerate launch --mixed_precision"
OnLayout = Callable[[ParallelLayout], bool]


def check_combinations(strategy: Strategy, recipe: TrainingRecipe) -> None:
    """Raises UserError with every pair of settings that do not go together."""
    checks = (_parallelism_conflicts, _sharding_conflicts, _optimizer_conflicts, _float8_conflicts)
    if conflicts := [conflict for check in checks for conflict in check(strategy, recipe)]:
        raise UserError(
            f"{setting} does not go together with {rival}. {remedy}" for setting, rival, remedy in conflicts
        )


def _parallelism_conflicts(strategy: Strategy, recipe: TrainingRecipe) -> Iterator[Conflict]:
    """Yield the conflicts of tensor, pipeline and sequence parallelism; those of all three name the first in use."""
    zero = strategy.zero
    precision = strategy.precision
    degrees = {SEQUENCE_KEY: strategy.sequence, f"{TENSOR_KEY}.autotp_size": strategy.tensor}
    degrees[f"{PIPELINE_KEY}.stages"] = strategy.pipeline
    stated = {key: f"{strategy.source}: {key} = {degree}" for key, degree in degrees.items() if degree > 1}
    if not stated:
        return
    first = next(iter(stated.values()))
    sum_dtype = f"data_types.grad_accum_dtype in {precision}" if _gradient_sum_dtype(strategy) else None
    if recipe.lora:
        yield first, f"lora ({recipe.source('lora')})", "Remove it, or use another strategy, such as zero3"
    if recipe.compiles == "model" and strategy.sequence == 1:
        yield first, f"torch_compile = model ({recipe.source('torch_compile')})", "Use --torch_compile blocks"
    settings = [part for part in OFFLOAD_KEYS if offload_device(zero, part) != "none"]
    settings += [name for name, unused in UNUSED_PARTITIONS.items() if zero.get(name, unused) != unused]
    yield from ((first, f"zero_optimization.{setting}", REMOVE_ONE) for setting in settings)
    if strategy.sequence > 1:
        if recipe.compiles:  # DeepSpeed's exchange of heads looks up a group that a graph does not have
            yield first, f"torch_compile ({recipe.source('torch_compile')})", REMOVE_ONE
        if recipe.attn_implementation in MASKED_ATTENTION:
            yield first, f"attn_implementation = {recipe.attn_implementation}", "Use --attn_implementation sdpa"
        # Without it ZeRO-3 divides the gradients of large and small parameters by different numbers (zero/stage3.py).
        if zero.get("reduce_scatter") is False:
            yield first, "zero_optimization.reduce_scatter = false", REMOVE_ONE
        # BF16_Optimizer asks for groups that do not exist.
        if sum_dtype and zero.get("stage") == 1 and precision == "bf16":
            yield first, sum_dtype, "Remove it"
        if len(stated) > 1:
            yield first, " and ".join(key for key in stated if key != SEQUENCE_KEY), REMOVE_ONE
    if strategy.pipeline > 1:
        stages = stated[f"{PIPELINE_KEY}.stages"]
        if zero.get("stage") in (2, 3):
            setting = f"zero_optimization.stage = {zero['stage']}"
            yield stages, f"{setting}: gradients of many micro-batches are added up in full", "Write 1"
        if zero.get("overlap_comm"):  # DeepSpeed turns it off
            setting = "zero_optimization.overlap_comm"
            yield stages, f"{setting}: gradients are exchanged after the last micro-batch", "Remove it"
        if getattr(recipe, "predict_file", None):
            yield stages, "predict_file: no rank has all layers", "Use a strategy without it, such as tp or zero3"
        # The first and last stage would not add up the gradient of a tied vocabulary: runtime/pipe/engine.py reads
        # gradients that stage_1_and_2.py has moved.
        if sum_dtype and precision == "fp16":
            yield stages, sum_dtype, "Remove it"


def _gradient_sum_dtype(strategy: Strategy) -> str | None:
    """Return the dtype in which the JSON lets gradients be added up; None without that setting."""
    return ((strategy.deepspeed or {}).get("data_types") or {}).get("grad_accum_dtype")


def _sharding_conflicts(strategy: Strategy, recipe: TrainingRecipe) -> Iterator[Conflict]:
    """Yield the conflicts of FSDP2, of ZeRO-3, of an optimizer on NVMe, and of a gradient dtype below fp32."""
    source = strategy.source
    config = strategy.deepspeed or {}
    compile_source = recipe.source("torch_compile")
    if strategy.launch.fsdp is not None:  # also with a single process
        fsdp = f"{source}: FSDP"
        if strategy.precision == "fp16":
            yield fsdp, "precision = fp16", "Use --precision bf16, or --strategy zero3"
        if recipe.compiles == "model":
            yield fsdp, f"torch_compile = model ({compile_source})", "Use --torch_compile blocks"
        if recipe.quantised:
            yield fsdp, f"{recipe.quantised} ({recipe.source(recipe.quantised)})", "Use zero2.yaml or ddp.yaml"
    if recipe.compiles and strategy.shards_parameters:
        remedy = (
            "DeepSpeed gathers the weights of each module as it is called, which cuts a layer's graph into pieces. "
            "Use --strategy fsdp2, which gathers those of a layer, or remove it"
        )
        yield f"{source}: zero_optimization.stage = 3", f"torch_compile ({compile_source})", remedy
    if recipe.ema_decay and strategy.optimizer_device == "nvme":
        remedy = "DeepSpeed brings moments from the disk, and no other tensors. Use --strategy zero3_offload"
        yield f"{source}: offload_optimizer.device = nvme", f"ema_decay ({recipe.source('ema_decay')})", remedy
    dtypes = {key: config.get(key) for key in ("communication_data_type", "seq_parallel_communication_data_type")}
    dtypes["data_types.grad_accum_dtype"] = _gradient_sum_dtype(strategy)
    for key, dtype in dtypes.items():
        if strategy.precision == "fp32" and dtype not in (None, "fp32"):
            yield f"{source}: {key} = {json.dumps(dtype)}", "precision = fp32", "Remove it: it rounds gradients"


def _optimizer_conflicts(strategy: Strategy, recipe: TrainingRecipe) -> Iterator[Conflict]:
    """Yield the conflicts of optimizers that need full matrices, or the same blocks of them as in one process."""
    stated = f"optim = {recipe.optim} ({recipe.source('optim')})"
    source = strategy.source
    if recipe.optim not in SHARDABLE and (strategy.deepspeed is not None or strategy.fully_shards):
        reasons = {
            "adafactor": "It keeps means over the rows and columns of each matrix, which no process has in full",
            "adamw_8bit": "It rounds blocks of 256 elements, which would be other ones",
        }
        yield stated, source, f"{reasons[recipe.optim]}. Use --strategy ddp, or one process; or --optim adamw"
    if recipe.optim != "muon" or not recipe.trains:
        return
    obstacles = {
        "lora, whose two factors it would make orthogonal, and not their product": recipe.lora,
        f"offload ({source}), which makes its matrix products on the CPU": any(
            offload_device(strategy.zero, part) != "none" for part in OFFLOAD_KEYS
        ),
        f"tensor parallelism ({source}), which cuts its matrices": strategy.tensor > 1,
        f"a pipeline ({source}), whose stages have different matrices": strategy.pipeline > 1,
        f"experts that are divided among the ranks ({source})": strategy.divides_experts,
    }
    yield from ((stated, obstacle, MUON_REMEDY) for obstacle, is_present in obstacles.items() if is_present)


def _float8_conflicts(strategy: Strategy, recipe: TrainingRecipe) -> Iterator[Conflict]:
    """Yield the conflicts of training in float8."""
    if not (recipe.float8 and recipe.trains):
        return
    stated = f"float8 ({recipe.source('float8')})"
    source = strategy.source
    obstacles = {
        "lora": recipe.lora,
        "activation_offload": recipe.activation_offload,
        f"tensor parallelism ({source})": strategy.tensor > 1,
        f"pipeline parallelism ({source})": strategy.pipeline > 1,
        f"{source}, which divides experts among the ranks": strategy.divides_experts,
    }
    yield from ((stated, obstacle, REMOVE_ONE) for obstacle, is_present in obstacles.items() if is_present)
    if strategy.precision != "bf16":
        yield stated, f"precision = {strategy.precision}", "Use --precision bf16"


def read_strategy(recipe: TrainingRecipe, on_layout: OnLayout = lambda layout: False) -> Strategy:
    """Read the launcher's environment, YAML and JSON, and check that recipe, YAML and JSON agree.

    The recipe adopts values that it leaves open and these state. `on_layout` is called with the parallel layout before
    batches are resolved; it may let the recipe adopt the global batch of the run that resumes, and returns whether it
    did, so that the global batch is kept.

    Raises:
        UserError: all contradictions, with both values and both sources; a GPU that torch does not see.
    """
    launch = find_launch(take_strategy_flag(recipe))
    problems = Problems()
    with problems.collected():
        check_launch(launch)
    with problems.collected():
        check_devices()
    with problems.collected():
        launch = _adopt_float8(launch, recipe)
    read_engine = _read_deepspeed if launch.deepspeed else _read_torch
    strategy = None
    with problems.collected():
        strategy = read_engine(launch, recipe, problems, on_layout)
    problems.raise_found()
    assert strategy is not None  # else there were problems
    check_combinations(strategy, recipe)
    recipe.precision = strategy.precision
    if recipe.trains or strategy.deepspeed is None:
        return strategy
    config = {key: value for key, value in strategy.deepspeed.items() if key not in ("optimizer", "scheduler")}
    zero = {key: value for key, value in strategy.zero.items() if key != "offload_optimizer"}
    return replace(strategy, deepspeed={**config, "zero_optimization": zero})


def _read_torch(launch: Launch, recipe: TrainingRecipe, problems: Problems, on_layout: OnLayout) -> Strategy:
    """Return the strategy of a launch without DeepSpeed: one process, DDP or FSDP2."""
    precision = "fp32"
    stated = [_launcher_precision(launch)]
    with problems.collected():
        precision, stated = _agreed_precision(recipe, stated)
    if launch.fsdp is not None:
        with problems.collected():
            check_replicas(launch.fsdp, launch.world_size, launch.source)
    keeps_total = on_layout(ParallelLayout(launch.world_size, launch.rank))
    batches = resolve_batches(recipe, launch.world_size, total_stays=keeps_total)
    fsdp = launch.fsdp if launch.world_size > 1 else None
    notes = []
    if launch.fsdp is not None and fsdp is None:
        notes.append("fsdp2 with one process: there is nobody to share with, so nothing is sharded")
    if WRAP_KEY in (launch.yaml.get("fsdp_config") or {}):
        notes.append(f"{launch.source}: {WRAP_KEY} has no effect: the blocks of the model are wrapped")
    return Strategy(launch, batches, precision, None, launch.source, tuple(notes), tuple(stated), fsdp=fsdp)


def _read_deepspeed(launch: Launch, recipe: TrainingRecipe, problems: Problems, on_layout: OnLayout) -> Strategy:
    """Return the strategy of a launch with DeepSpeed: ZeRO of any stage, tensor, pipeline, sequence parallelism."""
    config, source, notes = read_deepspeed_config(launch, problems)
    precision = "fp32"
    stated = [_launcher_precision(launch)]
    with problems.collected():
        stated.append(PrecisionSetting(stated_precision(config, source), source))
        precision, stated = _agreed_precision(recipe, stated)
    tensor, pipeline, sequence = take_degrees(config, source)
    layout = ParallelLayout(launch.world_size, launch.rank, tensor, pipeline, sequence)
    config, batches = resolve_config(config, source, recipe, layout, on_layout(layout))
    zero = config["zero_optimization"]
    if zero["stage"] != 3 and offload_device(zero, "offload_param") != "none":
        notes.append(f"{source}: offload_param has no effect under stage {zero['stage']}: weights stay on the device")
    steps = batches.accumulation
    if recipe.trains and steps < pipeline:
        # The part of an update's time in which a stage waits for others (Huang et al. 2019, GPipe).
        idle = f"(p - 1)/(m + p - 1) = {(pipeline - 1) / (steps + pipeline - 1):.0%}"
        notes.append(
            f"warning: gradient_accumulation_steps = {steps} is below the {pipeline} stages of the pipeline, which "
            f"stand idle {idle} of the time. Use a smaller --per_device_train_batch_size, or a larger "
            "--global_batch_size"
        )
    strategy = Strategy(
        launch, batches, precision, config, source, tuple(notes), tuple(stated), tensor, pipeline, sequence
    )
    return strategy.with_precision(precision)


def _adopt_float8(launch: Launch, recipe: TrainingRecipe) -> Launch:
    """Translate `mixed_precision: fp8` into precision = bf16 and float8, and let float8 compile the blocks. Returns
    the launch with its precision. Raises UserError where the recipe says otherwise."""
    stated, launcher = _launcher_precision(launch)
    if stated == "fp8":
        launch = replace(launch, precision="bf16")
    if not recipe.trains:
        return launch
    source = recipe.source("float8")
    if stated == "fp8" and source is None:
        recipe.adopt("float8", True, launcher)
    elif stated == "fp8" and not recipe.float8:
        setting = f"mixed_precision = fp8 ({launcher})"
        if not recipe.is_flag("float8"):
            raise UserError(f"float8 is false ({source}), and {setting} says otherwise. Remove one of them")
        recipe.remember_left_out([f"{setting} is bf16 here: {source} says otherwise"])
    if not recipe.float8:
        return launch
    source = recipe.source("float8") or "float8"
    if str(recipe.torch_compile) == "auto":
        recipe.adopt("torch_compile", "blocks", source)
    elif not recipe.compiles and not is_emulated():
        raise UserError(
            f"torch_compile = false ({recipe.source('torch_compile')}): float8 ({source}) is slower than bf16 where "
            "its roundings are not compiled. Remove one of them"
        )
    return launch


def _launcher_precision(launch: Launch) -> PrecisionSetting:
    """Return the precision that the launcher states, by its flag or its YAML."""
    by_flag = not launch.config_file or bool(flag_value(launch.command, "mixed_precision"))
    return PrecisionSetting(launch.precision, LAUNCHER_PRECISION_FLAG if by_flag else launch.source)


def _agreed_precision(
    recipe: TrainingRecipe, statements: list[PrecisionSetting]
) -> tuple[str, list[PrecisionSetting]]:
    """Return (the precision, the settings that state it). Raises UserError where settings differ, and no flag
    decides."""
    stated = [setting for setting in statements if setting.value]
    if source := recipe.source("precision"):
        stated.append(PrecisionSetting(recipe.precision, source))
    flags = [setting for setting in stated if setting.source.startswith(("--", LAUNCHER_PRECISION_FLAG))]
    if len({flag.value for flag in flags}) == 1:  # a flag overrides files
        value, source = flags[0]
        for setting in stated:
            if setting.value != value:
                note = f"precision {setting.value} ({setting.source}) is left out: {source} says otherwise"
                recipe.remember_left_out([note])
        stated = [setting for setting in stated if setting.value == value]
    if len({setting.value for setting in stated}) > 1:
        sides = " and ".join(f"{setting.value} ({setting.source})" for setting in stated)
        raise UserError(
            f"precision is {sides}: make them agree. The recipe's `precision` is its place, "
            "the others may leave it open"
        )
    default = "bf16" if recipe.float8 and recipe.trains else "fp32"
    return (stated[0].value if stated else None) or default, stated
