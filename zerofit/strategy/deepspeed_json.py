"""The DeepSpeed JSON of a strategy, read and checked by itself: known keys, types, values that cannot be used.

deepspeed_config.py fills "auto" in from the recipe, and refuses contradictions.
"""

import json
import os
import re
import typing
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import Problems, UserError, did_you_mean
from zerofit.recipe.files import parse_json, read_text, reject_duplicates
from zerofit.strategy.launch import Launch, tell_deepspeed_of_a_cpu

# Top-level keys of DeepSpeed 0.19's configuration (deepspeed.ai/docs/config-json); DeepSpeed ignores any other.
KNOWN_KEYS = {
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "curriculum_learning", "data_efficiency", "data_types",
    "disable_allgather", "dump_state", "expert_parallel", "flops_profiler", "fp16", "fp32_allreduce",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "memory_breakdown", "optimizer",
    "prescale_gradients", "scheduler", "steps_per_print", "tensorboard", "timers", "torch_autocast",
    "train_batch_size", "train_micro_batch_size_per_gpu", "use_data_before_expert_parallelism", "wandb",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
    "zenflow", "load_universal_checkpoint", "comet", "weight_quantization", "vocabulary_size",
    "load_from_fp32_weights", "sequence_parallel_size", "seq_parallel_communication_data_type", "tensor_parallel",
    "pipeline",
}  # fmt: skip
_RANKS = "every process is a data-parallel one here, and would count samples that others count too"
_ORDER = "the order of samples is this program's"
_ROUNDS = "it rounds to 8 bits or fewer, so that a run would not agree with one process"
_NOT_FP32 = "the optimizer would not keep fp32, in which checkpoints are exact"
_SCALES = "DeepSpeed's ZeRO scales gradients as they are reduced"
_SECOND = "it would open a second run, without the figures of metrics.jsonl"
_LATER = "it updates most weights later, so that a run would not agree with one process"
_UNTRIED = "checkpoints have not been tried with it"
REQUIRED_VALUES = {  # keys: (the only value that can be used, what would go wrong)
    "bf16.bf16_master_weights_and_grads": (False, _NOT_FP32),
    "bf16.bf16_optimizer_states": (False, _NOT_FP32),
    "comet.enabled": (False, f"{_SECOND}: say --with_tracking --report_to comet_ml"),
    "compile.deepcompile": (False, "the blocks are compiled by --torch_compile"),
    "csv_monitor.enabled": (False, _SECOND),
    "curriculum_learning": (None, _ORDER),
    "data_efficiency": (None, _ORDER),
    "expert_parallel": (None, _RANKS),
    "fp16.fp16_master_weights_and_grads": (False, _NOT_FP32),
    "gradient_predivide_factor": (1, _SCALES),
    "optimizer.params.fp32_optimizer_states": (True, _NOT_FP32),
    "prescale_gradients": (False, _SCALES),
    "tensorboard.enabled": (False, f"{_SECOND}: say --with_tracking --report_to tensorboard"),
    "torch_autocast.enabled": (False, "the recipe says in which precision: --precision bf16"),
    "use_data_before_expert_parallelism": (None, _RANKS),
    "wandb.enabled": (False, f"{_SECOND}: say --with_tracking --report_to wandb"),
    "weight_quantization": (None, _ROUNDS),
    "zenflow": (None, _LATER),
    "zero_optimization.compute_grad_norm": (True, "without the gradient's norm no update can be refused"),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed has removed it"),
    "zero_optimization.offload_optimizer.pipeline_read": (False, _UNTRIED),
    "zero_optimization.offload_optimizer.pipeline_write": (False, _UNTRIED),
    "zero_optimization.offload_optimizer.ratio": (1, _UNTRIED),
    "zero_optimization.offload_optimizer.super_offload": (False, _UNTRIED),
    "zero_optimization.zenflow": (None, _LATER),
    "zero_optimization.zero_quantized_gradients": (False, _ROUNDS),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, _ROUNDS),
    "zero_optimization.zero_quantized_weights": (False, _ROUNDS),
}
ROUND_ROBIN = "round_robin_gradients"
QUOTED_VALUE = re.compile(r"true|false|[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
OBJECTS = ("data_types", "bf16", "fp16", "zero_optimization", "optimizer", "tensor_parallel", "pipeline", "scheduler")


def read_deepspeed_config(launch: Launch, collected: Problems | None = None) -> tuple[dict[str, Any], str, list[str]]:
    """Return (configuration, name of its source, notes): the JSON file, or what the accelerate YAML alone says. Raises
    UserError where it cannot be used; `collected` takes the problems of one that is whole but for them."""
    if launch.json_path is None:
        config = _from_yaml_alone(launch.yaml.get("deepspeed_config") or {})
        zero = config["zero_optimization"]
        _, problems = read_section(zero, models_of_sections()["zero_optimization"], "deepspeed_config")
        if problems := problems or _disk_problems(zero):
            raise UserError(f"{launch.source}: {problem}" for problem in problems)
        return config, launch.source, []
    path = Path(launch.json_path)
    if not path.is_file() and launch.config_file:  # launched from another folder: YAML and JSON lie side by side
        path = Path(launch.config_file).resolve().parents[1] / path
    if not path.is_file():
        raise UserError(f"{launch.source}: deepspeed_config_file = {launch.json_path!r}: there is no such file")
    try:
        config = parse_json(read_text(path), object_pairs_hook=reject_duplicates)
    except ValueError as error:  # the message names the line
        hint = "JSON has no comments, no comma behind the last value and no single quotes"
        raise UserError(f"{path}: not valid JSON: {error}. {hint}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected an object with DeepSpeed's settings")
    notes, problems = _read_whole(config)
    if problems:
        has_sections = all(isinstance(config.get(name, {}), dict) for name in OBJECTS)
        problems = [f"{path}: {problem}" for problem in problems]
        if collected is None or not has_sections or "zero_optimization" not in config:
            raise UserError(problems)
        collected.found += problems
    return config, str(path), [f"{path}: {note}" for note in notes]


def _read_whole(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Put a file's content into the form that is used from here on. Returns (notes, problems)."""
    notes = read_quoted(config)
    if config.get("activation_checkpointing"):
        notes.append(
            "activation_checkpointing has no effect on these models: say --gradient_checkpointing, and for "
            "cpu_checkpointing --activation_offload"
        )
    if config.get("scheduler"):
        notes.append("scheduler: the recipe takes its values over, and sets the learning rate")
    if "bfloat16" in config and config.setdefault("bf16", config["bfloat16"]) is not config.pop("bfloat16"):
        notes.append("bfloat16 has no effect beside bf16, which DeepSpeed reads")
    problems = []
    for key, value in config.items():
        if key not in KNOWN_KEYS:
            problems.append(f"{key} is not supported, and would be ignored. {did_you_mean(key, KNOWN_KEYS)}")
        elif isinstance(value, str) and value != "auto" and not key.endswith("data_type"):
            problems.append(f'{key} = "{value}": expected a number, true or false, or an object')
    for name in OBJECTS:
        if not isinstance(config.get(name, {}), dict):
            problems.append(f"{name} = {json.dumps(config[name])}: expected an object, as in ds_configs/3d.json")
    for name, model in models_of_sections().items():
        if isinstance(section := config.get(name), dict):
            translated, found = read_section(section, model, name)
            notes = notes + translated
            problems = problems + found
            if name == "zero_optimization" and not found:
                problems += _disk_problems(section)
    for key, (usable, why) in REQUIRED_VALUES.items():
        stated: Any = config
        for name in key.split("."):
            stated = stated.get(name, usable) if isinstance(stated, dict) else usable
        if stated not in (usable, "auto"):
            problems.append(f"{key} = {json.dumps(stated)}: {why}. Remove it")
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.pop(ROUND_ROBIN, False):
        notes.append(
            f"zero_optimization.{ROUND_ROBIN} is left out: with it DeepSpeed's record of where it keeps each "
            "weight is wrong, and checkpoints and Muon rely on that record"
        )
    if "zero_optimization" not in config:
        problems.append('there is no zero_optimization. Add it with the stage, e.g. {"stage": 2}')
    return notes, problems


def read_quoted(config: dict[str, Any], prefix: str = "") -> list[str]:
    """Put numbers and truth values in the place of strings that look like them: published files have some, and
    DeepSpeed reads only those of some sections. Returns a note on each."""
    notes = []
    for key, value in config.items():
        if isinstance(value, dict):
            notes += read_quoted(value, f"{prefix}{key}.")
        elif isinstance(value, str) and QUOTED_VALUE.fullmatch(value.strip()):
            is_number = value.strip().lower() not in ("true", "false")
            config[key] = float(value) if is_number else value.strip().lower() == "true"
            if is_number and config[key].is_integer():
                config[key] = int(config[key])
            notes.append(f'{prefix}{key} = "{value}" is a string, read as {json.dumps(config[key])}')
    return notes


def _from_yaml_alone(section: dict[str, Any]) -> dict[str, Any]:
    """Read accelerate's own environment variables into the form of a DeepSpeed JSON. `section`: the YAML's, of which
    accelerate hands down all but the paths."""

    def variable(name: str) -> str | None:
        value = os.environ.get(f"ACCELERATE_{name}", "none")
        return None if value == "none" else value

    zero: dict[str, Any] = {"stage": variable("DEEPSPEED_ZERO_STAGE") or 2}
    for part in ("optimizer", "param"):
        if device := variable(f"DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE"):
            zero[f"offload_{part}"] = {"device": device}
            if path := section.get(f"offload_{part}_nvme_path"):
                zero[f"offload_{part}"]["nvme_path"] = path
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": variable("GRADIENT_ACCUMULATION_STEPS") or "auto",
        "gradient_clipping": variable("GRADIENT_CLIPPING") or "auto",
        "zero_optimization": zero,
    }
    read_quoted(config)
    return config


def _disk_problems(zero: dict[str, Any]) -> list[str]:
    """The problems of a zero_optimization section that puts something on disk."""
    problems = []
    weights, optimizer = (zero.get(part) for part in ("offload_param", "offload_optimizer"))
    if isinstance(weights, dict) and weights.get("device") == "nvme":
        problems.append(
            'zero_optimization.offload_param.device = "nvme" is not supported: a resumed run could not restore '
            'weights that are not in memory. Write "cpu"'
        )
    if not isinstance(optimizer, dict) or optimizer.get("device") != "nvme":
        return problems
    if not optimizer.get("nvme_path"):
        problems.append("zero_optimization.offload_optimizer.nvme_path is missing: name a folder of a fast local disk")
    if zero.get("stage") != 3:
        problems.append(
            f'zero_optimization.offload_optimizer.device = "nvme" under stage {zero.get("stage")}: DeepSpeed has it '
            'under stage 3 alone. Use ds_configs/zero3_offload_nvme.json, or write "cpu"'
        )
    return problems


def models_of_sections() -> dict[str, Any]:
    """{section: DeepSpeed's own pydantic model of it, which knows its fields, their other names and older ones}."""
    tell_deepspeed_of_a_cpu()
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensor_parallel": TPTrainingConfig,
        "comms_logger": CommsLoggerConfig,
    }


