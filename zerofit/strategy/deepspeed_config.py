"""The DeepSpeed configuration of a run: its "auto" filled in from the recipe, contradictions refused."""

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
# Parameters of an Adam that are not values of its update; and those that are, with AdamW's value.
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
SCHEDULER_OPTIONS = {  # the options of the recipe that their parameters are
    "WarmupDecayLR": {**WARMUP_OPTIONS, "total_num_steps": "lr_decay_steps"},
    "WarmupLR": WARMUP_OPTIONS,
    "WarmupCosineLR": {
        "warmup_num_steps": "num_warmup_steps",
        "cos_min_ratio": "min_lr_ratio",
        "total_num_steps": "lr_decay_steps",
    },
}
# Parameters of schedulers that are no options, with the recipe's values.
FIXED_SCHEDULE = {"warmup_type": "linear", "warmup_min_lr": 0, "warmup_min_ratio": 0, "last_batch_iteration": -1}


class OptionResolver(Problems):
    """Fills "auto" from the recipe, lets the recipe adopt what it leaves unset, and collects contradictions."""

    def __init__(self, config: dict[str, Any], source: str, recipe: TrainingRecipe) -> None:
        super().__init__()
        self.config = config
        self.source = source
        self.recipe = recipe
        self.left_open: set[str] = set()  # keys that were "auto", and have the recipe's value

    def resolve(self, option: str, key: str, default: Any = None) -> None:
        """The recipe owns `key` as `option`: agree with it, or adopt the stated value if the option is unset."""
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
        if isinstance(stated, bool) or not isinstance(stated, (int, float)):
            self.found.append(f'{self.source}: {key} = {stated!r}: expected a number or "auto"')
            return
        field = next(field for field in dataclasses.fields(self.recipe) if field.name == option)
        is_whole = field.metadata["kind"].base is int
        rule = "it must be an integer" if is_whole and stated % 1 else find_broken_rule(float(stated), field.metadata)
        if rule:
            self.found.append(f"{self.source}: {key} = {json.dumps(stated)}: {rule}")
            return
        stated = int(stated) if is_whole else stated  # 1e3 is 1000
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
        """A flag wins: note that what the configuration states has no effect."""
        note = f"{self.source}: {key} = {json.dumps(stated)} is left out: --{option} says otherwise"
        self.recipe.remember_left_out([note])

    def fill(self, key: str, value: Any, what: str, follows_from: Sequence[str] = ()) -> None:
        """Set `key` where it is absent or "auto"; anything else than `value` is a contradiction, unless the value
        follows from a flag."""
        node, name = _node(self.config, key)
        stated = "auto" if key in self.left_open else node.get(name, "auto")
        flag = next(filter(self.recipe.is_flag, follows_from), None)
        if stated not in ("auto", value) and flag:
            self.leave_out(key, stated, flag)
        if stated in ("auto", value) or flag:
            node[name] = value  # 4 in the place of 4.0, too
        else:
            self.found.append(self._contradiction(key, stated, what, value))

    def _contradiction(self, key: str, stated: Any, option: str, ours: Any) -> str:
        where = self.recipe.source(option) if hasattr(self.recipe, option) else None
        ours = getattr(self.recipe, option) if ours == "auto" else ours
        return (
            f"{self.source} says {key} = {json.dumps(stated)}, and {option} = {json.dumps(ours)}"
            f'{f" ({where})" if where else ""}. Make them agree, or write "auto" in the DeepSpeed configuration'
        )


