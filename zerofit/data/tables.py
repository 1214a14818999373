"""Tables of records: their first records, a held-out part, their columns, their fingerprints."""

from hashlib import sha256

import numpy as np
from datasets import Dataset, List

from zerofit.recipe.columns import NO_HEADER, is_value
from zerofit.recipe.errors import UserError

SPLIT_SEED = 0  # the held-out part stays the same when the run's seed changes


def first_records(dataset: Dataset, limit: int | None) -> Dataset:
    """The first `limit` records; all of them without a limit."""
    return dataset if limit is None or limit >= len(dataset) else dataset.select(range(limit))


def hold_out(dataset: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """(training, held-out) records, drawn at random with a fixed seed; each part keeps the order of the records.

    Raises:
        UserError: one part would be empty.
    """
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(dataset))
    held = max(1, round(fraction * len(dataset)))
    if held >= len(dataset):
        raise empty_split(dataset, fraction)
    return dataset.select(np.sort(shuffled[held:])), dataset.select(np.sort(shuffled[:held]))


def empty_split(dataset: Dataset, fraction: float, texts: bool = False) -> UserError:
    """The error for a split with an empty part.

    Args:
        texts: a record is one long text, which is split.
    """
    alone = len(dataset) == 1 and not texts  # one record cannot be split
    other = "" if alone else f"a {'smaller' if fraction > 0.5 else 'larger'} percentage, "
    return UserError(
        f"validation_split_percentage = {100 * fraction:g} leaves no sample on one side: the data is {len(dataset):,} "
        f"record{'s' * (len(dataset) != 1)}{field_hint(dataset) if alone else ''}. Name {other}a validation_file, or "
        "0, which holds nothing out"
    )


def set_fingerprint(dataset: Dataset, *words: object) -> Dataset:
    """Give a table that was made in memory a fingerprint that is the same in every process."""
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
    """For messages: the names of the columns, as in the file."""
    written = getattr(dataset, "as_written", {})
    names = [written.get(name, name) for name in dataset.column_names]
    hint = NO_HEADER if any(map(is_value, names)) else ""
    if not hint and len(names) == 1 and ("  " in names[0] or ":" in names[0]):
        hint = f" (what separates the fields of {names[0]!r}? Name it with --delimiter)"
    if not hint and len(dataset) == 1:
        hint = field_hint(dataset)
    return f"the columns are {', '.join(names)}{hint}"


def check_name(name: str, option: str) -> None:
    """Check a column that was chosen because it is the only one: in a .csv file without a header it is a record.

    Raises:
        UserError: its name is a text.
    """
    if is_value(name):
        raise UserError(
            f"the first line of the data must name its columns, and is a record: {name[:60]!r}. Put a line of names "
            f"before it, such as text,label. If this is a name, say --{option}"
        )


def field_hint(dataset: Dataset) -> str:
    """A hint if the only record seems to contain the records."""
    inside = [
        name for name, kind in dataset.features.items() if isinstance(kind, List) and isinstance(kind.feature, dict)
    ]
    return f" (are the records under a key of the .json? Say --field {inside[0]})" if inside else ""
