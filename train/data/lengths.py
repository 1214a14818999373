"""How long a row may be, and what is lost where rows are longer."""

import numpy as np

from train.model.configuration import usable_positions
from train.recipe.base import Recipe
from train.recipe.data_options import SourceOptions
from train.recipe.errors import UserError

DEFAULT_BLOCK_SIZE = 1024  # tokens of a sample of the causal task
WARNED, STOPPED = 0.1, 0.5  # shares of a part's samples
WHOLE = 0.99  # of the samples: what the proposed length keeps


def choose_length(recipe: Recipe, option: str, config, default: int | None = None) -> int:
    """The longest row in tokens: what `option` says, else its default, which gives way to the model's positions.

    Raises:
        UserError: more was asked for than the model has positions.
    """
    wanted, positions = getattr(recipe, option) or default, usable_positions(config)
    if positions and wanted > positions:
        if recipe.source(option):
            raise UserError(
                f"{option} = {wanted} ({recipe.source(option)}): the model has {positions} positions. "
                f"Choose {positions} or less"
            )
        return positions
    return wanted


def report_loss(
    recipe: SourceOptions,
    lost: int,
    total: int,
    what: str,
    lengths: np.ndarray | None = None,
    option: str = "",
    config=None,
    stops: bool = True,
) -> list[str]:
    """What there is to say about samples that are lost: a note; of more than a tenth of them a warning.

    Args:
        what: what of, and what became of them: "training samples are left out: ...".
        lengths: of whole samples, in tokens; a warning then names the length for `option` that keeps 99 % of them.
        stops: whether the run may end for it.

    Raises:
        UserError: it is more than half of them, and the recipe does not allow that.
    """
    share, remedy = lost / max(total, 1), ""
    if lost and lengths is not None:
        needed, positions = int(np.quantile(lengths, WHOLE, method="higher")), usable_positions(config)
        few = f" (the model has {positions} positions)" if positions and positions < needed else ""
        remedy = f". {option} = {needed} would keep {WHOLE:.0%} of them whole{few}"
    told = f"{lost:,} of {total:,} {what}"
    if stops and share > STOPPED and not recipe.allow_data_loss:
        raise UserError(f"{told}{remedy}. That is {share:.0%}; to train all the same, say --allow_data_loss")
    if share > WARNED:
        return [f"WARNING   {share:.0%}: {told}{remedy}"]
    return [f"note      {told}"] if lost else []
