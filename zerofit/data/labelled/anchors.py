"""Records of embeddings: a text (anchor), one that belongs to it (positive), perhaps one that does not (negative)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset

from zerofit.data.labelled.groups import PairGroups
from zerofit.data.labelled.labels import Labels
from zerofit.data.labelled.samples import Example, ExampleData
from zerofit.data.records import BadRecord
from zerofit.data.tables import text_columns
from zerofit.data.turns import blank

ANCHORS, POSITIVE, NEGATIVE = ("anchor", "query"), "positive", "negative"


@dataclass(frozen=True)
class Anchors:
    """The columns of a table of pairs or triples, in this order."""

    columns: list[str]
    label: None = None  # there is none

    @property
    def labels(self) -> Labels:
        return Labels(None, of_pairs=True)

    @property
    def describe(self) -> str:
        return f"texts {', '.join(self.columns)}"

    def texts(self, content: Example) -> Iterator[str]:
        return (text for (text,) in content[0])

    def read(self, record: dict[str, Any]) -> Example:
        """(each text as a row, no label). Raises BadRecord: a text is empty."""
        for name in self.columns:
            if blank(record[name]):
                raise BadRecord(f"the {name} is empty")
        return [(record[name],) for name in self.columns], 0


def find_anchors(table: Dataset) -> Anchors | None:
    """The columns of pairs; None for other records."""
    texts = text_columns(table)
    anchor = next((name for name in ANCHORS if name in texts), None)
    if anchor is None or POSITIVE not in texts:
        return None
    return Anchors([anchor, POSITIVE, *([NEGATIVE] if NEGATIVE in texts else [])])


def grouped(data: ExampleData, size: int, seed: int) -> ExampleData:
    """The same with groups of records as samples."""
    train = data.train and PairGroups(data.train, size, seed)
    held_out = [replace(part, samples=PairGroups(part.samples, size, seed)) for part in data.held_out]
    notes = [*data.notes, f"data      groups of {size}"]
    return replace(data, train=train, held_out=held_out, notes=notes, samples_per_epoch=len(train or ()))
