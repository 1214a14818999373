"""The DeepSpeed configuration of a run: "auto" is replaced by the recipe's values, contradictions are refused."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from zerofit.recipe.base import find_broken_rule
from zerofit.recipe.errors import Problems, did_you_mean
from zerofit.recipe.options import TrainingRecipe
from zerofit.strategy.batches import BatchSizes, resolve_batches
from zerofit.strategy.layout import ParallelLayout

BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "global_batch_size", "tokens_per_batch")
ADAM_NAMES = ("adam", "adamw")
ADAM_OPTIONS = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "adam_epsilon"}
# Parameters of DeepSpeed's Adam that select its kernel; and those of the update rule, with AdamW's values.
ADAM_KERNEL_KEYS = ("torch_adam", "fp32_optimizer_states", "fused", "foreach", "capturable")
AS_ADAMW = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "set_grad_none": True, "maximize": False}
HPZ_KEY = "zero_hpz_partition_size"
BUCKETS_OF_MODEL = 16
MAX_BUCKET_ELEMENTS = 200_000_000  # beyond this a bucket only takes memory
SCHEDULER_SHAPES = {  # DeepSpeed's names: the recipe's shapes
    "WarmupDecayLR": ("linear",),
    "WarmupLR": ("constant", "constant_with_warmup"),
    "WarmupCosineLR": ("cosine",),
}
WARMUP_OPTIONS = {"warmup_num_steps": "num_warmup_steps", "warmup_max_lr": "learning_rate"}
SCHEDULER_OPTIONS = {  # {scheduler: {its parameter: the recipe's option}}
    "WarmupDecayLR": {**WARMUP_OPTIONS, "total_num_steps": "lr_decay_steps"},
    "WarmupLR": WARMUP_OPTIONS,
    "WarmupCosineLR": {
        "warmup_num_steps": "num_warmup_steps",
        "cos_min_ratio": "min_lr_ratio",
        "total_num_steps": "lr_decay_steps",
    },
}
# Parameters of schedulers without an option in the recipe, with the only value that they may have.
FIXED_SCHEDULE = {"warmup_type": "linear", "warmup_min_lr": 0, "warmup_min_ratio": 0, "last_batch_iteration": -1}


class OptionResolver(Problems):
    """Replaces "auto" by the recipe's values, lets the recipe adopt what it leaves unset, collects contradictions."""

    def __init__(self, config: dict[str, Any], source: str, recipe: TrainingRecipe) -> None:
        super().__init__()
        self.config = config
        self.source = source
        self.recipe = recipe
        self.left_open: set[str] = set()  # keys that were "auto"

    def resolve(self, option: str, key: str, default: Any = None) -> None:
        """Make `key` agree with the recipe's `option`, which adopts the key's value if it is unset."""
        node, name = _node(self.config, key)
        stated = node.get(name, "auto")
        if stated != "auto":
            self.resolve_value(option, key, stated)
        if stated == "auto" or self.recipe.is_flag(option):
            value = getattr(self.recipe, option)
            node[name] = default if value is None else value
            if stated == "auto":
                self.left_open.add(key)

    def resolve_value(self, option: str, key: str, stated: Any) -> None:
        """Compare the value of `key` with the recipe's `option`, which adopts it if it is unset."""
        if isinstance(stated, bool) or not isinstance(stated, (int, float)):
            self.found.append(f'{self.source}: {key} = {stated!r}: expected a number or "auto"')
            return
        field = next(field for field in dataclasses.fields(self.recipe) if field.name == option)
        is_int = field.metadata["kind"].base is int
        rule = "it must be an integer" if is_int and stated % 1 else find_broken_rule(float(stated), field.metadata)
        if rule:
            self.found.append(f"{self.source}: {key} = {json.dumps(stated)}: {rule}")
            return
        stated = int(stated) if is_int else stated  # 1e3 is 1000
        if self.recipe.source(option) is None:
            self.recipe.adopt(option, stated, self.source)
            return
        ours = getattr(self.recipe, option)
        if ours is not None and math.isclose(stated, ours, rel_tol=1e-9):
            return
        if self.recipe.is_flag(option):
            self.leave_out(key, stated, option)
        else:
            self.found.append(self._contradiction(key, stated, option, ours))

    def leave_out(self, key: str, stated: Any, option: str) -> None:
        """Note that a flag overrides what the configuration states."""
        note = f"{self.source}: {key} = {json.dumps(stated)} is left out: --{option} says otherwise"
        self.recipe.remember_left_out([note])

    def fill(self, key: str, value: Any, noun: str, follows_from: Sequence[str] = ()) -> None:
        """Set `key` where it is absent or "auto". Another value than `value` is a contradiction, unless one of the
        options in `follows_from` is a flag. `noun`: the option that has the value, or words for it."""
        node, name = _node(self.config, key)
        stated = "auto" if key in self.left_open else node.get(name, "auto")
        flag = next(filter(self.recipe.is_flag, follows_from), None)
        if stated not in ("auto", value) and flag:
            self.leave_out(key, stated, flag)
        if stated in ("auto", value) or flag:
            node[name] = value  # also replaces 4.0 by 4
        else:
            self.found.append(self._contradiction(key, stated, noun, value))

    def _contradiction(self, key: str, stated: Any, option: str, ours: Any) -> str:
        source = self.recipe.source(option) if hasattr(self.recipe, option) else None
        ours = getattr(self.recipe, option) if ours == "auto" else ours
        return (
            f"{self.source} says {key} = {json.dumps(stated)}, and {option} = {json.dumps(ours)}"
            f'{f" ({source})" if source else ""}. Make them agree, or write "auto" in the DeepSpeed configuration'
        )


