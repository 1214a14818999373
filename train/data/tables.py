"""Tables of records: their first records, a held-out part, their columns of text, their names in the cache."""

from hashlib import sha256

import numpy as np
from datasets import Dataset, List

from train.recipe.errors import UserError

SPLIT_SEED = 0  # the held-out part stays the same when the run's seed changes


def first(dataset: Dataset, limit: int | None) -> Dataset:
    """The first `limit` records; all of them without a limit."""
    return dataset if limit is None or limit >= len(dataset) else dataset.select(range(limit))


def hold_out(dataset: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """(training, held-out) records, drawn at random with a fixed seed, each part in its old order.

    Raises:
        UserError: one side would be empty.
    """
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(dataset))
    held = max(1, round(share * len(dataset)))
    if held >= len(dataset):
        raise empty_split(dataset, share)
    return dataset.select(np.sort(shuffled[held:])), dataset.select(np.sort(shuffled[:held]))


def empty_split(dataset: Dataset, share: float, texts: bool = False) -> UserError:
    """The message for a split that leaves one side empty.

    Args:
        texts: a record is one long text, which is cut.
    """
    alone = len(dataset) == 1 and not texts  # no share cuts a record in two
    other = "" if alone else f"a {'smaller' if share > 0.5 else 'larger'} share, "
    return UserError(
        f"validation_split_percentage = {100 * share:g} leaves no sample on one side: the data is {len(dataset):,} "
        f"record{'s' * (len(dataset) != 1)}{under_a_key(dataset) if alone else ''}. Name {other}a validation_file, or "
        "0, which holds nothing out"
    )


def name_for_the_cache(dataset: Dataset, *words: object) -> Dataset:
    """Give a table that was made in memory a fingerprint that every process agrees on."""
    dataset._fingerprint = sha256(" ".join(map(str, words)).encode()).hexdigest()[:32]
    return dataset


def text_columns(dataset: Dataset) -> list[str]:
    """The columns that hold text."""
    return [
        name
        for name, feature in dataset.features.items()
        if getattr(feature, "dtype", "") in ("string", "large_string")
    ]


def columns_present(dataset: Dataset) -> str:
    """For messages: the columns there are, as the file has them."""
    written = getattr(dataset, "as_written", {})
    names = [written.get(name, name) for name in dataset.column_names]
    wrong = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), None)
    hint = f" (is the file separated by {wrong!r}? A .csv takes commas, a .tsv tabs)" if wrong else ""
    if not hint and len(dataset) == 1:
        hint = under_a_key(dataset)
    return f"the columns are {', '.join(names)}{hint}"


def under_a_key(dataset: Dataset) -> str:
    """A hint where the one record that there is seems to hold the records."""
    inside = [
        name for name, kind in dataset.features.items() if isinstance(kind, List) and isinstance(kind.feature, dict)
    ]
    return f" (are the records under a key of the .json? Say --field {inside[0]})" if inside else ""
