"""Read the DeepSpeed JSON of a strategy and check its keys, types and values.

deepspeed_config.py then replaces "auto" by the recipe's values, and refuses contradictions.
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
KNOWN_KEYS = set(
    (
        "activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comms_logger communication_data_type "
        "compile csv_monitor curriculum_learning data_efficiency data_types disable_allgather dump_state "
        "expert_parallel flops_profiler fp16 fp32_allreduce gradient_accumulation_steps gradient_clipping "
        "gradient_predivide_factor memory_breakdown optimizer prescale_gradients scheduler steps_per_print "
        "tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu "
        "use_data_before_expert_parallelism wandb wall_clock_breakdown zero_allow_untested_optimizer "
        "zero_force_ds_cpu_optimizer zero_optimization zenflow load_universal_checkpoint comet weight_quantization "
        "vocabulary_size load_from_fp32_weights sequence_parallel_size seq_parallel_communication_data_type "
        "tensor_parallel pipeline"
    ).split()
)
_REASON_RANKS = "every process is a data-parallel one here, and would count samples that others count too"
_REASON_ORDER = "the order of samples is this program's"
_REASON_ROUNDING = "it rounds to 8 bits or fewer, so that a run would not agree with one process"
_REASON_FP32 = "the optimizer would not keep fp32, in which checkpoints are exact"
_REASON_SCALING = "DeepSpeed's ZeRO scales gradients as they are reduced"
_REASON_TRACKER = "it would open a second run, without the figures of metrics.jsonl"
_REASON_DELAY = "it updates most weights later, so that a run would not agree with one process"
_REASON_UNTESTED = "checkpoints have not been tried with it"
REQUIRED_VALUES = {  # keys: (the only value that can be used, what would go wrong)
    "bf16.bf16_master_weights_and_grads": (False, _REASON_FP32),
    "bf16.bf16_optimizer_states": (False, _REASON_FP32),
    "comet.enabled": (False, f"{_REASON_TRACKER}: say --with_tracking --report_to comet_ml"),
    "compile.deepcompile": (False, "the blocks are compiled by --torch_compile"),
    "csv_monitor.enabled": (False, _REASON_TRACKER),
    "curriculum_learning": (None, _REASON_ORDER),
    "data_efficiency": (None, _REASON_ORDER),
    "expert_parallel": (None, _REASON_RANKS),
    "fp16.fp16_master_weights_and_grads": (False, _REASON_FP32),
    "gradient_predivide_factor": (1, _REASON_SCALING),
    "optimizer.params.fp32_optimizer_states": (True, _REASON_FP32),
    "prescale_gradients": (False, _REASON_SCALING),
    "tensorboard.enabled": (False, f"{_REASON_TRACKER}: say --with_tracking --report_to tensorboard"),
    "torch_autocast.enabled": (False, "the recipe says in which precision: --precision bf16"),
    "use_data_before_expert_parallelism": (None, _REASON_RANKS),
    "wandb.enabled": (False, f"{_REASON_TRACKER}: say --with_tracking --report_to wandb"),
    "weight_quantization": (None, _REASON_ROUNDING),
    "zenflow": (None, _REASON_DELAY),
    "zero_optimization.compute_grad_norm": (True, "without the gradient's norm no update can be refused"),
    "zero_optimization.legacy_stage1": (False, "DeepSpeed has removed it"),
    "zero_optimization.offload_optimizer.pipeline_read": (False, _REASON_UNTESTED),
    "zero_optimization.offload_optimizer.pipeline_write": (False, _REASON_UNTESTED),
    "zero_optimization.offload_optimizer.ratio": (1, _REASON_UNTESTED),
    "zero_optimization.offload_optimizer.super_offload": (False, _REASON_UNTESTED),
    "zero_optimization.zenflow": (None, _REASON_DELAY),
    "zero_optimization.zero_quantized_gradients": (False, _REASON_ROUNDING),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, _REASON_ROUNDING),
    "zero_optimization.zero_quantized_weights": (False, _REASON_ROUNDING),
}
ROUND_ROBIN_KEY = "round_robin_gradients"
QUOTED_VALUE = re.compile(r"true|false|[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
SECTIONS = ("data_types", "bf16", "fp16", "zero_optimization", "optimizer", "tensor_parallel", "pipeline", "scheduler")


def read_deepspeed_config(launch: Launch, collected: Problems | None = None) -> tuple[dict[str, Any], str, list[str]]:
    """Return (configuration, name of its source, notes) of the JSON file, or of the accelerate YAML without one.
    Raises UserError where it cannot be used. `collected`: takes the problems instead, if all sections can be read."""
    if launch.json_path is None:
        config = _from_yaml_alone(launch.yaml.get("deepspeed_config") or {})
        zero = config["zero_optimization"]
        _, problems = read_section(zero, section_models()["zero_optimization"], "deepspeed_config")
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
    notes, problems = _read_settings(config)
    if problems:
        has_sections = all(isinstance(config.get(name, {}), dict) for name in SECTIONS)
        problems = [f"{path}: {problem}" for problem in problems]
        if collected is None or not has_sections or "zero_optimization" not in config:
            raise UserError(problems)
        collected.found += problems
    return config, str(path), [f"{path}: {note}" for note in notes]


def _read_settings(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Check a file's content, and translate it in place into DeepSpeed's present names and types. Returns (notes,
    problems)."""
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
    for name in SECTIONS:
        if not isinstance(config.get(name, {}), dict):
            problems.append(f"{name} = {json.dumps(config[name])}: expected an object, as in ds_configs/3d.json")
    for name, model in section_models().items():
        if isinstance(section := config.get(name), dict):
            section_notes, section_problems = read_section(section, model, name)
            notes += section_notes
            problems += section_problems
            if name == "zero_optimization" and not section_problems:
                problems += _disk_problems(section)
    for key, (usable, reason) in REQUIRED_VALUES.items():
        stated: Any = config
        for name in key.split("."):
            stated = stated.get(name, usable) if isinstance(stated, dict) else usable
        if stated not in (usable, "auto"):
            problems.append(f"{key} = {json.dumps(stated)}: {reason}. Remove it")
    zero = config.get("zero_optimization")
    if isinstance(zero, dict) and zero.pop(ROUND_ROBIN_KEY, False):
        notes.append(
            f"zero_optimization.{ROUND_ROBIN_KEY} is left out: with it DeepSpeed's record of where it keeps each "
            "weight is wrong, and checkpoints and Muon rely on that record"
        )
    if "zero_optimization" not in config:
        problems.append('there is no zero_optimization. Add it with the stage, e.g. {"stage": 2}')
    return notes, problems


