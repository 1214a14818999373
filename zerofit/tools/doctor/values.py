"""The effective value of everything, and who set it."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerofit.strategy.strategy import Strategy
from zerofit.tools.doctor.doctor_report import Value
from zerofit.tools.doctor.launcher import ExaminedLaunch

# {key of a DeepSpeed JSON: the option that owns it}: what stands there is "auto", or the same.
OWNERS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "bf16.enabled": "precision",
    "fp16.enabled": "precision",
}
# Options that a screen shows whoever has set them; of the others those that somebody has set.
COMMON = tuple(
    (
        "model_name_or_path config_name per_device_train_batch_size gradient_accumulation_steps "
        "global_batch_size learning_rate lr_scheduler_type weight_decay max_grad_norm gradient_checkpointing "
        "output_dir"
    ).split()
)
OF_STRATEGY = tuple(
    (
        "zero_optimization.stage zero_optimization.offload_optimizer.device "
        "zero_optimization.offload_param.device optimizer.type optimizer.params.torch_adam"
    ).split()
)
# {value: the variable of accelerate that states it where there is no DeepSpeed JSON}
IN_THE_SHELL = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "max_grad_norm": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed: zero_optimization.stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "deepspeed: zero_optimization.offload_optimizer.device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "deepspeed: zero_optimization.offload_param.device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
}
DEFAULT, AT_START = "default", "zerofit or accelerate, from the model's size as the run starts"


def launch_values(launch: ExaminedLaunch) -> list[Value]:
    """Of the launcher: processes and machines, and the YAML's own keys."""
    sizes = {"num_processes": launch.world_size, "num_machines": launch.num_machines}
    values = [Value(name, value, launch.sources[name], common=True) for name, value in sizes.items()]
    file = launch.config_file or ""
    return values + [
        Value(f"accelerate: {key}", value, file) for key, value in flat(launch.content) if key not in sizes
    ]


def recipe_values(recipe: Any, strategy: Strategy | None, folder: Path) -> list[Value]:
    """Every option of the recipe, with the value that holds."""
    batches, values = strategy.batches if strategy else None, []
    for field in dataclasses.fields(recipe):
        name = field.name
        if name == "precision" and strategy:
            continue  # below, with all who state it
        value, source = getattr(recipe, name), recipe.source(name)
        source = "this machine" if source == "" else (source or DEFAULT)
        if name == "gradient_accumulation_steps" and batches and value is None:
            value = batches.accumulation
            source = "from global_batch_size" if recipe.global_batch_size else DEFAULT
        if name == "global_batch_size" and batches and value is None:
            value = batches.global_batch
            source = f"{batches.micro_batch} x {batches.accumulation} x {batches.replicas} (see above)"
        if name == "output_dir" and value is None:
            value = str(folder)
        is_common = name in COMMON and value is not None and recipe.trains
        is_common = is_common or source not in (DEFAULT, "this machine")
        values.append(Value(name, value, source, is_common))
    first = [value for name in COMMON for value in values if value.name == name]
    return [*first, *(value for value in values if value not in first)]


def told_by_shell(values: list[Value], launch: ExaminedLaunch) -> list[Value]:
    """The same, where a variable of the shell and not the YAML has set one."""
    left = {
        name: f"{variable} (this shell)" for name, variable in IN_THE_SHELL.items() if variable in launch.leftovers
    }
    return [
        dataclasses.replace(value, source=left[value.name])
        if value.source == launch.config_file and value.name in left
        else value
        for value in values
    ]


def strategy_values(strategy: Strategy, recipe: Any) -> list[Value]:
    """The strategy's precision, and every leaf of the DeepSpeed configuration."""
    stated = strategy.stated[0].source if strategy.stated else DEFAULT
    values = [
        Value("strategy", strategy.name, strategy.source, common=True),
        Value("precision", strategy.precision, stated, common=True),
    ]
    if strategy.deepspeed is None:
        return values
    if strategy.layout.replica_size > 1:
        degrees = {
            "data": strategy.layout.data_size,
            "tensor": strategy.layout.tensor,
            "pipeline": strategy.layout.pipeline,
            "sequence": strategy.layout.sequence,
        }
        shown = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        values.append(Value("layout", shown, strategy.source, common=True))
    raw = stated_json(strategy)
    written = {key.replace("bfloat16.", "bf16."): value for key, value in flat(raw)}
    for key, value in flat(strategy.deepspeed):
        if key in written and written[key] != "auto":
            source = strategy.source
        elif key in OWNERS:
            source = _of_owner(OWNERS[key], recipe, stated)
        elif value == "auto":
            source = AT_START
        else:
            source = "zerofit" if raw else strategy.source
        values.append(Value(f"deepspeed: {key}", value, source, common=key in OF_STRATEGY))
    return values


def _of_owner(owner: str, recipe: Any, precision: str) -> str:
    if owner == "precision":
        return f"precision ({precision})"
    sources = (recipe.source(name) for name in owner.split(", "))
    return f"{owner} ({next(filter(None, sources), DEFAULT)})"


def stated_json(strategy: Strategy) -> dict[str, Any]:
    """The DeepSpeed JSON as it was written; empty where there is none."""
    path = Path(strategy.source)
    return json.loads(path.read_text(encoding="utf-8")) if strategy.launch.json_path and path.is_file() else {}


def flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
