"""How long a row may be."""

from train.model.configuration import usable_positions
from train.recipe.errors import UserError
from train.recipe.options import Recipe


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
