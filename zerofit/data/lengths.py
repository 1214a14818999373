"""The maximum length of a row, and notes about data that is skipped or truncated."""

from typing import TYPE_CHECKING

import numpy as np

from zerofit.model.configuration import usable_positions
from zerofit.recipe.data_options import Warmup, read_warmup
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_BLOCK_SIZE = 1024  # tokens of a sample of the causal task
LENGTH_OPTIONS = {  # {task: {option of a length: its value if it is not set; 0: the option has a default}}
    "clm": {"block_size": DEFAULT_BLOCK_SIZE},
    "cls": {"max_length": 0},
    "seq2seq": {"max_source_length": 0, "max_target_length": 0},
}
# The first two are fractions of the samples of a part.
WARNING_FRACTION = 0.1
MAX_LOST_FRACTION = 0.5
KEPT_QUANTILE = 0.99  # fraction of the samples that the proposed length does not truncate


def choose_length(option: str, length: int, source: str | None, config: "PretrainedConfig") -> int:
    """Return the maximum length of a row in tokens, at most the model's positions. Raises UserError: the option is set
    to more than the model's positions. `source`: where the option was set; None: `length` is the default."""
    positions = usable_positions(config)
    if positions and length > positions:
        if source:
            raise UserError(f"{option} = {length} ({source}): the model has {positions} positions. Choose less")
        return positions
    return length


def length_warmup(text: str, source: str | None, block_size: int, is_chat: bool) -> Warmup:
    """Return the warm-up of the length of samples, in tokens. Raises UserError: block_size is not reached in steps of
    the first length; answers would be cut off. `text`: START@UPDATES, of block_size_warmup. `source`: what set the
    option."""
    parsed = read_warmup(text)
    assert parsed is not None  # the recipe's own check has read it
    first, updates = parsed
    setting = f"block_size_warmup = {text} ({source})"
    if is_chat:
        raise UserError(f"{setting}: the answers of conversations would be cut off. It is for text")
    if block_size % first or first in (1, block_size):
        possible = [size for size in range(2, block_size) if block_size % size == 0]
        remedy = f"Begin with {', '.join(map(str, possible))}" if possible else "Leave it out"
        raise UserError(f"{setting}: no steps of {first} to block_size = {block_size}. {remedy}")
    return Warmup(first, block_size, updates)


def report_data_loss(
    is_allowed: bool,  # allow_data_loss: more than half of all may be lost
    lost: int,
    total: int,
    problem: str,  # the rest of the sentence: "training samples are skipped: ..."
    lengths: np.ndarray | None = None,
    *,
    option: str = "",
    config: "PretrainedConfig | None" = None,
) -> list[str]:
    """Return a note about samples that are skipped or truncated; a warning if they are more than a tenth of all.
    Raises UserError: they are more than half, and that is not allowed. `lengths`: of samples before truncation, in
    tokens; the warning then names the value of `option` that keeps 99 % of them complete, or says that the model has
    too few positions."""
    fraction = lost / max(total, 1)
    remedy = ""
    if lost and lengths is not None and config is not None:
        needed = int(np.quantile(lengths, KEPT_QUANTILE, method="higher"))
        positions = usable_positions(config)
        remedy = f". {option} = {needed} would keep {KEPT_QUANTILE:.0%} of them complete"
        if positions and positions < needed:
            remedy = f". The model has {positions} positions, which keep {(lengths <= positions).mean():.0%} complete"
    message = f"{lost:,} of {total:,} {problem}"
    if fraction > MAX_LOST_FRACTION and not is_allowed:
        raise UserError(f"{fraction:.0%}: {message}{remedy}. To train anyway, say --allow_data_loss")
    if fraction > WARNING_FRACTION:
        return [f"WARNING   {fraction:.0%}: {message}{remedy}"]
    return [f"note      {message}"] if lost else []
