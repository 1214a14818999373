"""The DeepSpeed side of a pair: read strictly, its "auto" filled in from the recipe, contradictions refused.

The recipe owns batch sizes, clipping, precision, the optimizer's settings and the schedule. A JSON that states one of
them must agree with it; where the recipe leaves the option unset, the JSON's value becomes the recipe's.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

from train.recipe.errors import UserError, nearest
from train.strategy.batches import BatchSizes, resolve_batches
from train.strategy.disk import look_at_disk
from train.strategy.launch import Launch, tell_deepspeed_of_a_cpu
from train.strategy.monitors import look_at_monitors
from train.strategy.quoted import read_quoted, still_quoted

ADAM_NAMES = ("adam", "adamw")
# Top-level keys of DeepSpeed 0.19's configuration (deepspeed.ai/docs/config-json); DeepSpeed ignores any other.
KNOWN_KEYS = {
    "activation_checkpointing", "aio", "autotuning", "bf16", "bfloat16", "checkpoint", "comms_logger",
    "communication_data_type", "compile", "csv_monitor", "data_types", "disable_allgather", "dump_state",
    "flops_profiler", "fp16", "fp32_allreduce", "gradient_accumulation_steps", "gradient_clipping",
    "gradient_predivide_factor", "memory_breakdown", "optimizer", "prescale_gradients", "scheduler",
    "steps_per_print", "tensorboard", "timers", "torch_autocast", "train_batch_size",
    "train_micro_batch_size_per_gpu", "wandb", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "zero_optimization", "zenflow", "load_universal_checkpoint", "comet",
    "weight_quantization", "vocabulary_size", "load_from_fp32_weights",
}  # fmt: skip
_ONE_DIMENSION = "every process is a data-parallel one here, and would count samples that others count too"
_DATA = "it belongs to DeepSpeed's own data loader, and the order of samples is this program's"
REFUSED_KEYS = {  # keys that DeepSpeed knows, or has known, and why they cannot be used
    "tensor_parallel": _ONE_DIMENSION, "pipeline": _ONE_DIMENSION, "sequence_parallel_size": _ONE_DIMENSION,
    "seq_parallel_communication_data_type": _ONE_DIMENSION, "expert_parallel": _ONE_DIMENSION,
    "use_data_before_expert_parallelism": _ONE_DIMENSION, "data_efficiency": _DATA, "curriculum_learning": _DATA,
    **dict.fromkeys(("amp", "compression_training", "eigenvalue", "elasticity", "nebula", "progressive_layer_drop",
                     "sparse_attention", "sparse_gradients"), "DeepSpeed 0.19 has removed it"),
}  # fmt: skip
EXAMPLES = {
    "data_types": '{"grad_accum_dtype": "fp32"}',
    "bf16": '{"enabled": "auto"}',
    "fp16": '{"enabled": "auto"}',
    "zero_optimization": '{"stage": 2}',
    "optimizer": '{"type": "AdamW", "params": {"lr": "auto"}}',
    "scheduler": '{"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}',
}
FP32_NAMES = ("fp32", "float32", "float", "torch.float32")  # DeepSpeed's DtypeEnum
SCHEDULERS = {  # DeepSpeed's names -> the recipe's
    "WarmupDecayLR": ("linear",),
    "WarmupLR": ("constant", "constant_with_warmup"),
    "WarmupCosineLR": ("cosine",),
}
LEAST_WARMUP = 2  # of each of them (deepspeed/runtime/lr_schedules.py): 0 is an error there, and 1 becomes 2


def read_config(launch: Launch) -> tuple[dict[str, Any], str, list[str]]:
    """(configuration, name of its source, notes): the JSON file, or what the accelerate YAML alone says.

    Raises:
        UserError: no such file, not JSON, numbers or truth values written as strings (where DeepSpeed does not read
            them as such), unknown keys.
    """
    if launch.json_path is None:
        config = _from_yaml_alone()
        if problems := look_at_disk(config["zero_optimization"]):
            raise UserError(f"{launch.source}: {problem}" for problem in problems)
        return config, launch.source, []
    path = Path(launch.json_path)
    if not path.is_file() and launch.config_file:  # launched from another folder: the pair lies side by side
        path = Path(launch.config_file).resolve().parents[1] / path
    if not path.is_file():
        raise UserError(f"{launch.source}: deepspeed_config_file = {launch.json_path!r}: there is no such file")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected an object with DeepSpeed's settings")
    quoted = read_quoted(config)
    beside, idle = look_at_monitors(config)
    notes = [f"{path}: {note}" for note in [*quoted, *idle]]
    problems = [f"{path}: {problem}" for problem in [*still_quoted(config), *_unknown_keys(config), *beside]]
    for name in EXAMPLES:
        if not isinstance(config.get(name, {}), dict):
            shown = json.dumps(config[name])
            problems.append(f"{path}: {name} = {shown}: expected an object, e.g. {EXAMPLES[name]}")
    problems += [f"{path}: {problem}" for problem in _zero_problems(config.get("zero_optimization"))]
    if "bfloat16" in config:  # DeepSpeed's older name
        config["bf16"] = config.pop("bfloat16")
    if "zero_optimization" not in config:
        problems.append(f'{path}: there is no zero_optimization. Add it with the stage, e.g. {{"stage": 2}}')
    if problems:
        raise UserError(problems)
    return config, str(path), notes


def _from_yaml_alone() -> dict[str, Any]:
    """What accelerate's own environment variables state, in the words of a DeepSpeed JSON."""

    def variable(name: str, default: str) -> str:
        return os.environ.get(f"ACCELERATE_{name}", default)

    def number(text: str, kind: type) -> Any:
        return "auto" if text in ("auto", "none") else kind(text)

    zero: dict[str, Any] = {"stage": int(variable("DEEPSPEED_ZERO_STAGE", "2"))}
    for part in ("optimizer", "param"):
        device = variable(f"DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE", "none")
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
            path = variable(f"DEEPSPEED_OFFLOAD_{part.upper()}_NVME_PATH", "none")
            if path != "none":
                zero[f"offload_{part}"]["nvme_path"] = path
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": number(variable("GRADIENT_ACCUMULATION_STEPS", "auto"), int),
        "gradient_clipping": number(variable("GRADIENT_CLIPPING", "auto"), float),
        "zero_optimization": zero,
    }


