"""Learning rate, optimizer and precision of Megatron's flags; and what a conversion is made of.

Megatron counts its schedule in samples (or tokens); with one size of the global batch that is a number of updates.
Source: megatron/core/optimizer_param_scheduler.py, get_lr.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from zerofit.tools.convert.megatron_args.ledger import FlagLedger
from zerofit.tools.convert.megatron_args.pair import Layout
from zerofit.tools.convert.megatron_args.shape import Shape

STYLES = ("linear", "cosine", "constant", "wsd")


@dataclass
class ConvertedScript:
    """A recipe, and what belongs to it.

    Attributes:
        recipe: {option: value} in the order in which it is written.
        batch: samples of an update.
        vocabulary: tokens before padding, where that is known without the tokenizer's files.
    """

    recipe: dict[str, Any]
    flags: FlagLedger
    layout: Layout
    shape: Shape | None = None
    batch: int = 1
    vocabulary: int | None = None
    notes: list[str] = field(default_factory=list)


def carry(done: ConvertedScript, flag: str, option: str, value: Any, note: str = "", *, default: Any = None) -> None:
    """Set an option of the recipe.

    Args:
        default: Megatron's of the flag, where ours is another: a row says so if the flag is not given.
    """
    done.recipe[option], words = value, f"{option}: {value}{note}"
    if done.flags.has(flag):
        done.flags.carried(flag, words)
    elif default is not None:
        done.flags.default(f"--{flag.replace('_', '-')} {default}", words)


def in_updates(done: ConvertedScript, what: str, option: str) -> int | None:
    """The smallest of --WHAT-iters, --WHAT-samples and --WHAT-tokens, as updates."""
    flags, batch = done.flags, done.batch
    units = {"iters": 1, "samples": batch, "tokens": batch * done.recipe.get("block_size", 1)}
    lengths = {}
    for unit, size in units.items():
        name = f"{what}_{unit}"
        if flags.has(name):
            number = flags.number(name, default=0)
            round_down = name == "train_samples"  # Megatron drops an incomplete global batch
            lengths[name] = number // size if round_down else -(-number // size)
            exact = "" if number % size == 0 else f" ({number / size:.2f} in Megatron)"
            flags.carried(name, f"{option}: {lengths[name]}{exact}")
    if len(lengths) > 1:
        smallest = min(lengths.values())
        for name, updates in lengths.items():
            if updates > smallest:
                flags.satisfied(name, f"{updates} updates: the run ends before, after {smallest}")
        return smallest
    return next(iter(lengths.values()), None)


def read_optimizer(done: ConvertedScript) -> None:
    flags = done.flags
    peak = flags.number("lr", float)
    if not peak:
        flags.wrong("lr", "there is no --lr")
        return
    carry(done, "lr", "learning_rate", peak)
    min_lr = flags.number("min_lr", float, 0.0)
    if flags.has("min_lr"):
        carry(done, "min_lr", "min_lr_ratio", min_lr / peak, f", of {peak:g}")
    _schedule(done)
    if flags.text("optimizer", "adam") != "adam":
        flags.wrong("optimizer", "AdamW is the only optimizer here")
    if flags.text("weight_decay_incr_style", "constant") != "constant":
        flags.wrong("weight_decay_incr_style", "weight decay is constant here")


def _schedule(done: ConvertedScript) -> None:
    flags = done.flags
    style = flags.text("lr_decay_style", "linear")
    if style.lower() not in STYLES:
        flags.wrong("lr_decay_style", f"there are {', '.join(STYLES)}")
        return
    decay = in_updates(done, "lr_decay", "lr_decay_steps")
    warmup = in_updates(done, "lr_warmup", "num_warmup_steps") or 0
    length = decay or done.recipe.get("max_train_steps", 1)
    shape = style.lower()
    if flags.has("lr_warmup_fraction"):
        fraction = flags.number("lr_warmup_fraction", float, 0.0)
        warmup = math.ceil(round(fraction * length, 6))
        exact = "" if math.isclose(fraction * length, warmup) else f" ({fraction * length:.2f} in Megatron)"
        flags.carried("lr_warmup_fraction", f"num_warmup_steps: {warmup}{exact}")
    if shape == "constant" and warmup:
        shape = "constant_with_warmup"
    carry(done, "lr_decay_style", "lr_scheduler_type", shape, default="linear")
    if warmup:
        done.recipe["num_warmup_steps"] = warmup
    if decay and not shape.startswith("constant"):
        done.recipe["lr_decay_steps"] = decay
    elif decay:
        for name in ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"):
            flags.satisfied(name, "a constant rate does not decay")
    if shape.startswith("constant") and "min_lr_ratio" in done.recipe:
        del done.recipe["min_lr_ratio"]
        flags.satisfied("min_lr", "a constant rate does not decay")
    if shape == "wsd":
        _wsd(done, length)


def _wsd(done: ConvertedScript, length: int) -> None:
    flags = done.flags
    if flags.text("lr_wsd_decay_style", "exponential") != "linear":
        flags.wrong("lr_wsd_decay_style", "wsd ends in a straight line here: say --lr-wsd-decay-style linear")
        return
    flags.satisfied("lr_wsd_decay_style", "wsd ends in a straight line")
    updates = in_updates(done, "lr_wsd_decay", "wsd_decay_ratio, updates")
    if updates:
        done.recipe["wsd_decay_ratio"] = updates / length
    else:
        flags.wrong("lr_decay_style", "WSD goes with --lr-wsd-decay-iters")


def read_precision(done: ConvertedScript) -> None:
    flags = done.flags
    both = [name for name in ("fp16", "bf16") if flags.has(name)]
    if len(both) == 2:
        flags.wrong("fp16", "--bf16 is there as well: keep one of the two")
    done.recipe["precision"] = both[0] if both else "fp32"
    for name in both:
        flags.carried(name, f"precision: {name}")
    if not both:
        flags.default("neither --bf16 nor --fp16", "precision: fp32")
