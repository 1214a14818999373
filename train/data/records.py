"""Records that are read one by one, some of which may be of no use."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from datasets import Features, Value

from train.data.lengths import report_loss
from train.data.sources import Source
from train.data.token_tables import encode_table
from train.recipe.cache import cache_root, prepare_anew
from train.recipe.errors import UserError

COLUMN_OPTIONS = ("messages_column", "dialogue_column", "source_column", "target_column", "text_column")


class BadRecord(Exception):
    """A record that cannot be used; says why."""


def records_of(batch: dict[str, list]) -> list[dict[str, Any]]:
    """The records of a batch of columns."""
    return [dict(zip(batch, values)) for values in zip(*batch.values())]


def check_records(recipe, source: Source, part: str, read: Callable[[dict[str, Any]], Any], key: object) -> list[str]:
    """What there is to say about a part's records that `read` refuses. Raises UserError unless they may be left out.

    Args:
        recipe: with SourceOptions and skip_bad_records.
        read: raises BadRecord.
        key: all that `read` depends on, as text.
    """

    def look(batch: dict, indices: list[int]) -> dict:
        found = {"record": [], "problem": []}
        for index, record in zip(indices, records_of(batch)):
            try:
                read(record)
            except BadRecord as bad:
                found["record"].append(index)
                found["problem"].append(str(bad))
        return found

    table = source.parts[part]
    features = Features({"record": Value("int64"), "problem": Value("string")})
    bad = encode_table(table, look, features, ("problems", key), cache_root(recipe.cache_dir),
                       recipe.preprocessing_num_workers, prepare_anew(recipe), with_indices=True)  # fmt: skip
    if not len(bad):
        return []
    where = source.where(part)
    if len(bad) == len(table):
        options = " or ".join(f"--{name}" for name in COLUMN_OPTIONS if hasattr(recipe, name))
        raise UserError(
            f"{where} has no record that can be used. Record {bad[0]['record'] + 1}: {bad[0]['problem']}. "
            f"Correct the data, or name the column that is meant with {options}"
        )
    if not recipe.skip_bad_records:
        raise bad_record(where, bad[0]["record"], bad[0]["problem"], bad["problem"][:])
    what = f"records of {where} are left out, such as record {bad[0]['record'] + 1}: {bad[0]['problem']}"
    return report_loss(recipe, len(bad), len(table), what)


def bad_record(where: str, index: int, what: str, problems: Iterable[str]) -> UserError:
    """The message for a record that cannot be used.

    Args:
        what: is wrong with it.
        problems: of all records that cannot be used, this one included.
    """
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"\d+", "", problem), []).append(problem)
    alike = kinds.pop(re.sub(r"\d+", "", what))
    more = [f"{len(alike):,} such records"] if len(alike) > 1 else []
    if kinds:
        shown = "; ".join(others[0] for others in list(kinds.values())[:3])
        more.append(f"{sum(map(len, kinds.values())):,} more that cannot be used: {shown}")
    more = f" ({'; '.join(more)})" if more else ""
    return UserError(
        f"{where}, record {index + 1}: {what}{more}. Correct the data, or leave such records out with "
        "--skip_bad_records"
    )
