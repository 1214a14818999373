"""One way for chats, pairs, labelled texts and choices: read records one by one, skip or refuse those that cannot be
used, hold a part out, and encode the others."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from datasets import Dataset, Features, Value

from zerofit.data.lengths import report_data_loss
from zerofit.data.options import DataOptions
from zerofit.data.sources import Source
from zerofit.data.tables import Columns, derive_table_key, encode_table, list_columns, random_split, select
from zerofit.recipe.errors import UserError

COLUMN_OPTIONS = ("dialogue_column source_column target_column text_column text_columns label_column").split()
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")  # their content replaces placeholders
MEDIA_PLACEHOLDER = re.compile(r"<\|?(image|img|video|audio)[^<>]{0,20}>")
Encode = Callable[[list[Any], list[str]], Columns]  # (what records hold, their names) -> their rows of a table


class BadRecord(Exception):
    """A record that cannot be used; the message is the reason."""


class RecordReader(Protocol):
    """The columns of a table's records, and how a record is read. Cached tables depend on its repr."""

    @property
    def columns(self) -> list[str]: ...

    def read(self, record: dict[str, Any]) -> Any:
        """Return the contents of a record. Raises BadRecord."""

    def texts(self, content: Any) -> Iterable[str]:
        """Return the texts in what `read` has returned, to train a tokenizer."""


@dataclass
class RecordSet:
    """Records of a part of the data, all of which can be read."""

    table: Dataset
    reader: RecordReader
    where: str  # the part's name in messages
    numbers: np.ndarray  # (records,) the place of each in its source
    records: Dataset  # the records with all columns; `table` has the columns that are read

    def __len__(self) -> int:
        return len(self.table)

    def select(self, places: Sequence[int] | np.ndarray) -> "RecordSet":
        table = select(self.table, places)
        return replace(self, table=table, numbers=self.numbers[places], records=self.records.select(places))

    def contents(self) -> Iterator[Any]:
        for batch in self.table.iter(200):
            yield from map(self.reader.read, records_of(batch))

    def texts(self) -> Iterator[str]:
        """Yield every text, to train a tokenizer."""
        return (text for content in self.contents() for text in self.reader.texts(content))

    def encode(self, encode: Encode, features: Features, key: tuple[object, ...], cache: Path) -> Dataset:
        """Return a table made by `encode` from (contents of some records, their names in messages): encode_table."""
        # the table is not sent to other processes
        reader = self.reader
        where = self.where
        numbers = self.numbers

        def of_batch(batch: Columns, places: list[int]) -> Columns:
            names = [f"{where}, record {numbers[place] + 1}" for place in places]
            return encode([reader.read(record) for record in records_of(batch)], names)

        return encode_table(self.table, of_batch, features, (*key, reader), cache)


def records_of(batch: Columns) -> list[dict[str, Any]]:
    return [dict(zip(batch, values)) for values in zip(*batch.values())]


def read_parts(
    source: Source, readers: Mapping[str, RecordReader], options: DataOptions
) -> tuple[dict[str, RecordSet], list[str]]:
    """Return (the parts that a run uses, without the records that cannot be used; notes about these).

    A held-out part is split off if there is none; there is training data only if the run trains. Raises UserError: a
    column is missing; a record cannot be used, and such records may not be skipped; a part is empty.
    """
    parts = {}
    notes = list(source.notes)
    for name, table in source.parts.items():
        reader = readers[name]
        where = source.where(name)
        if missing := [column for column in reader.columns if column not in table.column_names]:
            raise UserError(f"{where} has no column {', '.join(missing)}; {list_columns(table)}")
        selected = derive_table_key(table.select_columns([*dict.fromkeys(reader.columns)]), table)
        part = RecordSet(selected, reader, where, np.arange(len(table)), table)
        bad = _bad_records(part, [column for column in MEDIA_COLUMNS if column in table.column_names], options.cache)
        if len(bad):
            first = f"record {bad[0]['record'] + 1}: {bad[0]['problem']}"
            filled = {key for key, value in table[bad[0]["record"]].items() if value}
            read_columns = {*reader.columns}
            if not read_columns <= filled and (unread := sorted(filled - read_columns)):
                first += f" (not read: its {', '.join(unread)}; files of another form take a weight each)"
            if len(bad) == len(part):
                columns = " or ".join(f"--{option}" for option in COLUMN_OPTIONS if hasattr(options.recipe, option))
                raise UserError(f"{where} has no usable record: {first}. Correct it, or set {columns}")
            if not options.skip_bad_records:
                count = f" ({len(bad):,} records cannot be used)" if len(bad) > 1 else ""
                remedy = "Correct the data, or skip such records with --skip_bad_records"
                raise UserError(f"{where}, {first}{count}. {remedy}")
            problem = f"records of {where} are skipped, such as {first}"
            notes += report_data_loss(options.recipe.allow_data_loss, len(bad), len(part), problem)
            part = part.select(np.setdiff1d(part.numbers, bad["record"][:]))
        parts[name] = part
    if "train" in parts and "validation" not in parts and options.held_out_fraction > 0:
        train, held_out = random_split(parts["train"], options.held_out_fraction)
        parts = {**parts, "train": train, "validation": held_out}
    return {name: part for name, part in parts.items() if options.trains or name != "train"}, notes


def _bad_records(part: RecordSet, media: list[str], cache: Path) -> Dataset:
    """Return the records that cannot be used: their indices, and the reasons. If there are columns of `media` (images,
    videos, audio), a text with a placeholder for their content cannot be used."""
    reader = part.reader

    def check(batch: Columns, places: list[int]) -> Columns:
        problems: Columns = {"record": [], "problem": []}
        for place, record in zip(places, records_of(batch)):
            try:
                content = reader.read(record)
                matches = map(MEDIA_PLACEHOLDER.search, reader.texts(content) if media else ())
                if placeholder := next(filter(None, matches), None):
                    content_of = f"the place of what is in the column {' or '.join(media)}"
                    raise BadRecord(f"a text has {placeholder[0]}, {content_of}: only text is read")
            except BadRecord as bad:
                problems["record"].append(place)
                problems["problem"].append(str(bad))
        return problems

    features = Features({"record": Value("int64"), "problem": Value("string")})
    return encode_table(part.table, check, features, ("problems", reader, media), cache)