def read_section(section: dict[str, Any], model: Any, where: str) -> tuple[list[str], list[str]]:
    """Put a section into the form that DeepSpeed's model of it has: each setting under its present name, with a value
    of its type. Returns (notes, problems)."""
    from pydantic import ValidationError

    try:
        read = model(**section)  # without what is "auto"
    except ValidationError as error:
        return [], [_problem_of(detail, model, where) for detail in error.errors()]
    except AssertionError as error:  # a deprecated name and the one that has replaced it
        return [], [f"{where}: {error}. Remove the first"]
    made = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    notes = []
    for name, value in list(section.items()):
        field = model.model_fields.get(name)  # None: the name is an alias
        old = (field.json_schema_extra or {}) if field else {}
        field = model.model_fields.get(old.get("new_param"), field)
        public = (field.alias if field else None) or old.get("new_param", name)
        del section[name]
        if value == "auto":
            section |= {} if old.get("deprecated") else {public: value}
            continue
        is_used = old.get("set_new_param", True) and (made[public] is not None or value is None)
        section |= {public: made[public]} if is_used else {}
        if old.get("deprecated") or json.dumps(made.get(public)) != json.dumps(value):
            read_as = f"read as {public} = {json.dumps(made[public])}" if is_used else f"without effect: see {public}"
            notes.append(f"{where}.{name} = {json.dumps(value)} is {read_as}")
    return notes, []


