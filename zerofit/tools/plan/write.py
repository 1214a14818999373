"""`zerofit plan --write DIR`: the pair and the command of what was predicted, to be launched as they are."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zerofit.launch.command import program_of
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import TaskRecipe
from zerofit.record.terminal import rounded, size
from zerofit.strategy.fsdp import RESHARDS
from zerofit.tools.plan.layouts import labelled, read_pair
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.plan.prediction import Prediction

EACH_MACHINE = "On each of the {} machines, with MACHINE_RANK=0, 1, ... and MAIN_PROCESS_IP, the address of machine 0."
RENDEZVOUS = (
    '--machine_rank "$MACHINE_RANK" --main_process_ip "$MAIN_PROCESS_IP" '
    '--main_process_port "${MAIN_PROCESS_PORT:-29500}"'
)
SET_HERE = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size")


def write_recipe(folder: Path, options: PlanOptions, recipe: type[TaskRecipe]) -> Path:
    """recipe.yaml with each option of the task that was set, in place of a recipe's file and flags."""
    names = [
        field.name for field in dataclasses.fields(recipe) if options.source(field.name) and field.name != "config"
    ]
    file = folder / "recipe.yaml"
    content = {name: getattr(options, name) for name in names if name not in SET_HERE}
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return file


def make_folder(folder: Path) -> Path:
    """Raises UserError: the folder cannot be made, or is a run's, whose recipe.yaml is not replaced."""
    if (folder / "strategy.yaml").is_file() or (folder / "metrics.jsonl").is_file():
        raise UserError(f"write = {str(folder)!r} is the folder of a run. Set --write to another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"write = {str(folder)!r}: {error.strerror}. Set --write to a folder") from None
    return folder


def write_pairs(
    predictions: list[Prediction],
    folder: Path,
    options: PlanOptions,
    recipe: type[TaskRecipe],
    *,
    recipe_file: Path | None = None,
    keeping: Mapping[str, Prediction] | None = None,
) -> list[Path]:
    """NAME.yaml, NAME.json (of ZeRO) and NAME.sh of each prediction; NAME has the degrees of parallelism: tp_x4.

    Args:
        options: of the plan and the recipe, whose flags go into the command.
        recipe: the type of the task's recipe.
        recipe_file: has all options; None: the command has those that were given.
        keeping: {strategy: the prediction where its blocks stay gathered until their backward pass}, which is written
            in place of the first.

    Returns: the scripts.
    """
    flags = ["--config", str(recipe_file)] if recipe_file else options.flags_given(recipe, without=SET_HERE)
    keeping = keeping or {}
    return [_write_pair(each, keeping.get(each.label), folder, options, flags) for each in predictions]


def _write_pair(
    prediction: Prediction, kept: Prediction | None, folder: Path, options: PlanOptions, flags: list[str]
) -> Path:
    pair = read_pair(prediction.strategy)
    file = folder / f"{labelled(pair.source.stem, prediction.degrees).replace(' ', '_')}.yaml"
    if file.resolve() == pair.source.resolve():
        raise UserError(f"write = {str(folder)!r}: {file} is the strategy itself. Set --write to another folder")
    machines, said = -(-prediction.layout.world_size // options.gpus_per_node), _said(kept or prediction)
    changes: dict[str, Any] = {
        "num_machines": machines,
        "num_processes": prediction.layout.world_size,
        "machine_rank": 0,
    }
    if kept is not None:
        changes["fsdp_config"] = {**pair.content["fsdp_config"], RESHARDS: False}
    pair.with_degrees(prediction.degrees).write(file, f"# {said}\n", changes)
    script = file.with_suffix(".sh")
    program = shlex.join([*program_of([options.task]), *flags, *batch_flags(prediction, options)])
    each, rendezvous = (f"# {EACH_MACHINE.format(machines)}\n", f"{RENDEZVOUS} ") if machines > 1 else ("", "")
    launch = f"{each}accelerate launch --config_file {shlex.quote(str(file))} {rendezvous}{program}"
    script.write_text(f"#!/bin/sh\n# {said}\n{launch}\n", encoding="utf-8")
    script.chmod(0o755)
    return script


def batch_flags(prediction: Prediction, options: PlanOptions) -> list[str]:
    """The batches that were predicted, and their length where it was searched. A global batch of the recipe's file
    gives way to the predicted one."""
    words: list[object] = ["--per_device_train_batch_size", prediction.micro_batch]
    words += ["--gradient_accumulation_steps", prediction.accumulation]
    words += ["--block_size", prediction.length] if options.lengths else []
    words += ["--global_batch_size", prediction.global_batch] if options.global_batch_size else []
    return list(map(str, words))


def _said(one: Prediction) -> str:
    speed = f", {rounded(one.tokens_per_s)} tokens/s" if one.timed else ""
    return (
        f"zerofit plan predicts for {one.layout.world_size} processes, micro-batch {one.micro_batch}, accumulation "
        f"{one.accumulation}: {size(one.peak.needed)} of each{speed}"
    )
