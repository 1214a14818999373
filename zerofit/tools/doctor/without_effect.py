"""What is set and has no effect: in the accelerate YAML and in the DeepSpeed JSON; the run itself tells of options."""

from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.schedule import make_schedule
from zerofit.strategy.strategy import Strategy
from zerofit.tools.doctor.launcher import STANDARD, Launch
from zerofit.tools.doctor.report import NOTE, WARNING, Finding
from zerofit.tools.doctor.values import flat, stated_json

# {section of the YAML: the distributed_type that reads it}
SECTIONS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
ONLY_STAGE_3 = ("offload_param", "sub_group_size")  # and all that begin with stage3_
HOSTS = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")


def schedule_warnings(recipe: Any) -> list[Finding]:
    """What the schedule says of a run whose length is known."""
    if not recipe.max_train_steps:
        return []
    try:
        _, warnings = make_schedule(recipe, recipe.max_train_steps)
    except UserError as error:
        return [Finding.of_message(problem) for problem in error.problems]
    return [Finding(WARNING, text) for text in warnings if "no effect" not in text]


def idle_keys(launch: Launch) -> list[Finding]:
    """Keys of the accelerate YAML."""
    content, file = launch.content, launch.config_file
    kind = str(content.get("distributed_type", "NO"))
    idle = {name: f"It belongs to distributed_type: {owner}, and this is {kind}. Remove it, or change the type"
            for name, owner in SECTIONS.items() if content.get(name) and kind != owner}  # fmt: skip
    if kind not in ("XLA", "TPU"):
        idle |= {name: "It belongs to TPUs. Remove it" for name, value in content.items()
                 if name.startswith("tpu_") and value}  # fmt: skip
    if content.get("machine_rank") and launch.num_machines == 1:
        idle["machine_rank"] = "There is one machine. Remove it"
    section = content.get("deepspeed_config") or {}
    standard = section.get("deepspeed_multinode_launcher", STANDARD) == STANDARD
    for name in HOSTS:
        if section.get(name) and (launch.num_machines == 1 or standard):
            idle[f"deepspeed_config.{name}"] = "Only the deepspeed command reads it, on several machines. Remove it"
    for part in ("optimizer", "param"):
        path = f"offload_{part}_nvme_path"
        if section.get(path) not in (None, "none") and section.get(f"offload_{part}_device") != "nvme":
            idle[f"deepspeed_config.{path}"] = "It belongs to offload to a disk, which is not supported. Remove it"
    findings = [Finding(WARNING, f"{file}: {key} has no effect", remedy) for key, remedy in idle.items()]
    if content.get("debug"):
        findings.append(Finding(WARNING, f"{file}: debug = true: accelerate compares the shapes of every collective, "
                             "which is slow", "Remove it"))  # fmt: skip
    return findings


def idle_settings(strategy: Strategy, launch: Launch) -> list[Finding]:
    """Settings of the DeepSpeed JSON, and those of the YAML that a stage does not read."""
    if strategy.deepspeed is None:
        return []
    source, stage = strategy.source, strategy.deepspeed["zero_optimization"].get("stage")
    section = launch.content.get("deepspeed_config") or {}
    idle = {}
    if stage != 3:
        names = stated_json(strategy).get("zero_optimization") or {}
        idle |= {f"{source}: zero_optimization.{name}": f"It belongs to stage 3, and this is stage {stage}"
                 for name in names if name.startswith("stage3_") or name in ONLY_STAGE_3}  # fmt: skip
        idle |= {f"{launch.config_file}: deepspeed_config.{name}": f"It belongs to stage 3, and this is stage {stage}"
                 for name in ("zero3_init_flag", "zero3_save_16bit_model", "offload_param_device")
                 if section.get(name) not in (None, False, "none")}  # fmt: skip
    for half in ("fp16", "bf16"):
        names = [name for name, value in flat(stated_json(strategy).get(half) or {})
                 if name != "enabled" and value != "auto"]  # fmt: skip
        if names and strategy.precision != half:
            idle[f"{source}: {', '.join(f'{half}.{name}' for name in names)}"] = (
                f"The precision is {strategy.precision}"
            )
    if strategy.launch.json_path and section.get("zero3_init_flag") is False and stage == 3:
        return [*_notes(idle), Finding(
            WARNING, f"{launch.config_file}: zero3_init_flag = false under stage 3: every process loads the full "
            "model before it is sharded", "Write zero3_init_flag: true")]  # fmt: skip
    return _notes(idle)


def _notes(idle: dict[str, str]) -> list[Finding]:
    return [Finding(NOTE, f"{what} has no effect", why) for what, why in idle.items()]