def read_quoted(config: dict[str, Any], prefix: str = "") -> list[str]:
    """Replace strings that look like numbers or booleans by these, in place: published files have such strings, and
    DeepSpeed converts them in some sections only. Returns a note for each."""
    notes = []
    for key, value in config.items():
        if isinstance(value, dict):
            notes += read_quoted(value, f"{prefix}{key}.")
        elif isinstance(value, str) and QUOTED_VALUE.fullmatch(value.strip()):
            text = value.strip().lower()
            config[key] = text == "true" if text in ("true", "false") else float(text)
            if isinstance(config[key], float) and config[key].is_integer():
                config[key] = int(config[key])
            notes.append(f'{prefix}{key} = "{value}" is a string, read as {json.dumps(config[key])}')
    return notes


def _from_yaml_alone(section: dict[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed configuration from accelerate's environment variables. `section`: the deepspeed_config of the
    YAML, for the paths, which accelerate does not pass on."""

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
    """Return the problems of offload to NVMe in a zero_optimization section."""
    problems = []
    weights = zero.get("offload_param")
    optimizer = zero.get("offload_optimizer")
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


def section_models() -> dict[str, Any]:
    """Return {section: DeepSpeed's own pydantic model of it, with the fields' aliases and deprecated names}."""
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
    """Translate a section in place into the form of DeepSpeed's model of it: each setting has its present name and a
    value of its type. Returns (notes, problems)."""
    from pydantic import ValidationError

    try:
        parsed = model(**section)  # the model drops "auto"
    except ValidationError as error:
        return [], [_problem_of(detail, model, where) for detail in error.errors()]
    except AssertionError as error:  # both a deprecated name and its replacement are given
        return [], [f"{where}: {error}. Remove the first"]
    values = parsed.model_dump(mode="json", by_alias=True, exclude_unset=True)
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
        is_used = old.get("set_new_param", True) and (values[public] is not None or value is None)
        section |= {public: values[public]} if is_used else {}
        if old.get("deprecated") or json.dumps(values.get(public)) != json.dumps(value):
            read_as = (
                f"read as {public} = {json.dumps(values[public])}" if is_used else f"without effect: see {public}"
            )
            notes.append(f"{where}.{name} = {json.dumps(value)} is {read_as}")
    return notes, []


def _problem_of(detail: Any, model: Any, where: str) -> str:
    """Return the message for one of pydantic's errors, which is about a field or about the whole section."""
    from pydantic import BaseModel

    path = [str(step) for step in detail["loc"]]
    full = ".".join((where, *path))
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f'{full} = {json.dumps(detail["input"], default=str)}: expected an object, e.g. {{"device": "cpu"}}'
    if detail["type"] != "extra_forbidden":
        return f"{full} = {json.dumps(detail['input'], default=str)}: {detail['msg'].lower()}"
    for name in path[:-1]:  # go to the model of the nested section
        kinds = (model.model_fields[name].annotation, *typing.get_args(model.model_fields[name].annotation))
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    fields = {field.alias or name: field.json_schema_extra or {} for name, field in model.model_fields.items()}
    current = [name for name, about in fields.items() if not about.get("deprecated")]
    return f"DeepSpeed has no setting {full}. {did_you_mean(path[-1], current)}"


def stated_precision(config: dict[str, Any], source: str) -> str | None:
    """Return the precision that a DeepSpeed configuration states; None if it leaves it open. Raises UserError if bf16
    and fp16 are both enabled."""
    bf16 = config.get("bf16", {}).get("enabled")
    fp16 = config.get("fp16", {}).get("enabled")
    if bf16 is True and fp16 is True:
        raise UserError(f'{source}: bf16 and fp16 are both enabled. Keep one, or write "auto" in both')
    if bf16 is False and fp16 is False:
        return "fp32"
    if bf16 is True:
        return "bf16"
    return "fp16" if fp16 is True else None