def _zero_problems(section: Any) -> list[str]:
    """What DeepSpeed's own parser holds against zero_optimization, keys that it does not know above all."""
    if not isinstance(section, dict):
        return []
    tell_deepspeed_of_a_cpu()
    from deepspeed.runtime.zero import config as deepspeed
    from pydantic import ValidationError

    if section.get("compute_grad_norm") is False:
        return [
            "zero_optimization.compute_grad_norm = false: without the gradient's norm no update can be judged before "
            "the weights move. Remove it"
        ]
    if on_disk := look_at_disk(section):
        return on_disk
    stated = {key: value for key, value in section.items() if value != "auto"}
    try:
        deepspeed.DeepSpeedZeroConfig(**stated)
    except ValidationError as error:
        models = {
            "offload_param": deepspeed.DeepSpeedZeroOffloadParamConfig,
            "offload_optimizer": deepspeed.DeepSpeedZeroOffloadOptimizerConfig,
        }
        return [_zero_problem(found, models, deepspeed.DeepSpeedZeroConfig) for found in error.errors()]
    return []


def _zero_problem(found: dict, parts: dict[str, type], whole: type) -> str:
    """One of pydantic's findings in words; it may be about a field, or about the section as a whole."""
    path = [str(step) for step in found["loc"]]
    where = ".".join(("zero_optimization", *path))
    if found["type"] != "extra_forbidden":
        return f"{where} = {json.dumps(found['input'], default=str)}: {found['msg'].lower()}"
    known = parts.get(path[0], whole) if len(path) > 1 else whole
    fields = {*known.model_fields, *(field.alias for field in known.model_fields.values() if field.alias)}
    close = nearest(path[-1], fields)
    return f"DeepSpeed knows no {where}. " + (f"Did you mean {close}?" if close else "Remove it")


def _unknown_keys(config: dict) -> list[str]:
    problems = []
    problems += [f"{key} is not supported: {REFUSED_KEYS[key]}. Remove it" for key in config.keys() & REFUSED_KEYS]
    for key in config.keys() - KNOWN_KEYS - REFUSED_KEYS.keys():
        close = nearest(key, KNOWN_KEYS)
        remedy = f"Did you mean {close}?" if close else "Remove it"
        problems.append(f"DeepSpeed knows no {key} and would ignore it. {remedy}")
    return sorted(problems)


# ------------------------------------------------------------------------------------------------ filling and checking


