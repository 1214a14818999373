"""Multiple choice: which columns hold a question and its choices, and records as samples of several rows.

Each choice is read with its question, as a pair of texts: `[CLS] question [SEP] choice [SEP]`. Where a question has
two texts (an article and what is asked of it, or SWAG's two sentences), the second is put before each choice.
"""

import re
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from datasets import Dataset

from zerofit.data.labelled.labels import NO_LABEL, Labels
from zerofit.data.labelled.samples import ExampleData, HeldOut, encode_texts, truncation_notes
from zerofit.data.options import DataOptions
from zerofit.data.pack import Sample
from zerofit.data.records import BadRecord, check_records, read_good, records_of, require_columns
from zerofit.data.sources import Source
from zerofit.data.tables import columns_present, limit_parts, split_parts, text_columns
from zerofit.data.tokenized import TokenizedDataset
from zerofit.data.turns import blank, holds_lists
from zerofit.model.tokenizer import get_tokenizer
from zerofit.recipe.errors import UserError

NUMBERED = re.compile(r"(choice|ending|option|answer|sol|alternative)_?(\d+)")
LISTS = ("choices", "options", "endings")
CONTEXTS = (  # the columns of a question, by default
    ("sent1", "sent2"), ("article", "question"), ("context", "question"), ("passage", "question"),
    ("premise", "question"), ("premise",), ("startphrase",), ("question",), ("ctx",), ("goal",), ("sentence",),
    ("context",),
)  # fmt: skip
ANSWERS = ("label", "answerkey", "answer", "labels", "gold")