def _node(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *parents, name = key.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    return config, name


def resolve_config(
    config: dict[str, Any], source: str, recipe: TrainingRecipe, layout: ParallelLayout, total_stays: bool = False
) -> tuple[dict[str, Any], BatchSizes]:
    """Fill every "auto" that the recipe owns, in a copy. A scheduler block is taken out: what it says is the recipe's,
    which sets the rate of each update. Raises UserError: all that the recipe contradicts, with both values and
    sources. `total_stays`: see resolve_batches."""
    config = json.loads(json.dumps(config))
    resolver = OptionResolver(config, source, recipe)
    resolver.resolve("per_device_train_batch_size", "train_micro_batch_size_per_gpu")
    accumulation = config.get("gradient_accumulation_steps", "auto")
    if recipe.global_batch_size is None and recipe.gradient_accumulation_steps is None and accumulation == "auto":
        resolver.resolve("global_batch_size", "train_batch_size", default="auto")  # the accumulation follows from it
    if recipe.global_batch_size is None:
        resolver.resolve("gradient_accumulation_steps", "gradient_accumulation_steps", default=1)
    total = config.get("train_batch_size")
    passes = (recipe.gradient_accumulation_steps or 0) * layout.data_size
    is_open = recipe.global_batch_size is None and recipe.source("per_device_train_batch_size") is None
    if is_open and isinstance(total, (int, float)) and passes and total > 0 == total % passes:
        recipe.adopt("per_device_train_batch_size", int(total) // passes, source)  # as DeepSpeed does
    resolver.resolve("max_grad_norm", "gradient_clipping")
    _resolve_optimizer(resolver)
    if recipe.optim == "muon":
        config["zero_allow_untested_optimizer"] = True  # DeepSpeed knows its own classes only
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
    # What costs time and changes no result is turned off. The engine refuses gradients that are not finite by their
    # norm, before DeepSpeed steps, so that in bf16 DeepSpeed need not look at each again; a key of the file wins. One
    # data-parallel rank has no communication that could overlap, and overlap_comm makes ZeRO-1 and ZeRO-2 wait for the
    # device after each backward pass; offload overlaps its copies.
    config.setdefault("bf16", {}).setdefault("check_grad_overflow", False)
    alone = layout.shard_size == 1 and zero["stage"] < 3
    if alone and not any(part in zero for part in ("offload_optimizer", "offload_param")):
        zero["overlap_comm"] = False
    config.setdefault("timers", {"throughput": {"enabled": False}})  # it waits for the device in each forward pass
    return config, batches


def _resolve_optimizer(resolver: OptionResolver) -> None:
    optimizer = resolver.config.get("optimizer")
    if not optimizer:
        return
    if str(optimizer.get("type", "")).lower() not in ADAM_NAMES:
        known = "remove the block: then the recipe's own is used (--optim), or name AdamW, if that is it"
        resolver.found.append(f"{resolver.source}: optimizer.type = {optimizer.get('type')!r}: {known}")
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
    if resolver.recipe.optim == "muon":  # AdamW's part is within it
        del resolver.config["optimizer"]


def _params_of(resolver: OptionResolver, name: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the `params` of a section that has a type. What DeepSpeed would ignore or refuse is a problem."""
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
    """Take the scheduler block out, and its shape and lengths into the recipe where that leaves them open."""
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
        place = f"scheduler.params.{key}"
        if key in FIXED_SCHEDULE:
            resolver.fill(place, FIXED_SCHEDULE[key], "the recipe's warm-up")
        elif key == "warmup_num_steps" and recipe.source("warmup_ratio"):
            resolver.fill(place, "auto", "warmup_ratio", ("warmup_ratio",))
        elif key in options:
            resolver.resolve(options[key], place)
    del config["scheduler"]


def fill_bucket_size(zero: dict[str, Any], model: torch.nn.Module) -> None:
    """Set `reduce_bucket_size` (elements) of ZeRO-1 and ZeRO-2 in place, where "auto" or nothing stands there.
    accelerate would make the square of the hidden size of "auto", so that each matrix is sent for itself; DeepSpeed
    makes two buffers of 5e8 elements of nothing. A sixteenth of the model makes some twenty messages of a backward
    pass, which still overlap with it; its two buffers take an eighth of what the gradients of the whole model would.
    An adapter's gradients are few, and go in one."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    fill_by_sizes(zero, sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes))


def fill_by_sizes(zero: dict[str, Any], trained: int, total: int) -> None:
    """Set `reduce_bucket_size` from a rank's elements: of what is trained, and of all."""
    if zero.get("stage") in (1, 2) and zero.get("reduce_bucket_size", "auto") == "auto":
        zero["reduce_bucket_size"] = max(1, min(trained, total // BUCKETS_OF_MODEL, MAX_BUCKET_ELEMENTS))