def resolve_config(config: dict, source: str, recipe, launch: Launch) -> tuple[dict, BatchSizes]:
    """Fill every "auto" that the recipe owns, in a copy.

    The number of updates and so the scheduler's own "auto" are not known yet: see `resolve_scheduler`.

    Raises:
        UserError: every statement of the configuration that the recipe contradicts, both values and sources named.
    """
    config = json.loads(json.dumps(config))
    owner = _Owner(config, source, recipe)
    owner.claim("per_device_train_batch_size", "train_micro_batch_size_per_gpu")
    accumulation = config.get("gradient_accumulation_steps", "auto")
    if recipe.global_batch_size is None and recipe.gradient_accumulation_steps is None and accumulation == "auto":
        owner.claim("global_batch_size", "train_batch_size", default="auto")  # the accumulation follows from it
    if recipe.global_batch_size is None:
        owner.claim("gradient_accumulation_steps", "gradient_accumulation_steps", default=1)
    owner.claim("max_grad_norm", "gradient_clipping")
    _claim_optimizer(owner)
    if config["zero_optimization"].get("stage") not in (1, 2, 3):
        stage = json.dumps(config["zero_optimization"].get("stage"))
        owner.problems.append(f"{source}: zero_optimization.stage = {stage}: it must be 1, 2 or 3. For 0 use ddp.yaml")
    owner.stop_if_wrong()
    adopt_scheduler(config, source, recipe)

    batches = resolve_batches(recipe, launch.world_size)
    owner.fill("train_micro_batch_size_per_gpu", batches.micro_batch, "per_device_train_batch_size")
    owner.fill("gradient_accumulation_steps", batches.accumulation, "gradient_accumulation_steps")
    owner.fill("train_batch_size", batches.global_batch, "micro-batch * accumulation * processes")
    owner.fill("gradient_clipping", recipe.max_grad_norm, "max_grad_norm")
    zero = config["zero_optimization"]
    if zero.get("stage") == 3:
        owner.fill(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
            "saving the model, else its tensors are empty",
        )
    owner.stop_if_wrong()
    config.setdefault("steps_per_print", 2**31)
    return config, batches


def _claim_optimizer(owner: "_Owner") -> None:
    optimizer = owner.config.get("optimizer")
    if not optimizer:
        return
    if str(optimizer.get("type", "")).lower() not in ADAM_NAMES:
        known = "the recipe's optimizer is AdamW. Name AdamW, or remove the block: then the recipe's own is used"
        owner.problems.append(f"{owner.source}: optimizer.type = {optimizer.get('type')!r}: {known}")
        return
    params = optimizer.setdefault("params", {})
    for key in ("lr", "weight_decay", "betas", "eps"):
        params.setdefault(key, "auto")
    if params["betas"] != "auto" and not (isinstance(params["betas"], list) and len(params["betas"]) == 2):
        owner.problems.append(f"{owner.source}: optimizer.params.betas = {params['betas']!r}: expected two numbers")
        return
    if params["betas"] != "auto":
        owner.claim_value("adam_beta1", "optimizer.params.betas[0]", params["betas"][0])
        owner.claim_value("adam_beta2", "optimizer.params.betas[1]", params["betas"][1])
    params["betas"] = [owner.recipe.adam_beta1, owner.recipe.adam_beta2]
    owner.claim("learning_rate", "optimizer.params.lr")
    owner.claim("weight_decay", "optimizer.params.weight_decay")
    owner.claim("adam_epsilon", "optimizer.params.eps")


class _Owner:
    """Settles who says what: fills "auto", adopts what the recipe leaves unset, collects contradictions."""

    def __init__(self, config: dict, source: str, recipe):
        self.config, self.source, self.recipe = config, source, recipe
        self.problems: list[str] = []

    def claim(self, option: str, key: str, default: Any = None) -> None:
        """The recipe owns `key` as `option`: agree with it, or adopt the stated value if the option is unset."""
        node, name = _node(self.config, key)
        stated = node.get(name, "auto")
        if stated == "auto":
            value = getattr(self.recipe, option)
            node[name] = default if value is None else value
        else:
            self.claim_value(option, key, stated)

    def claim_value(self, option: str, key: str, stated: Any) -> None:
        if isinstance(stated, bool) or not isinstance(stated, (int, float)):
            self.problems.append(f'{self.source}: {key} = {stated!r}: expected a number or "auto"')
            return
        if self.recipe.source(option) is None:
            self.recipe.adopt(option, stated, self.source)
            return
        ours = getattr(self.recipe, option)
        if ours is None or not math.isclose(stated, ours, rel_tol=1e-9):
            self.problems.append(self._contradiction(key, stated, option, ours))

    def fill(self, key: str, value: Any, what: str) -> None:
        """Set `key` where it is absent or "auto"; anything else than `value` is a contradiction."""
        node, name = _node(self.config, key)
        stated = node.get(name, "auto")
        if stated == "auto":
            node[name] = value
        elif stated != value:
            self.problems.append(self._contradiction(key, stated, what, value))

    def _contradiction(self, key: str, stated: Any, option: str, ours: Any) -> str:
        where = self.recipe.source(option) if hasattr(self.recipe, option) else None
        return (
            f"{self.source} says {key} = {json.dumps(stated)}, and {option} = {json.dumps(ours)}"
            f'{f" ({where})" if where else ""}. Make them agree, or write "auto" in the DeepSpeed configuration'
        )

    def stop_if_wrong(self) -> None:
        if self.problems:
            raise UserError(self.problems)


