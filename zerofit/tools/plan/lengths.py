"""`zerofit plan --lengths`: the longest rows that fit, in place of the largest micro-batch."""

import re

from zerofit.model.configuration import usable_positions
from zerofit.recipe.errors import UserError

STEP = 1024  # tokens between the lengths that are looked at where none is named


def parse_length(text: str) -> int:
    """8k -> 8192.

    Raises:
        ValueError: it is no length of a row.
    """
    match = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    length = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if length < 2:
        raise ValueError(text)
    return length


def read_lengths(given: list[str]) -> list[int]:
    """The lengths that were named, ascending: 16k,8k 32k.

    Raises:
        ValueError: one of them is no length, or there is none.
    """
    lengths = sorted({parse_length(text) for texts in given for text in texts.split(",") if text})
    if not lengths:
        raise ValueError
    return lengths


def length_problems(options) -> list[str]:
    """What is wrong with `--lengths`.

    Args:
        options: of the plan and the recipe, in one.
    """
    if options.lengths is None:
        return []
    given, problems = " ".join(options.lengths), []
    try:
        if options.lengths != ["auto"]:
            read_lengths(options.lengths)
    except ValueError:
        expected = "auto, or lengths of rows in tokens, such as 8k,16k,32k (8k is 8192)"
        problems.append(f"lengths = {given!r}: expected {expected}")
    if not hasattr(options, "block_size"):
        problems.append(f"lengths = {given}: only train/clm.py has rows of any length. Remove it")
    elif (options.source("block_size") or "").startswith("--"):
        problems.append("--block_size and --lengths: keep one of the two")
    without_use = [name for name in ("batch_sizes", "max_batch_size", "mean_length") if options.source(name)]
    return problems + [f"{name} has no effect with lengths = {given}. Remove it" for name in without_use]


def micro_batch_of(options) -> int:
    """Rows of a micro-batch: what the recipe says, else one."""
    name = "per_device_train_batch_size"
    return getattr(options, name) if options.source(name) else 1


def possible_lengths(given: list[str], config) -> list[int]:
    """The lengths to look at, ascending: those that were named; auto: multiples of 1024 up to the model's positions.

    Raises:
        UserError: the model has fewer positions, or none that limit the length.
    """
    positions = usable_positions(config)
    if given == ["auto"]:
        if positions is None:
            raise UserError(f"lengths = auto: a {config.model_type} has no limit. Set --lengths 8k,16k,32k")
        return sorted({*range(STEP, positions + 1, STEP), positions})
    lengths = read_lengths(given)
    beyond = [str(length) for length in lengths if positions and length > positions]
    if beyond:
        raise UserError(f"lengths = {' '.join(given)}: the model has {positions} positions. Choose less")
    return lengths
