"""Tables of records: their first records, a held-out part, their columns, their fingerprints."""

from hashlib import sha256
from typing import TypeVar

import numpy as np
from datasets import Dataset, List

from zerofit.data.options import PartOptions
from zerofit.recipe.columns import NO_HEADER, is_value
from zerofit.recipe.errors import UserError

SPLIT_SEED = 0  # the held-out part stays the same when the run's seed changes


Records = TypeVar("Records")  # a Dataset, or what has its __len__ and select


def split_parts(parts: dict[str, Records], options: PartOptions) -> dict[str, Records]:
    """The parts that a run uses: a held-out part is split off if there is none, training data only if it trains.

    Raises:
        UserError: one part would be empty.
    """
    if "validation" not in parts and options.held_out_fraction > 0:
        train, held_out = hold_out(parts["train"], options.held_out_fraction)
        parts = {**parts, "train": train, "validation": held_out}
    return {name: part for name, part in parts.items() if options.trains or name != "train"}


def limit_parts(parts: dict[str, Records], options: PartOptions) -> dict[str, Records]:
    """The first records of each part, as max_train_samples and max_eval_samples say."""
    return {name: first_records(part, options.limit(name)) for name, part in parts.items()}


def first_records(dataset: Records, limit: int | None) -> Records:
    """The first `limit` records; all of them without a limit."""
    return dataset if limit is None or limit >= len(dataset) else dataset.select(range(limit))


def hold_out(dataset: Records, fraction: float) -> tuple[Records, Records]:
    """(training, held-out) records, drawn at random with a fixed seed; each part keeps the order of the records.

    Raises:
        UserError: one part would be empty.
    """
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(dataset))
    held = max(1, round(fraction * len(dataset)))
    if held >= len(dataset):
        raise empty_split(dataset, fraction)
    return dataset.select(np.sort(shuffled[held:])), dataset.select(np.sort(shuffled[:held]))


def empty_split(dataset: Records, fraction: float, texts: bool = False) -> UserError:
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


def field_hint(dataset: Records) -> str:
    """A hint if the only record seems to contain the records."""
    features = getattr(dataset, "features", {})
    inside = [name for name, kind in features.items() if isinstance(kind, List) and isinstance(kind.feature, dict)]
    return f" (are the records under a key of the .json? Say --field {inside[0]})" if inside else ""
