"""A curriculum by difficulty: the easiest samples first, mixed with the others more and more."""

from collections.abc import Callable

import numpy as np
from datasets import Dataset

from zerofit.data.order import LARGEST_DRAWN, EasiestFirst
from zerofit.data.pack import SampleSet
from zerofit.data.tables import columns_present
from zerofit.recipe.errors import UserError
from zerofit.recipe.growth import LENGTH, Difficulty

SCORE = "score"  # its column in tables of token ids


def score_column(difficulty: Difficulty | None, table: Dataset) -> str | None:
    """The column of the training records that says how difficult each is; None where none does.

    Raises:
        UserError: there is no such column, or not a number in each record.
    """
    if difficulty is None or difficulty.field == LENGTH:
        return None
    name, stated = difficulty.field, difficulty.stated
    if name not in table.column_names:
        raise UserError(f"{stated}: there is no column {name!r}; {columns_present(table)}. Name one, or {LENGTH}")
    numbers = table.data.column(name)
    kind = getattr(table.features[name], "dtype", "")
    if not kind.startswith(("int", "uint", "float", "bool")):
        raise UserError(f"{stated}: the column {name!r} holds no numbers")
    if numbers.null_count or not np.isfinite(numbers.cast("float64").to_numpy()).all():
        raise UserError(f"{stated}: not every record has a number in the column {name!r}")
    return name


def scores_of(table: Dataset, column: str | None) -> np.ndarray | None:
    """The numbers of a column."""
    return None if column is None else np.asarray(table.with_format("numpy")[column][:], dtype=np.float64)


def easiest_first(
    difficulty: Difficulty | None, samples: SampleSet | None, consumed: Callable[[int], int]
) -> EasiestFirst | None:
    """The beginning of the first epoch, with difficulty_warmup.

    Args:
        samples: of the training; their `scores`, else their lengths, say how difficult each is.
        consumed: (updates) -> samples of so many updates.

    Raises:
        UserError: samples are packed, the first epoch has fewer updates, or there are too many samples.
    """
    if difficulty is None or samples is None:
        return None
    name, updates, stated = difficulty.field, difficulty.updates, difficulty.stated
    scores = samples.lengths if name == LENGTH else getattr(samples, "scores", None)
    if samples.lengths is None:
        raise UserError(
            f"{stated}: samples are packed, each has its share of easy and difficult records. Say "
            "--packing none, where each record is a sample of its own"
        )
    if scores is None:
        raise UserError(
            f"{stated}: records of running text or of multiple choice have no score. Say {LENGTH}@{updates}"
        )
    if len(samples) > LARGEST_DRAWN:
        raise UserError(f"{stated}: at most {LARGEST_DRAWN:,} samples can be sorted, the data has {len(samples):,}")
    ends = [consumed(update) for update in range(1, updates + 1)]
    if ends[-1] > len(samples):
        max_updates = sum(end <= len(samples) for end in ends)
        remedy = f"Say {name}@{max_updates} or less" if max_updates else "Leave it out"
        raise UserError(
            f"{stated}: the first epoch has {len(samples):,} samples, after which all have been seen, and "
            f"{updates:,} updates take {ends[-1]:,}. {remedy}"
        )
    return EasiestFirst(scores, ends)
