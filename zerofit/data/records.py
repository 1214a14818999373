"""Read records one by one; skip or refuse those that cannot be used."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from datasets import Dataset, Features, Value

from zerofit.data.lengths import report_data_loss
from zerofit.data.options import RecordRules
from zerofit.data.sources import Source
from zerofit.data.tables import columns_present
from zerofit.data.token_tables import TableCache, encode_table
from zerofit.recipe.errors import UserError

Read = TypeVar("Read")


class BadRecord(Exception):
    """A record that cannot be used; the message is the reason."""


def records_of(batch: dict[str, list]) -> list[dict[str, Any]]:
    """The records of a batch of columns."""
    return [dict(zip(batch, values)) for values in zip(*batch.values())]


def read_good(
    records: Iterable[dict[str, Any]], read: Callable[[dict[str, Any]], Read]
) -> Iterator[tuple[int, dict[str, Any], Read]]:
    """(place, record, what `read` makes of it) of each record that it does not refuse; check_records reports the rest.

    Args:
        read: raises BadRecord.
    """
    for place, record in enumerate(records):
        try:
            yield place, record, read(record)
        except BadRecord:
            continue


def records_in(table: Dataset) -> Iterator[dict[str, Any]]:
    """The records of a table, read in batches."""
    return (record for batch in table.iter(200) for record in records_of(batch))


def require_columns(source: Source, part: str, columns: Iterable[str]) -> None:
    """Raises UserError if a part lacks columns that the first part has."""
    table = source.parts[part]
    if missing := [name for name in columns if name not in table.column_names]:
        raise UserError(f"{source.where(part)} has no column {', '.join(missing)}; {columns_present(table)}")


def check_records(
    source: Source,
    part: str,
    read: Callable[[dict[str, Any]], Any],
    key: object,
    rules: RecordRules,
    cache: TableCache,
) -> list[str]:
    """Notes about the records of a part that `read` refuses. Raises UserError unless they may be skipped.

    Args:
        read: raises BadRecord.
        key: everything that `read` depends on, as text.
    """

    def check(batch: dict, indices: list[int]) -> dict:
        problems = {"record": [], "problem": []}
        for index, record in zip(indices, records_of(batch)):
            try:
                read(record)
            except BadRecord as bad:
                problems["record"].append(index)
                problems["problem"].append(str(bad))
        return problems

    table = source.parts[part]
    features = Features({"record": Value("int64"), "problem": Value("string")})
    bad = encode_table(table, check, features, ("problems", key), cache, with_indices=True)
    if not len(bad):
        return []
    where = source.where(part)
    if len(bad) == len(table):
        options = " or ".join(f"--{name}" for name in rules.column_options)
        raise UserError(
            f"{where} has no record that can be used. Record {bad[0]['record'] + 1}: {bad[0]['problem']}. "
            f"Correct the data, or name the right column with {options}"
        )
    if not rules.skip_bad_records:
        raise bad_record(where, bad[0]["record"], bad[0]["problem"], bad["problem"][:])
    what = f"records of {where} are skipped, such as record {bad[0]['record'] + 1}: {bad[0]['problem']}"
    return report_data_loss(rules.allow_data_loss, len(bad), len(table), what)


def bad_record(where: str, index: int, what: str, problems: Iterable[str]) -> UserError:
    """The error for a record that cannot be used.

    Args:
        what: its problem.
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
        f"{where}, record {index + 1}: {what}{more}. Correct the data, or skip such records with --skip_bad_records"
    )