def _node(config: dict, key: str) -> tuple[dict, str]:
    *parents, name = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    return config, name


def stated_precision(config: dict, source: str) -> str | None:
    """The precision that a DeepSpeed configuration states; None if it leaves it open.

    Raises:
        UserError: bf16 and fp16 are both on.
    """
    on = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True]
    off = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is False]
    if len(on) == 2:
        raise UserError(f'{source}: bf16 and fp16 are both enabled. Keep one, or write "auto" in both')
    return on[0] if on else ("fp32" if len(off) == 2 else None)


def refuse_another_optimizer(config: dict, source: str, precision: str) -> None:
    """Refuse what makes DeepSpeed take its BF16_Optimizer (runtime/engine.py, _do_optimizer_sanity_check).

    That one has neither the norm nor the decision about overflow between which an update is judged (engine.py).

    Raises:
        UserError: gradients are to be added up in fp32 under ZeRO-1 and bf16, without offload.
    """
    zero, accumulated = config["zero_optimization"], config.get("data_types", {}).get("grad_accum_dtype")
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if zero.get("stage") == 1 and precision == "bf16" and accumulated in FP32_NAMES and not offloads:
        raise UserError(
            f"{source}: data_types.grad_accum_dtype = {accumulated!r} under ZeRO-1 and bf16 is not supported: there "
            "DeepSpeed uses another optimizer, in which no update can be refused. Set zero_optimization.stage to 2, "
            "or remove grad_accum_dtype"
        )


def adopt_scheduler(config: dict, source: str, recipe) -> None:
    """Take shape and warm-up from a scheduler block where the recipe leaves them open.

    Raises:
        UserError: the block names a schedule that DeepSpeed does not have, or another than the recipe.
    """
    scheduler = config.get("scheduler")
    if not scheduler:
        return
    kind, shape = scheduler.get("type"), recipe.lr_scheduler_type
    if kind not in SCHEDULERS or (shape not in SCHEDULERS[kind] and recipe.source("lr_scheduler_type")):
        close = nearest(str(kind), SCHEDULERS) if kind not in SCHEDULERS else None
        raise UserError(
            f"{source} says scheduler.type = {kind!r}{f' (did you mean {close}?)' if close else ''}, and "
            f"lr_scheduler_type = {shape!r} ({recipe.source('lr_scheduler_type') or 'default'}). "
            "Make them agree, or remove the block: then the recipe's schedule is used"
        )
    if shape not in SCHEDULERS[kind]:
        recipe.adopt("lr_scheduler_type", SCHEDULERS[kind][-1], source)
    warmup = scheduler.setdefault("params", {}).get("warmup_num_steps", "auto")
    if warmup != "auto" and recipe.source("num_warmup_steps") is None and recipe.warmup_ratio is None:
        recipe.adopt("num_warmup_steps", warmup, source)


def resolve_scheduler(config: dict, source: str, recipe, num_updates: int, warmup: int) -> list[str]:
    """Fill a scheduler block from the recipe, in place, counted in updates. Returns notes.

    Raises:
        UserError: they disagree.
    """
    scheduler = config.get("scheduler")
    if not scheduler:
        return []
    owner, kind = _Owner(config, source, recipe), scheduler["type"]
    owner.fill("scheduler.params.warmup_num_steps", warmup, "num_warmup_steps")
    owner.fill("scheduler.params.warmup_type", "linear", "the recipe's warm-up")
    if kind == "WarmupCosineLR":
        owner.fill("scheduler.params.warmup_min_ratio", 0, "the recipe's warm-up start")
        owner.fill("scheduler.params.cos_min_ratio", recipe.min_lr_ratio, "min_lr_ratio")
    else:
        owner.fill("scheduler.params.warmup_min_lr", 0, "the recipe's warm-up start")
        owner.fill("scheduler.params.warmup_max_lr", recipe.learning_rate, "learning_rate")
    if kind != "WarmupLR":
        decays = recipe.lr_decay_steps or num_updates
        owner.fill("scheduler.params.total_num_steps", decays, "lr_decay_steps or else the number of updates")
    owner.stop_if_wrong()
    if warmup >= LEAST_WARMUP:
        return []
    del config["scheduler"]
    return [
        f"{source}: DeepSpeed's {kind} warms up for at least {LEAST_WARMUP} updates, and this run for {warmup}: the "
        f"learning rate follows the recipe's own curve ({recipe.lr_scheduler_type}), and the block is not used"
    ]
