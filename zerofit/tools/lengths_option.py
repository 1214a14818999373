"""`--batch_sizes` and `--lengths` of a tool: which micro-batches it looks at, or lengths of rows in their place."""

import re
from dataclasses import dataclass

from zerofit.model.configuration import usable_positions
from zerofit.recipe.base import Recipe
from zerofit.recipe.errors import UserError
from zerofit.recipe.fields import option

STEP = 1024  # tokens between the lengths that are looked at where none is named


@dataclass
class SizesOptions(Recipe):
    """Which micro-batches, or which lengths of rows"""

    batch_sizes: list[str] = option(  # noqa: RUF009
        ["auto"], "auto: find the largest micro-batch; or the micro-batches to look at: 1,8,40.", common=True
    )
    lengths: list[str] | None = option(  # noqa: RUF009
        None,
        "Find the longest of these rows, 8k,16k,32k, that fit with the recipe's per_device_train_batch_size, or 1. "
        "A plan takes auto, too: multiples of 1024 up to the model's positions.",
        common=True,
    )

    @property
    def micro_batches(self) -> list[int] | None:
        """The micro-batches that were named, in order; None: auto."""
        texts = [text for given in self.batch_sizes for text in given.split(",") if text]
        return None if texts == ["auto"] else sorted({int(text) for text in texts})

    def problems(self) -> list[str]:
        problems = super().problems()
        try:
            is_wrong = self.micro_batches is not None and (not self.micro_batches or self.micro_batches[0] < 1)
        except ValueError:
            is_wrong = True
        if is_wrong:
            problems.append(f"batch_sizes = {' '.join(self.batch_sizes)!r}: expected auto, or sizes such as 8,16,40")
        return problems


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


def length_problems(options, automatic: bool, without_use: tuple[str, ...]) -> list[str]:
    """What is wrong with `--lengths`.

    Args:
        options: of the tool and the recipe, in one.
        automatic: whether `auto` is possible.
        without_use: options of the tool that have no effect beside it.
    """
    if options.lengths is None:
        return []
    given, problems = " ".join(options.lengths), []
    try:
        if not (automatic and options.lengths == ["auto"]):
            read_lengths(options.lengths)
    except ValueError:
        expected = f"{'auto, or ' * automatic}lengths of rows in tokens"
        problems.append(f"lengths = {given!r}: expected {expected}, such as 8k,16k,32k (8k is 8192)")
    if not hasattr(options, "block_size"):
        problems.append(f"lengths = {given}: only train/clm.py has rows of any length. Remove it")
    elif (options.source("block_size") or "").startswith("--"):
        problems.append("--block_size and --lengths: keep one of the two")
    problems += [
        f"{name} has no effect with lengths = {given}. Remove it" for name in without_use if options.source(name)
    ]
    return problems


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
