"""The values that hold, and who set them: what a screen shows. The run's recipe.yaml and strategy.yaml have all."""

import dataclasses
from pathlib import Path
from typing import Any

from zerofit.strategy.strategy import Strategy
from zerofit.tools.doctor.doctor_report import Value
from zerofit.tools.doctor.launcher import ExaminedLaunch

# Options that are shown whoever has set them; of the others those that somebody has set.
COMMON = tuple(
    (
        "model_name_or_path config_name per_device_train_batch_size gradient_accumulation_steps "
        "global_batch_size learning_rate lr_scheduler_type weight_decay max_grad_norm gradient_checkpointing "
        "output_dir"
    ).split()
)
DEFAULT = "default"


def launch_values(launch: ExaminedLaunch) -> list[Value]:
    """Of the launcher: processes and machines."""
    sizes = {"num_processes": launch.world_size, "num_machines": launch.num_machines}
    return [Value(name, value, launch.sources[name]) for name, value in sizes.items()]


def recipe_values(recipe: Any, strategy: Strategy | None, folder: Path) -> list[Value]:
    """The options of the recipe that are common or set, with the values that hold."""
    batches, values = strategy.batches if strategy else None, {}
    for field in dataclasses.fields(recipe):
        name = field.name
        if name == "precision" and strategy:
            continue  # of the strategy, with all who state it
        value, source = getattr(recipe, name), recipe.source(name)
        is_set = bool(source)
        source = "this machine" if source == "" else (source or DEFAULT)
        if name == "gradient_accumulation_steps" and batches and value is None:
            value = batches.accumulation
            source = "from global_batch_size" if recipe.global_batch_size else DEFAULT
        if name == "global_batch_size" and batches and value is None:
            value = batches.global_batch
            source = f"{batches.micro_batch} x {batches.accumulation} x {batches.replicas} (see above)"
        if name == "output_dir" and value is None:
            value = str(folder)
        if is_set or (name in COMMON and value is not None and recipe.trains):
            values[name] = Value(name, value, source)
    first = [values.pop(name) for name in COMMON if name in values]
    return [*first, *values.values()]


def strategy_values(strategy: Strategy) -> list[Value]:
    """The strategy, its precision and its layout."""
    stated = strategy.stated[0].source if strategy.stated else DEFAULT
    values = [
        Value("strategy", strategy.name, strategy.source),
        Value("precision", strategy.precision, stated),
    ]
    if strategy.deepspeed is not None and strategy.layout.replica_size > 1:
        degrees = {
            "data": strategy.layout.data_size,
            "tensor": strategy.layout.tensor,
            "pipeline": strategy.layout.pipeline,
            "sequence": strategy.layout.sequence,
        }
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        values.append(Value("layout", shown, strategy.source))
    return values
