"""What a class weighs in the loss, for classes with many and with few examples."""

import numpy as np

from zerofit.data.labelled.samples import ExampleData
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import BALANCED, ClsRecipe


def class_weights(recipe: ClsRecipe, data: ExampleData) -> list[float] | None:
    """The weight of each class, in the order of their numbers; None where all weigh the same.

    `balanced` is scikit-learn's: examples / (classes x examples of the class), so that each class weighs as much as
    any other in the whole training set, or in an epoch of a mixture.

    Raises:
        UserError: the labels are numbers or choices, which no option of this group is for; or a class is not there.
    """
    names, changed = data.labels.names, recipe.changed_class_losses
    if changed and (names is None or data.labels.choices or data.labels.of_sets):
        what = "numbers (regression)" if names is None else "choices" if data.labels.choices else "lists"
        raise UserError(f"{' and '.join(changed)}: the labels are {what}, and this is for classes. Remove it")
    if not recipe.class_weights or not recipe.trains:
        return None
    if recipe.class_weights == [BALANCED]:
        sets = data.train.sets if data.passes else [data.train]
        counts = sum(
            times * np.bincount(each.labels, minlength=len(names)) for each, times in zip(sets, data.passes or [1.0])
        )
        present = np.count_nonzero(counts)
        return np.where(counts > 0, counts.sum() / (present * np.where(counts > 0, counts, 1.0)), 1.0).tolist()
    given = recipe.weight_of_class
    if unknown := given.keys() - set(names):
        raise UserError(
            f"class_weights: {', '.join(sorted(unknown))} is not a class of the data ({', '.join(names[:20])}"
            f"{', ...' if len(names) > 20 else ''})"
        )
    return [given.get(name, 1.0) for name in names]


def describe_weights(weights: list[float], names: tuple[str, ...]) -> str:
    """For the log: the heaviest and the lightest class."""
    low, high = int(np.argmin(weights)), int(np.argmax(weights))
    return f"loss      class weights from {weights[low]:.4g} ({names[low]}) to {weights[high]:.4g} ({names[high]})"