def _problem_of(detail: Any, model: Any, where: str) -> str:
    """One of pydantic's findings in words; it may be about a field, or about the section as a whole."""
    from pydantic import BaseModel

    path = [str(step) for step in detail["loc"]]
    full = ".".join((where, *path))
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f'{full} = {json.dumps(detail["input"], default=str)}: expected an object, e.g. {{"device": "cpu"}}'
    if detail["type"] != "extra_forbidden":
        return f"{full} = {json.dumps(detail['input'], default=str)}: {detail['msg'].lower()}"
    for name in path[:-1]:  # to the model of the section within
        kinds = (model.model_fields[name].annotation, *typing.get_args(model.model_fields[name].annotation))
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    fields = {field.alias or name: field.json_schema_extra or {} for name, field in model.model_fields.items()}
    current = [name for name, about in fields.items() if not about.get("deprecated")]
    return f"DeepSpeed has no setting {full}. {did_you_mean(path[-1], current)}"


def stated_precision(config: dict[str, Any], source: str) -> str | None:
    """The precision that a DeepSpeed configuration states; None if it leaves it open. Raises UserError if bf16 and
    fp16 are both on."""
    on = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True]
    off = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is False]
    if len(on) == 2:
        raise UserError(f'{source}: bf16 and fp16 are both enabled. Keep one, or write "auto" in both')
    return on[0] if on else ("fp32" if len(off) == 2 else None)