def _node(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return (the section that has a dotted key, the key's last name). Sections that are missing are added."""
    *parents, name = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    return config, name


def resolve_config(
    config: dict[str, Any], source: str, recipe: TrainingRecipe, layout: ParallelLayout, total_stays: bool = False
) -> tuple[dict[str, Any], BatchSizes]:
    """Return (a copy of the configuration with the recipe's values for "auto", the batch sizes). A scheduler block is
    removed: the recipe adopts its values and sets the rate of each update. `total_stays`: see resolve_batches.
    Raises UserError with all contradictions, both values and sources."""
    config = json.loads(json.dumps(config))
    resolver = OptionResolver(config, source, recipe)
    resolver.resolve("per_device_train_batch_size", "train_micro_batch_size_per_gpu")
    accumulation = config.get("gradient_accumulation_steps", "auto")
    if recipe.global_batch_size is None and recipe.gradient_accumulation_steps is None and accumulation == "auto":
        resolver.resolve("global_batch_size", "train_batch_size", default="auto")  # the accumulation follows from it
    if recipe.global_batch_size is None:
        resolver.resolve("gradient_accumulation_steps", "gradient_accumulation_steps", default=1)
    total = config.get("train_batch_size")
    micro_batches = (recipe.gradient_accumulation_steps or 0) * layout.data_size
    is_open = recipe.global_batch_size is None and recipe.source("per_device_train_batch_size") is None
    if is_open and isinstance(total, (int, float)) and micro_batches and total > 0 == total % micro_batches:
        recipe.adopt("per_device_train_batch_size", int(total) // micro_batches, source)  # as DeepSpeed does
    resolver.resolve("max_grad_norm", "gradient_clipping")
    _resolve_optimizer(resolver)
    if recipe.optim == "muon":
        config["zero_allow_untested_optimizer"] = True  # DeepSpeed allows only its own classes without it
    if config["zero_optimization"].get("stage") not in (1, 2, 3):
        stage = json.dumps(config["zero_optimization"].get("stage"))
        resolver.found.append(f"{source}: zero_optimization.stage = {stage}: it must be 1, 2 or 3. For 0 use ddp.yaml")
    _take_scheduler(resolver)
    resolver.raise_found()

    batches = resolve_batches(recipe, layout.data_size, layout.replica_size, total_stays)
    resolver.fill("train_micro_batch_size_per_gpu", batches.micro_batch, "per_device_train_batch_size")
    resolver.fill("gradient_accumulation_steps", batches.accumulation, "gradient_accumulation_steps", BATCH_KEYS)
    resolver.fill("train_batch_size", batches.global_batch, "micro-batch * accumulation * processes", BATCH_KEYS)
    zero = config["zero_optimization"]
    if zero.get(HPZ_KEY) == "auto":  # ZeRO++'s partitions within a machine
        zero[HPZ_KEY] = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
    size = zero.get(HPZ_KEY) or 1
    if isinstance(size, int) and layout.world_size % size:
        resolver.found.append(
            f"{source}: zero_optimization.{HPZ_KEY} = {size} does not divide {layout.world_size} processes. "
            'Write "auto", which is the processes of a machine'
        )
    resolver.raise_found()
    # Turn off what costs time and changes no result, unless the file sets it. The engine refuses gradients that are
    # not finite by their norm, before DeepSpeed steps, so in bf16 DeepSpeed need not check each. One data-parallel
    # rank has no communication to overlap, and overlap_comm makes ZeRO-1 and ZeRO-2 wait for the device after each
    # backward pass; offload overlaps its copies.
    config.setdefault("bf16", {}).setdefault("check_grad_overflow", False)
    exchanges_nothing = layout.shard_size == 1 and zero["stage"] < 3
    if exchanges_nothing and not any(part in zero for part in ("offload_optimizer", "offload_param")):
        zero["overlap_comm"] = False
    config.setdefault("timers", {"throughput": {"enabled": False}})  # it waits for the device in each forward pass
    return config, batches


def _resolve_optimizer(resolver: OptionResolver) -> None:
    """Make the optimizer block agree with the recipe's options of AdamW."""
    optimizer = resolver.config.get("optimizer")
    if not optimizer:
        return
    if str(optimizer.get("type", "")).lower() not in ADAM_NAMES:
        remedy = "remove the block: then the recipe's own is used (--optim), or name AdamW, if that is it"
        resolver.found.append(f"{resolver.source}: optimizer.type = {optimizer.get('type')!r}: {remedy}")
        return
    params = _params_of(resolver, "optimizer", ("betas", *ADAM_OPTIONS, *ADAM_KERNEL_KEYS, *AS_ADAMW, "max_grad_norm"))
    for key, value in list(params.items()):
        stated = f"{resolver.source}: optimizer.params.{key} = {json.dumps(value)}"
        if key == "max_grad_norm":
            resolver.found.append(f"{stated}: its place is gradient_clipping")
        elif key in AS_ADAMW and value != AS_ADAMW[key]:
            resolver.found.append(f"{stated}: the optimizer is AdamW. Remove it")
        elif key in AS_ADAMW:
            del params[key]
        elif key == "betas" and value != "auto" and not (isinstance(value, list) and len(value) == 2):
            resolver.found.append(f"{stated}: expected two numbers")
        elif key == "betas" and value != "auto":
            resolver.resolve_value("adam_beta1", "optimizer.params.betas[0]", value[0])
            resolver.resolve_value("adam_beta2", "optimizer.params.betas[1]", value[1])
    params["betas"] = [resolver.recipe.adam_beta1, resolver.recipe.adam_beta2]
    for key, option in ADAM_OPTIONS.items():
        resolver.resolve(option, f"optimizer.params.{key}")
    if resolver.recipe.optim == "muon":  # it has its own AdamW
        del resolver.config["optimizer"]


def _params_of(resolver: OptionResolver, name: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the `params` of the optimizer or scheduler section. Keys that DeepSpeed does not know are problems."""
    section = resolver.config[name]
    keys = ("type", "params")
    params = section.setdefault("params", {})
    if not isinstance(params, dict):
        resolver.found.append(f'{resolver.source}: {name}.params = {params!r}: expected an object, or no "params"')
        params = section["params"] = {}
    unknown = [f"{name}.{key}. {did_you_mean(key, keys)}" for key in section if key not in keys]
    unknown += [f"{name}.params.{key}. {did_you_mean(key, known)}" for key in params if key not in known]
    resolver.found += [f"{resolver.source}: DeepSpeed has no setting {setting}" for setting in unknown]
    return params


def _take_scheduler(resolver: OptionResolver) -> None:
    """Remove the scheduler block. The recipe adopts its shape and lengths where it leaves them open."""
    config = resolver.config
    recipe = resolver.recipe
    source = resolver.source
    scheduler = config.get("scheduler")
    if not scheduler:
        return
    kind = scheduler.get("type")
    shape = recipe.lr_scheduler_type
    if recipe.is_flag("lr_scheduler_type") and shape not in SCHEDULER_SHAPES.get(kind, (shape,)):
        resolver.leave_out("scheduler.type", kind, "lr_scheduler_type")
        del config["scheduler"]
        return
    if kind not in SCHEDULER_SHAPES or (shape not in SCHEDULER_SHAPES[kind] and recipe.source("lr_scheduler_type")):
        resolver.found.append(
            f"{source} says scheduler.type = {kind!r}, and lr_scheduler_type = {shape!r} "
            f"({recipe.source('lr_scheduler_type') or 'default'}). Make them agree (DeepSpeed's are "
            f"{', '.join(SCHEDULER_SHAPES)}), or remove the block: then the recipe's schedule is used"
        )
        return
    if shape not in SCHEDULER_SHAPES[kind]:
        recipe.adopt("lr_scheduler_type", SCHEDULER_SHAPES[kind][-1], source)
    options = SCHEDULER_OPTIONS[kind]
    for key in _params_of(resolver, "scheduler", (*options, *FIXED_SCHEDULE)):
        full_key = f"scheduler.params.{key}"
        if key in FIXED_SCHEDULE:
            resolver.fill(full_key, FIXED_SCHEDULE[key], "the recipe's warm-up")
        elif key == "warmup_num_steps" and recipe.source("warmup_ratio"):
            resolver.fill(full_key, "auto", "warmup_ratio", ("warmup_ratio",))
        elif key in options:
            resolver.resolve(options[key], full_key)
    del config["scheduler"]


def fill_bucket_size(zero: dict[str, Any], model: torch.nn.Module) -> None:
    """Set `reduce_bucket_size` (elements) of ZeRO-1 and ZeRO-2 in place, where it is "auto" or missing.
    For "auto" accelerate would take the square of the hidden size, so that each matrix is sent separately; without the
    key DeepSpeed takes two buffers of 5e8 elements. With a sixteenth of the model, a backward pass sends some twenty
    messages, which still overlap with it, and the two buffers take an eighth of the bytes of all gradients. The few
    gradients of an adapter are sent in one message."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    fill_by_sizes(zero, sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes))


def fill_by_sizes(zero: dict[str, Any], trained: int, total: int) -> None:
    """Set `reduce_bucket_size` in place from the number of trained elements, and of all elements, of a rank."""
    if zero.get("stage") in (1, 2) and zero.get("reduce_bucket_size", "auto") == "auto":
        zero["reduce_bucket_size"] = max(1, min(trained, total // BUCKETS_OF_MODEL, MAX_BUCKET_ELEMENTS))
