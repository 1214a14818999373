"""Read the strategy of a run from the launcher's environment and files, and check it before any data is read."""

from collections.abc import Callable
from dataclasses import replace

from zerofit.model.compilation import is_emulated
from zerofit.recipe.errors import Problems, UserError
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.parse import flag_value
from zerofit.strategy.batches import resolve_batches
from zerofit.strategy.combinations import check_combinations
from zerofit.strategy.deepspeed_config import resolve_config
from zerofit.strategy.deepspeed_json import read_deepspeed_config, stated_precision
from zerofit.strategy.fsdp import ONE_PROCESS, UNITS, check_replicas
from zerofit.strategy.gpus import check_devices
from zerofit.strategy.launch import Launch, check_launch, find_launch, take_named
from zerofit.strategy.layout import ParallelLayout, idle_note, offload_device, take_degrees
from zerofit.strategy.strategy import PrecisionSetting, Strategy

FLAG_OF_LAUNCHER = "accelerate launch --mixed_precision"
OnLayout = Callable[[ParallelLayout], bool]


def read_strategy(recipe: TrainingRecipe, on_layout: OnLayout = lambda layout: False) -> Strategy:
    """Read the launcher's environment, YAML and JSON, and see that recipe, YAML and JSON agree.

    Values that the recipe leaves open and these state are adopted into the recipe. `on_layout`: called with
    the parallel layout before batches are resolved, when the recipe may still adopt a global batch; it returns whether
    the global batch is that of a run that resumes, and stays.

    Raises:
        UserError: all contradictions, with both values and both sources; a GPU that torch does not see.
    """
    launch, problems = find_launch(take_named(recipe)), Problems()
    with problems.collected():
        check_launch(launch)
    with problems.collected():
        check_devices()
    with problems.collected():
        launch = _adopt_float8(launch, recipe)
    read, strategy = _read_deepspeed if launch.deepspeed else _read_torch, None
    with problems.collected():
        strategy = read(launch, recipe, problems, on_layout)
    problems.raise_found()
    assert strategy is not None  # else there were problems
    check_combinations(strategy, recipe)
    recipe.precision = strategy.precision
    return strategy if recipe.trains else strategy.without_optimizer()


def _read_torch(launch: Launch, recipe: TrainingRecipe, problems: Problems, on_layout: OnLayout) -> Strategy:
    """One process, DDP or FSDP2."""
    precision, stated = "fp32", [_of_launcher(launch)]
    with problems.collected():
        precision, stated = _agreed_precision(recipe, stated)
    if launch.fsdp is not None:
        with problems.collected():
            check_replicas(launch.fsdp, launch.world_size, launch.source)
    total_stays = on_layout(ParallelLayout(launch.world_size, launch.rank))
    batches = resolve_batches(recipe, launch.world_size, total_stays=total_stays)
    fsdp = launch.fsdp if launch.world_size > 1 else None
    notes = [ONE_PROCESS] if launch.fsdp is not None and fsdp is None else []
    if UNITS in (launch.yaml.get("fsdp_config") or {}):
        notes.append(f"{launch.source}: {UNITS} has no effect: the blocks of the model are wrapped")
    return Strategy(launch, batches, precision, None, launch.source, tuple(notes), tuple(stated), fsdp=fsdp)


def _read_deepspeed(launch: Launch, recipe: TrainingRecipe, problems: Problems, on_layout: OnLayout) -> Strategy:
    """ZeRO of any stage."""
    config, source, notes = read_deepspeed_config(launch, problems)
    precision, stated = "fp32", [_of_launcher(launch)]
    with problems.collected():
        stated.append(PrecisionSetting(stated_precision(config, source), source))
        precision, stated = _agreed_precision(recipe, stated)
    tensor, pipeline, sequence = take_degrees(config, source)
    layout = ParallelLayout(launch.world_size, launch.rank, tensor, pipeline, sequence)
    config, batches = resolve_config(config, source, recipe, layout, on_layout(layout))
    zero = config["zero_optimization"]
    if zero["stage"] != 3 and offload_device(zero, "offload_param") != "none":
        notes.append(f"{source}: offload_param has no effect under stage {zero['stage']}: weights stay on the device")
    if recipe.trains:
        notes += filter(None, [idle_note(pipeline, batches.accumulation)])
    strategy = Strategy(
        launch, batches, precision, config, source, tuple(notes), tuple(stated), tensor, pipeline, sequence
    )
    return strategy.with_precision(precision)


def _adopt_float8(launch: Launch, recipe: TrainingRecipe) -> Launch:
    """Let `mixed_precision: fp8` mean precision = bf16 and float8, and float8 compile the blocks. Returns the launch
    with its precision. Raises UserError where the recipe says otherwise."""
    if launch.precision == "fp8":
        stated, source = f"mixed_precision = fp8 ({_of_launcher(launch).source})", recipe.source("float8")
        launch = replace(launch, precision="bf16")
        if source is None and recipe.trains:
            recipe.adopt("float8", True, _of_launcher(launch).source)
        elif recipe.trains and not recipe.float8 and not recipe.is_flag("float8"):
            raise UserError(f"float8 is false ({source}), and {stated} says otherwise. Remove one of them")
        elif recipe.trains and not recipe.float8:
            recipe.remember_left_out([f"{stated} is bf16 here: {source} says otherwise"])
    if not (recipe.float8 and recipe.trains):
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


def _of_launcher(launch: Launch) -> PrecisionSetting:
    by_flag = not launch.config_file or bool(flag_value(launch.command, "mixed_precision"))
    return PrecisionSetting(launch.precision, FLAG_OF_LAUNCHER if by_flag else launch.source)


def _agreed_precision(
    recipe: TrainingRecipe, statements: list[PrecisionSetting]
) -> tuple[str, list[PrecisionSetting]]:
    """Return (the precision, those who state it)."""
    stated = [each for each in statements if each.value]
    source = recipe.source("precision")
    if source:
        stated.append(PrecisionSetting(recipe.precision, source))
    flags = [each for each in stated if each.source.startswith(("--", FLAG_OF_LAUNCHER))]
    if flags and len({each.value for each in flags}) == 1:  # a flag wins
        for each in stated:
            if each.value != flags[0].value:
                note = f"precision {each.value} ({each.source}) is left out: {flags[0].source} says otherwise"
                recipe.remember_left_out([note])
        stated = [each for each in stated if each.value == flags[0].value]
    if len({each.value for each in stated}) > 1:
        sides = " and ".join(f"{each.value} ({each.source})" for each in stated)
        raise UserError(
            f"precision is {sides}: make them agree. The recipe's `precision` is its place, "
            "the others may leave it open"
        )
    default = "bf16" if recipe.float8 and recipe.trains else "fp32"
    return (stated[0].value if stated else None) or default, stated
