"""What is set and has no effect: in the accelerate YAML and in the DeepSpeed JSON; the run itself tells of options."""

import json
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.schedule import make_schedule
from zerofit.strategy.strategy import Strategy
from zerofit.tools.doctor.doctor_report import Finding, error, note, warning
from zerofit.tools.doctor.launcher import ExaminedLaunch

# {section of the YAML: the distributed_type that reads it}
SECTIONS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
ONLY_STAGE_3 = ("offload_param", "sub_group_size")  # and all that begin with stage3_
OF_STAGE_3 = ("zero3_init_flag", "zero3_save_16bit_model")


def schedule_warnings(recipe: Any) -> list[Finding]:
    """What the schedule says of a run whose length is known."""
    if not recipe.max_train_steps:
        return []
    try:
        _, warnings = make_schedule(recipe, recipe.max_train_steps)
    except UserError as refusal:
        return [error(problem) for problem in refusal.problems]
    return [warning(text) for text in warnings if "no effect" not in text]


def idle_keys(launch: ExaminedLaunch) -> list[Finding]:
    """Keys of the accelerate YAML."""
    content, file = launch.content, launch.config_file
    kind = str(content.get("distributed_type", "NO"))
    idle = {name: owner for name, owner in SECTIONS.items() if content.get(name) and kind != owner}
    findings = [
        warning(f"{file}: {name} has no effect. It belongs to distributed_type: {owner}, and this is {kind}")
        for name, owner in idle.items()
    ]
    if content.get("machine_rank") and launch.num_machines == 1:
        findings.append(warning(f"{file}: machine_rank has no effect on one machine. Remove it"))
    return findings


def idle_settings(strategy: Strategy, launch: ExaminedLaunch) -> list[Finding]:
    """Settings of the DeepSpeed JSON, and those of the YAML that a stage does not read."""
    if strategy.deepspeed is None:
        return []
    source, stage = strategy.source, strategy.deepspeed["zero_optimization"].get("stage")
    section, stated, idle = launch.content.get("deepspeed_config") or {}, _stated_json(strategy), {}
    if stage != 3:
        names = [f"{source}: zero_optimization.{name}" for name in stated.get("zero_optimization") or {}]
        names = [name for name in names if ".stage3_" in name or name.endswith(ONLY_STAGE_3)]
        names += [f"{launch.config_file}: deepspeed_config.{name}" for name in OF_STAGE_3 if section.get(name)]
        idle |= dict.fromkeys(names, f"It belongs to stage 3, and this is stage {stage}")
    for half in ("fp16", "bf16"):
        keys = [name for name, value in (stated.get(half) or {}).items() if name != "enabled" and value != "auto"]
        if keys and strategy.precision != half:
            names = ", ".join(f"{half}.{name}" for name in keys)
            idle[f"{source}: {names}"] = f"The precision is {strategy.precision}"
    findings = [note(f"{what} has no effect. {why}") for what, why in idle.items()]
    if strategy.launch.json_path and section.get("zero3_init_flag") is False and stage == 3:
        what = f"{launch.config_file}: zero3_init_flag = false: each process loads the whole model before sharding"
        findings.append(warning(f"{what}. Write zero3_init_flag: true"))
    return findings


def _stated_json(strategy: Strategy) -> dict[str, Any]:
    """The DeepSpeed JSON as it was written; empty where there is none."""
    path = Path(strategy.source)
    return json.loads(path.read_text(encoding="utf-8")) if strategy.launch.json_path and path.is_file() else {}