@dataclass(frozen=True)
class LabelColumns:
    """The columns that options name; empty, or None, where they name none."""

    texts: tuple[str, ...] = ()
    label: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choices:
    """The columns of a table of multiple choice.

    Args:
        context: the column of the question, or the two of them.
        choices: a column each, or one column of lists.
        label: the column that says which choice is right: by its number, its letter, or its name among the choices.
        start: the number of the first choice.
    """

    context: tuple[str, ...]
    choices: tuple[str, ...]
    label: str
    start: int = 0

    @property
    def columns(self) -> list[str]:
        return [*self.context, *self.choices, self.label]

    def read(self, record: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
        """(the two texts of each choice, which is right). Raises BadRecord: a text is empty, or the label is none."""
        names, texts = self._choices(record)
        parts = [record[name] for name in self.context]
        if any(blank(text) for text in parts):
            raise BadRecord(f"the question ({', '.join(self.context)}) is empty")
        if len(texts) < 2 or any(blank(text) for text in texts):
            raise BadRecord(f"it has {len(texts)} choices" if len(texts) < 2 else "a choice is empty")
        value = record[self.label]
        if value in NO_LABEL:
            raise BadRecord(f"it has no label ({self.label})")
        right = names.index(str(value)) if str(value) in names else self._number(value)
        if not 0 <= right < len(texts):
            raise BadRecord(f"its label {value!r} is not one of the {len(texts)} choices")
        return [(parts[0], " ".join([*parts[1:], text])) for text in texts], right

    def _choices(self, record: dict[str, Any]) -> tuple[list[str], list[str]]:
        """(names of the choices, where they have some; their texts)."""
        held = [record[name] for name in self.choices] if len(self.choices) > 1 else record[self.choices[0]] or []
        if isinstance(held, dict):  # {"label": ["A", ...], "text": [...]}, as ARC and CommonsenseQA have it
            return [str(name) for name in held.get("label") or []], held.get("text") or []
        if held and isinstance(held[0], dict):
            return [str(choice.get("label")) for choice in held], [choice.get("text") for choice in held]
        return [], [str(text) if isinstance(text, (int, float)) else text for text in held]

    def _number(self, value: Any) -> int:
        text = str(value).strip()
        if len(text) == 1 and text.isalpha():
            return ord(text.upper()) - ord("A")
        try:
            return int(float(text)) - self.start
        except ValueError:
            return -1


def find_choices(named: LabelColumns, table: Dataset) -> Choices | None:
    """The columns of multiple choice; None for other records.

    Raises:
        UserError: `choice_columns` names columns that are not there, or no column of the question or label is found.
    """
    present = table.column_names
    choices = named.choices or _known_choices(table)
    if not choices or (named.texts and not named.choices):
        return None
    texts = set(text_columns(table)) - set(choices)
    context = tuple(named.texts or next((names for names in CONTEXTS if set(names) <= texts), ()))
    label = named.label or next((name for name in ANSWERS if name in present and name not in choices), None)
    missing = [name for name in (*choices, *context, label) if name and name not in present]
    if not named.choices and not (context and label):
        return None  # it may be another kind of data
    if missing or not (context and label) or (len(choices) == 1 and not _is_list(table, choices[0])):
        what = (
            f"there is no column {missing[0]!r}"
            if missing
            else (
                "it takes two columns, or one that holds lists"
                if context and label
                else f"no column of the {'label' if context else 'question'} is found, name it with "
                f"{'--label_column' if context else '--text_columns'}"
            )
        )
        raise UserError(f"choice_columns = {' '.join(choices)}: {what}; {columns_present(table)}")
    return _counted(Choices(context, choices, label), table)


def _known_choices(table: Dataset) -> tuple[str, ...]:
    of_stem: dict[str, list[str]] = {}
    for name in table.column_names:
        if match := NUMBERED.fullmatch(name):
            of_stem.setdefault(match[1], []).append(name)
    numbered = next((names for names in of_stem.values() if len(names) > 1), [])
    lists = [(name,) for name in LISTS if name in table.column_names and _is_list(table, name)]
    return tuple(sorted(numbered, key=lambda name: int(NUMBERED.fullmatch(name)[2]))) or next(iter(lists), ())


def _is_list(table: Dataset, name: str) -> bool:
    return holds_lists(table.features[name]) or isinstance(table.features[name], dict)


def _counted(choices: Choices, table: Dataset) -> Choices:
    """The same with the number of the first choice, 0 or 1, inferred from the labels."""
    values = {str(value).strip() for value in table[choices.label][:] if value not in NO_LABEL}
    numbers = {int(float(value)) for value in values if re.fullmatch(r"\d+(\.0)?", value)}
    max_choices = len(choices.choices) if len(choices.choices) > 1 else max(numbers, default=0)
    return replace(choices, start=int(bool(numbers) and 0 not in numbers and max(numbers) == max_choices))


# ------------------------------------------------------------------------------------------------------------- samples


class ChoiceRows:
    """Samples of several rows: their concatenated ids, and in `sizes` the length of each row.

    Args:
        rows: a row for each choice of each record.
        sizes: (records,) choices of each.
        labels: (records,) the index of the right choice.
    """

    def __init__(self, rows: TokenizedDataset, sizes: np.ndarray, labels: np.ndarray):
        self.rows, self.labels = rows, labels
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.lengths = self.sort_key = np.maximum.reduceat(rows.lengths, self.starts[:-1]) * sizes  # as padded
        self.stats = replace(rows.stats, documents=len(labels), samples=len(labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        rows = [self.rows[row] for row in range(self.starts[index], self.starts[index + 1])]
        joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        sizes = np.array([len(row["input_ids"]) for row in rows])
        return {**joined, "sizes": sizes, "label": np.int64(self.labels[index])}


def prepare_choices(
    options: DataOptions, config, source: Source, held_out: tuple[str, ...], choices: Choices, length: int
) -> ExampleData:
    """Check, split and tokenise, as prepare_examples does.

    Raises:
        UserError: a column is missing, or a record cannot be used.
    """
    notes = [
        f"data      question {' and '.join(choices.context)}, choices {', '.join(choices.choices)}, "
        f"label {choices.label}"
    ]
    parts = {}
    for name, table in source.parts.items():
        require_columns(source, name, choices.columns)
        notes += check_records(source, name, choices.read, choices, options.rules, options.cache)
        table = table.select_columns(choices.columns)
        parts[name] = table.select([place for place, _, _ in read_good(table, choices.read)])
    parts = limit_parts(split_parts(parts, options.parts), options.parts)
    train = next(iter(parts.values()))
    tokenizer = get_tokenizer(
        options.tokenizer, config, lambda: _texts(train, choices), train._fingerprint, pairs=True
    )
    sets = {}
    for name, part in parts.items():
        rows = encode_texts(_pairs(part, choices), tokenizer, length, options.cache)
        notes += truncation_notes(rows, name, "choices", length, config)
        sizes, right = zip(*((len(texts), number) for texts, number in map(choices.read, part)))
        sets[name] = ChoiceRows(rows, np.array(sizes), np.array(right))
    max_choices = max(int(np.diff(samples.starts).max()) for samples in sets.values())
    labels = Labels(tuple(str(number + choices.start) for number in range(max_choices)), choices=True)
    texts = {name: part.remove_columns(choices.label) for name, part in parts.items()}
    held = [HeldOut(sets[name], texts[name], name.removeprefix("validation")) for name in held_out if name in sets]
    return ExampleData(sets.get("train"), held, labels, tokenizer, length, notes)


def _pairs(table: Dataset, choices: Choices) -> Dataset:
    """The two texts of each choice of each record."""

    def pairs(batch: dict) -> dict:
        texts = [pair for record in records_of(batch) for pair in choices.read(record)[0]]
        return {"first": [first for first, _ in texts], "second": [second for _, second in texts]}

    name = sha256(f"{table._fingerprint} {choices}".encode()).hexdigest()[:32]
    return table.map(pairs, batched=True, remove_columns=table.column_names, new_fingerprint=name, desc="Choices")


def _texts(table: Dataset, choices: Choices):
    for record in table:
        texts, _ = choices.read(record)
        yield texts[0][0]
        yield from (second for _, second in texts)
