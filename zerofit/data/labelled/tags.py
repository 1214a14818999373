"""Token classification (named entities, parts of speech): which columns hold words and their tags, and how they are
read. A tag belongs to a word's first token; the word's other tokens are not trained on."""

from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from zerofit.data.labelled.samples import LabelledColumns
from zerofit.data.records import BadRecord
from zerofit.data.tables import STRINGS
from zerofit.data.turns import blank
from zerofit.model.loss import IGNORE

WORDS = ("tokens", "words")  # the columns, by default
TAGS = ("ner_tags", "tags", "labels", "label", "pos_tags")


class TaggedWords(LabelledColumns):
    """The columns of a table of words with tags: `text` is the column of words, `class_names` are those of tags."""

    def texts(self, content: Any) -> Iterator[str]:
        yield " ".join(content[0])

    def read(self, record: dict[str, Any]) -> Any:
        """LabelledWords: (words, the number of each one's tag). Raises BadRecord: there is no word, or not one known
        tag a word."""
        (column,) = self.text
        words = record[column] or []
        if self.label is None:
            return [word or "" for word in words], [0] * len(words)
        if any(map(blank, words)) or not words:
            raise BadRecord(f"it has {'an empty word' if words else 'no words'} ({column})")
        tags = record[self.label] or []
        if len(tags) != len(words):
            raise BadRecord(f"it has {len(words)} words ({column}) and {len(tags)} tags ({self.label})")
        if IGNORE in tags or str(IGNORE) in tags:
            raise BadRecord(f"a tag is {IGNORE} ({self.label}), as parts of words have it: only whole words are read")
        return words, [self.labels.encode(tag, self.class_names) for tag in tags]


def find_tags(texts: list[str] | None, label: str | None, table: Dataset) -> tuple[str, str] | None:
    """Return (the column of words, that of tags); None for other records."""
    words = find_words(texts, table)
    tags = next((name for name in ([label] if label else TAGS) if name != words and _items(table, name)), None)
    return (words, tags) if words and tags else None


def find_words(texts: list[str] | None, table: Dataset) -> str | None:
    """The column of words."""
    return next((name for name in texts or WORDS if _items(table, name) in STRINGS), None)


def _items(table: Dataset, name: str) -> str | None:
    """Return the type of the elements of a column's lists; None if it has no lists."""
    return getattr(getattr(table.features.get(name), "feature", None), "dtype", None)


def located(rows: list[list[str]]) -> set[tuple[int, str, int, int]]:
    """Return (sentence, kind, first word, last word) of each named entity in the tags of these sentences: B-PER,
    I-PER, O (IOB1, IOB2, IOBES and BILOU)."""
    return {(row, *entity) for row, tags in enumerate(rows) for entity in entities(tags)}


def entities(tags: list[str]) -> list[tuple[str, int, int]]:
    """Return (kind, first word, last word) of each entity. One begins at B or S, after O, E or S, and where the kind
    changes: I needs no B before it, as in conlleval."""
    found: list[tuple[str, int, int]] = []
    before, kind_before = "O", ""
    for place, tag in enumerate(tags):
        mark, _, kind = tag.partition("-")
        mark = {"L": "E", "U": "S"}.get(mark, mark)  # of BILOU
        if mark != "O":
            begins = mark in "BS" or before in "OES" or kind != kind_before
            found.append((kind, place if begins else found.pop()[1], place))
        before, kind_before = mark, kind
    return found
