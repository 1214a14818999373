"""What is set and has no effect: in the recipe, in the accelerate YAML, in the DeepSpeed JSON."""

from typing import Any

from train.recipe.errors import UserError
from train.recipe.schedule import make_schedule
from train.strategy.strategy import Strategy
from train.tools.doctor.launcher import STANDARD, Launch
from train.tools.doctor.report import NOTE, WARNING, Finding
from train.tools.doctor.values import flat, stated_json

CONSTANT = ("constant", "constant_with_warmup")
# {options: (when they have no effect, what would change that)}
IDLE = {
    ("report_to", "report_name"): (lambda recipe: not recipe.with_tracking, "Set with_tracking"),
    ("num_train_epochs",): (lambda recipe: recipe.max_train_steps, "max_train_steps overrides it: keep one of them"),
    ("warmup_ratio", "num_warmup_steps"): (
        lambda recipe: recipe.lr_scheduler_type == "constant",
        "constant_with_warmup has a warm-up, constant has none",
    ),
    ("min_lr_ratio", "lr_decay_steps"): (
        lambda recipe: recipe.lr_scheduler_type in CONSTANT,
        "The learning rate stays constant: choose linear, cosine or wsd as lr_scheduler_type, or remove it",
    ),
    ("wsd_decay_ratio",): (
        lambda recipe: recipe.lr_scheduler_type != "wsd",
        "It belongs to lr_scheduler_type = wsd",
    ),
    ("num_beams", "val_max_target_length", "val_min_target_length", "n_val_batch_generations"): (
        lambda recipe: not recipe.predict_with_generate and recipe.trains,
        "Set predict_with_generate, or remove it",
    ),
    ("dataset_config_name",): (lambda recipe: not recipe.dataset_name, "It belongs to dataset_name"),
    ("validation_split_percentage",): (lambda recipe: recipe.validation_file, "validation_file overrides it"),
}
# {section of the YAML: the distributed_type that reads it}
SECTIONS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
ONLY_STAGE_3 = ("offload_param", "sub_group_size")  # and all that begin with stage3_
HOSTS = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter")


def idle_options(recipe: Any) -> list[Finding]:
    """Options of the recipe, in a recipe whose combination of options is right."""
    findings = []
    for names, (is_idle, remedy) in IDLE.items():
        for name in names:
            if hasattr(recipe, name) and recipe.is_changed(name) and is_idle(recipe):
                value = f"{name} = {getattr(recipe, name)} ({recipe.source(name)})"
                findings.append(Finding(WARNING, f"{value} has no effect", remedy))
    return findings + _of_schedule(recipe)


def _of_schedule(recipe: Any) -> list[Finding]:
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
