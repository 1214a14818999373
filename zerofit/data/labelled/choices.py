"""Multiple choice: which columns hold a question and its choices, and records as samples of several rows.

Each choice is read with its question, as a pair of texts: `[CLS] question [SEP] choice [SEP]`. Where a question has
two texts (an article and what is asked of it, or SWAG's two sentences), the second is put before each choice.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset

from zerofit.data.labelled.labels import INTEGER, Labels, is_missing, name_of
from zerofit.data.labelled.samples import LabelledRows
from zerofit.data.records import BadRecord, RecordSet
from zerofit.data.tables import columns_present, holds_lists, match_columns, text_columns, text_of
from zerofit.data.turns import blank
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClsRecipe

NUMBERED = re.compile(r"(choice|ending|option|answer|sol|alternative)_?(\d+|[a-h])")
LISTS = ("choices", "options", "endings")
CONTEXTS = (  # the columns of a question, by default
    ("sent1", "sent2"), ("article", "question"), ("context", "question"), ("passage", "question"),
    ("premise", "question"), ("premise",), ("startphrase",), ("question",), ("ctx",), ("goal",), ("sentence",),
    ("context",),
)  # fmt: skip
ANSWERS = ("label", "answerkey", "answer", "labels", "gold")


@dataclass(frozen=True)
class Choices:
    """The columns of a table of multiple choice."""

    context: tuple[str, ...]  # the column of the question, or the two of them
    choices: tuple[str, ...]  # a column each, or one column of lists
    label: str  # the column that says which choice is right: by its number, its letter, its name or that of its column
    start: int = 0  # the number of the first choice
    by_text: bool = False  # whether the label is the text of a choice, in all records

    @property
    def columns(self) -> list[str]:
        return [*self.context, *self.choices, self.label]

    @property
    def describe(self) -> str:
        """Describe the columns of the questions, for the log."""
        return f"question {' and '.join(self.context)}, choices {', '.join(self.choices)}, label {self.label}"

    def texts(self, content: LabelledRows) -> Iterator[str]:
        rows, _ = content
        yield rows[0][0]
        yield from (choice for _, choice in rows)

    def read(self, record: dict[str, Any]) -> LabelledRows:
        """Return (the two texts of each choice, which is right). Raises BadRecord: a text is empty, or the label is
        none."""
        names, choices = self._choices(record)
        texts = [text for text in choices if text and not blank(text)]
        parts = [record[name] for name in self.context]
        if any(blank(text) for text in parts):
            raise BadRecord(f"the question ({', '.join(self.context)}) is empty")
        if len(choices) < 2 or len(texts) < len(choices):
            raise BadRecord(f"it has {len(choices)} choices" if len(choices) < 2 else "a choice is empty")
        value = record[self.label]
        if is_missing(value):
            raise BadRecord(f"it has no label ({self.label})")
        name, stripped = name_of(value), [text.strip() for text in texts] if self.by_text else []
        right = next((among.index(name) for among in (names, stripped) if name in among), self._number(name))
        if not 0 <= right < len(texts):
            raise BadRecord(f"its label {value!r} is not one of the {len(texts)} choices")
        return [(parts[0], " ".join([*parts[1:], text])) for text in texts], right

    def _choices(self, record: dict[str, Any]) -> tuple[list[str], list[str | None]]:
        """Return (names of the choices, where they have some; their texts)."""
        if len(self.choices) > 1:
            return [*self.choices], _texts(record[name] for name in self.choices)
        held = record[self.choices[0]] or []
        if isinstance(held, dict) and "text" not in held:  # {"A": text, ...}, as MedQA has it
            held = {name: text for name, text in held.items() if text is not None}
            return [*held], _texts(held.values())
        if isinstance(held, dict):  # {"label": ["A", ...], "text": [...]}, as ARC and CommonsenseQA have it
            return [name_of(name) for name in held.get("label") or []], _texts(held.get("text") or [])
        if held and isinstance(held[0], dict):
            return [name_of(choice.get("label")) for choice in held], _texts(choice.get("text") for choice in held)
        return [], _texts(held)

    def _described(self, record: dict[str, Any]) -> tuple[str, int, bool]:
        """Return (the label, the number of choices, whether the label is the text of one)."""
        name, (_, texts) = name_of(record[self.label]), self._choices(record)
        return name, len(texts), name in [text and text.strip() for text in texts]

    def _number(self, name: str) -> int:
        if len(name) == 1 and name.isalpha():
            return ord(name.upper()) - ord("A")
        integer = INTEGER.fullmatch(name)
        return int(integer[1]) - self.start if integer else -1


def _texts(values: Iterable[Any]) -> list[str | None]:
    return [None if value is None else text_of(value) for value in values]


def find_choices(recipe: ClsRecipe, table: Dataset) -> Choices | None:
    """The columns of multiple choice; None for other records. Raises UserError: `choice_columns` names columns that
    are not there, or no column of the question or label is found."""
    present = table.column_names
    choices = tuple(recipe.choice_columns or ()) or known_choices(table)
    if not choices or (recipe.text_columns and not recipe.choice_columns):
        return None
    texts = set(text_columns(table)) - set(choices)
    context = tuple(recipe.text_columns or match_columns(CONTEXTS, texts) or ())
    label = recipe.label_column or match_columns(ANSWERS, {*present} - {*choices})
    missing = [name for name in (*choices, *context, label) if name and name not in present]
    if not recipe.choice_columns and not (context and label):
        return None  # it may be another kind of data
    is_list = len(choices) > 1 or _is_list(table, choices[0])
    if missing or not (context and label and is_list):
        found = f"question: {' '.join(context) or 'none'}, label: {label or 'none'}; {columns_present(table)}"
        problem = f"there is no column {missing[0]!r}" if missing else f"name two columns, or one of lists ({found})"
        raise UserError(f"choice_columns = {' '.join(choices)}: {problem}. See also --text_columns and --label_column")
    reader = Choices(context, choices, label)
    rows = table.select_columns([*dict.fromkeys((*choices, label))])
    values = {reader._described(row) for row in rows if not is_missing(row[label])}
    numbers = {(int(match[1]), size) for name, size, _ in values if (match := INTEGER.fullmatch(name))}
    counts_from_one = any(number == size for number, size in numbers) and all(number for number, _ in numbers)
    return replace(reader, start=int(counts_from_one), by_text=all(is_text for _, _, is_text in values))


def known_choices(table: Dataset) -> tuple[str, ...]:
    """The columns of choices by their usual names, in the order of their numbers or letters."""
    of_stem: dict[str, list[tuple[int, str]]] = {}
    for name in table.column_names:
        if match := NUMBERED.fullmatch(name):
            of_stem.setdefault(match[1], []).append((int(match[2], 18), name))  # h is 17
    numbered = next((names for names in of_stem.values() if len(names) > 1), [])
    lists = [(name,) for name in LISTS if name in table.column_names and _is_list(table, name)]
    return tuple(name for _, name in sorted(numbered)) or next(iter(lists), ())


def _is_list(table: Dataset, name: str) -> bool:
    return holds_lists(table.features[name]) or isinstance(table.features[name], dict)


def labels_of_choices(choices: Choices, parts: Iterable[RecordSet]) -> Labels:
    """The numbers of the choices, as many as an example has at most."""
    max_choices = max(len(rows) for part in parts for rows, _ in part.contents())
    return Labels(tuple(str(number + choices.start) for number in range(max_choices)), True, choices.label)
