"""Labels: the classes, their names, the label of each record, what the log says of them; and the
samples: texts, pairs, choices and words as rows of token ids, and the held-out parts.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Final

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerofit.data.chat.instructions import is_blank
from zerofit.data.lengths import report_data_loss
from zerofit.data.mixture import MixedSamples
from zerofit.data.options import PART_NAMES, PREDICT, DataOptions
from zerofit.data.pack import LabelledSamples, TaskData, TokenizedDataset, stats_rows
from zerofit.data.records import BadRecord, Encode, RecordSet
from zerofit.data.tables import NUMBER_TEXT, TOKEN_IDS, input_columns, table_key, text_of, tokenizer_hash
from zerofit.model.configuration import has_head
from zerofit.model.tokenizer import get_tokenizer, padding_values, read_by_words
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import BALANCED, ClsRecipe

MISSING_LABEL = -1  # the label of records without a label in the hub's GLUE
MULTI_LABEL: Final = "multi_label_classification"  # problem_type of transformers
GOLD_LABEL_COLUMN = "gold_label"  # the column of SNLI and MNLI, where "-" says that the annotators did not agree
MAX_CLASSES = 1000
MULTI_LABEL_THRESHOLD = 0.5  # the probability above which a label is predicted, where a record may have several
INTEGER_LABEL = re.compile(r"(0|-?[1-9]\d*)(\.0)?", re.ASCII)  # an integer, not a name: 007, 1e3
DECIMAL_COMMA_NUMBER = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
SEPARATED_NUMBER = re.compile(r"[+-]?[0-9][0-9.,'\u2019\s]*")  # 0,5; 1,234.5; 1.234,5; 1 234,5 (also U+202F)
MIN_RECORDS = 5  # a class with fewer training records gets a note
MAX_COUNTED_CLASSES = 20  # classes whose number of records is shown
MAX_NAMED_CLASSES = 5  # classes that a note names


@dataclass(frozen=True)
class Labels:
    """The names of the classes, in the order of their numbers; None if the label is a number (regression)."""

    names: tuple[str, ...] | None
    choices: bool = False  # multiple choice: the classes are the choices of an example, by their numbers
    number: str = "number"  # the name of the label column, and of the number in a regression
    is_token_level: bool = False  # token classification: each word of an example has a class, its tag
    is_multi_label: bool = False  # a record has any number of the classes
    decimal_comma: bool = False  # the numbers of a regression are written 0,5
    notes: tuple[str, ...] = field(default=(), repr=False, compare=False)  # for the log

    @property
    def num_outputs(self) -> int:
        return len(self.names) if self.names else 1

    @property
    def head(self) -> str:
        """Return the name of transformers' class for the model, after AutoModelFor."""
        if self.choices:
            return "MultipleChoice"
        return "TokenClassification" if self.is_token_level else "SequenceClassification"

    @property
    def unit(self) -> str:
        """Return the name of one target ("example", "word"), for the plot."""
        if self.names is None:
            return "number"
        return "word" if self.is_token_level else "example"

    @property
    def entities(self) -> bool:
        """True if the tags mark entities of several words: B-PER, I-PER, O (IOB1, IOB2, IOBES and BILOU)."""
        return self.is_token_level and all(
            name == "O" or re.fullmatch("[BIESLU]-.+", name) for name in self.names or ()
        )

    @property
    def describe(self) -> str:
        if self.names is None:
            return "each label is a number (regression)"
        if self.choices:
            return f"multiple choice, one of {len(self.names)}"
        noun = "labels, any number a record" if self.is_multi_label else "labels"
        noun = "tags of words" if self.is_token_level else noun
        more = ", ..." if len(self.names) > 10 else ""
        shown = f"{len(self.names)} {noun}: {', '.join(self.names[:10])}{more}"
        if self.is_multi_label:
            return f"{shown} (predicted are those with a probability above {MULTI_LABEL_THRESHOLD:g})"
        is_binary = len(self.names) == 2 and not self.is_token_level
        return shown + (f" (f1 is that of {self.names[1]})" if is_binary else "")

    def encode(self, value: Any, class_names: tuple[str, ...] | None = None) -> int | float:
        """Return the label of a record: the number of its class, or of a regression. Raises BadRecord: there is none;
        it is none of the classes, or no number. `class_names`: the names of the data's class numbers, if it has class
        numbers."""
        name = "" if is_missing(value, self.number) else name_of(value)
        if class_names and (isinstance(value, int) or name not in class_names) and INTEGER_LABEL.fullmatch(name):
            index = int(float(name))
            name = "" if index == MISSING_LABEL else class_names[index] if 0 <= index < len(class_names) else name
        if not name:
            raise BadRecord(f"it has no label ({self.number})")
        if self.names is None:
            number = _number(value, self.decimal_comma)
            if number is None:
                raise BadRecord(f"the label {value!r} is not a number. With words as labels remove --regression")
            return number
        place = self.place_of(name)
        if place is None:
            raise BadRecord(f"the label {value!r} is outside the label set ({', '.join(self.names)})")
        return place

    def place_of(self, name: str) -> int | None:
        """Return the number of the class of that name, or None. 1 and 1.0 are one class, unless the set has both."""
        names = self.names or ()
        integer = INTEGER_LABEL.fullmatch(name)
        spellings = (name, integer[1], f"{integer[1]}.0") if integer else (name,)
        return next((names.index(each) for each in spellings if each in names), None)


def find_labels(
    values: list[Any], where: str, class_names: tuple[str, ...] | None, regression: bool | None, column: str = ""
) -> Labels:
    """Return the label set of the training data.

    Names of class numbers are used unchanged; words and integers are classes, sorted; numbers with a fractional part
    make a regression. `regression` overrides all of these. A text is a name as it is written ("007", "1e3"), without
    blanks at its ends; 1.0 among integers is 1. Raises UserError: there are no labels, only one, or too many.
    """
    if class_names and not regression:
        return Labels(class_names)
    present = {name_of(value): value for value in values if not is_missing(value, column)}
    if not present:
        raise UserError(f"{where}: no record has a label. Check that label_column names the right column")
    numbers = [number for value in present.values() if (number := _number(value)) is not None]
    if regression is None and 2 * len(numbers) > len(present) and not all(map(float.is_integer, numbers)):
        if not_numbers := [name for name, value in present.items() if _number(value) is None]:
            raise UserError(
                f"{where}: most labels are numbers, and {not_numbers[0]!r} is none. To leave such records out say "
                "--regression true --skip_bad_records; if each is the name of a class, --regression false"
            )
        return Labels(None)
    if regression:
        return _numbers(present, where)
    if regression is None:
        refuse_unclear(present, where)
    names = tuple(sorted(present))
    integers = [INTEGER_LABEL.fullmatch(name) for name in present]
    if all(integers):
        ordered = sorted(filter(None, integers), key=lambda match: int(match[1]))
        shortened = not all(match[2] for match in ordered)
        names = tuple(dict.fromkeys(match[1] if shortened else match[0] for match in ordered))
    if len(names) < 2 or len(names) > MAX_CLASSES:
        problem = f"only one label, {names[0]!r}" if len(names) < 2 else f"{len(names):,} different labels"
        raise UserError(f"{where} has {problem}: nothing to classify. Correct label_column, or use --regression")
    blank = sorted({str(value) for value in values if str(value) != str(value).strip() and not is_missing(value)})
    if blank:
        examples = ", ".join(map(repr, blank[:3])) + (", ..." if len(blank) > 3 else "")
        return Labels(names, notes=(f"note      labels are read without the blanks at their ends: {examples}",))
    if names == tuple(map(str, range(MISSING_LABEL, len(names) + MISSING_LABEL))):
        note = "note      the label -1 is a class; if records have it that have no label, as SNLI's, remove these"
        return Labels(names, notes=(note,))
    return Labels(names)


def _numbers(names: Iterable[str], where: str) -> Labels:
    """Return the labels of a regression, which may be written with decimal commas."""
    commas = [name for name in names if "," in name]
    if not commas:
        return Labels(None)
    wrong = [name for name in commas if not DECIMAL_COMMA_NUMBER.fullmatch(name)]
    thousands = all(re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", name) for name in commas)
    if wrong or thousands or any("." in name for name in names):
        raise UserError(
            f"{where}: labels such as {(wrong or commas)[0]!r} have commas that may be decimal commas or separate "
            "thousands. Write 1234.5"
        )
    note = f"note      labels have decimal commas: {commas[0]} is read as {commas[0].replace(',', '.')}"
    return Labels(None, decimal_comma=True, notes=(note,))


def refuse_flags(labels: Iterable[list[Any] | None], where: str) -> None:
    """Raises UserError where a record has a 0 or 1, or a probability, for each class, and not the labels that it
    has."""
    sets = [values for values in labels if values]
    numbers = {*map(_number, chain(*sets))}
    sizes = {*map(len, sets)}
    has_fractions = None not in numbers and any(number % 1 for number in numbers if number)
    if len(sizes) == 1 and sizes != {1} and (numbers <= {0.0, 1.0} or has_fractions):
        raise UserError(
            f"{where}: the labels are lists of numbers, one for each class, such as {sets[0]}. Write the names of the "
            'labels that a record has: {"labels": ["a", "c"]}'
        )


def refuse_unclear(names: Iterable[str], where: str) -> None:
    """Raises UserError where all labels are texts of lists, or look like numbers and some have commas or blanks, or
    where one joins others (a,c where a and c exist)."""
    if all(name[0] + name[-1] == "[]" for name in names):
        raise UserError(
            f"{where}: the labels are texts of lists, such as {next(iter(names))!r}. Write lists in a .jsonl file: "
            '{"labels": ["a", "c"]}; or say --regression false if each such text is a class'
        )
    commas = [name for name in names if re.search(r"[,'\u2019\s]", name)]
    if commas and all(SEPARATED_NUMBER.fullmatch(name) or DECIMAL_COMMA_NUMBER.fullmatch(name) for name in names):
        raise UserError(
            f"{where}: labels such as {commas[0]!r} have a comma or blank. If they are numbers with a decimal comma, "
            "say --regression true; if they are names of classes, --regression false; several labels of a record are "
            'lists: {"label": ["0", "5"]} in a .jsonl file'
        )
    name_set = {*names}
    marks = ((name, mark) for name in names for mark in ",;|" if mark in name)
    if joined := next((name for name, mark in marks if {part.strip() for part in name.split(mark)} <= name_set), None):
        raise UserError(
            f"{where}: the label {joined!r} joins other labels. If a record has several, write lists in a .jsonl: "
            '{"labels": ["a", "c"]}; if it is the name of a class, say --regression false'
        )


def _labels_of_head(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the labels of a model, in the order of their numbers."""
    return tuple(str(name) for _, name in sorted((config.id2label or {}).items()))


def order_as_model(labels: Labels, config: PretrainedConfig) -> Labels:
    """Return the labels in the order of the pretrained model if it has the same class names; else unchanged."""
    model_names = _labels_of_head(config)
    data_names = {name.lower(): name for name in labels.names or ()}
    if len(model_names) == labels.num_outputs and set(data_names) == {name.lower() for name in model_names}:
        return replace(labels, names=tuple(data_names[name.lower()] for name in model_names))
    return labels


def trained_labels(
    config: PretrainedConfig, class_names: tuple[str, ...] | None, values: list[Any], is_number: bool = False
) -> tuple[Labels, tuple[str, ...] | None]:
    """Return (the labels of a trained classifier, the names of the data's class numbers), for a launch without
    training. Raises UserError: the model was trained for other labels. `class_names`: the names of the data's class
    numbers, if it has class numbers. `values`: the labels of the data; empty if it has none. `is_number`: the task
    asks for a number."""
    model_names = _labels_of_head(config)
    is_multi_label = config.problem_type == MULTI_LABEL
    gives_number = config.problem_type == "regression" or (len(model_names) == 1 and not is_multi_label)
    trained = "one number" if gives_number else f"{len(model_names)} labels ({', '.join(model_names)})"
    if is_number != gives_number and (is_number or class_names):
        expected = "a number" if is_number or class_names is None else ", ".join(class_names)
        raise UserError(f"the model was trained for {trained}, and the task asks for {expected}. Name another model")
    names = sorted({name_of(value) for value in values if not is_missing(value)})
    if gives_number:
        return _numbers(names, "the held-out data"), None
    if class_names and {*class_names} < {*model_names}:
        return Labels(model_names, is_multi_label=is_multi_label), class_names
    if class_names:
        if len(class_names) != len(model_names):
            raise UserError(f"the model was trained for {trained}, the data has {', '.join(class_names)}")
        return Labels(class_names, is_multi_label=is_multi_label), class_names
    labels = Labels(model_names, is_multi_label=is_multi_label)
    written = {name.lower(): name for name in names if labels.place_of(name) is None}
    if len({name.lower() for name in model_names}) == len(model_names):  # no two names differ by case alone
        as_written = tuple(name if name in names else written.get(name.lower(), name) for name in model_names)
        labels = replace(labels, names=as_written)
    numbered = not any(labels.place_of(name) is not None for name in names)
    return labels, labels.names if numbered and names else None


def pretrained_head(
    config: PretrainedConfig, pretrained: str | None, head: str = "SequenceClassification"
) -> tuple[str, ...]:
    """Return the labels of the pretrained head; empty if the weights have no such head."""
    return _labels_of_head(config) if pretrained and has_head(config, head) else ()


def configure_labels(
    config: PretrainedConfig, labels: Labels, pretrained: str | None, ignore_mismatched_sizes: bool
) -> tuple[int, str | None]:
    """Write the labels into the model's configuration. Raises UserError: the pretrained model's head has another
    number of classes, and it may not be replaced; it is one of sentences where words have tags, or the other way
    round.

    Returns: the number of outputs of the pretrained head if it must be replaced, else 0; a note if a head with the
    same number of labels gets other names for them.
    """
    other_head = "SequenceClassification" if labels.is_token_level else "TokenClassification"
    if pretrained_head(config, pretrained, other_head):
        raise UserError(
            f"model_name_or_path = {pretrained!r} has a head of {other_head}, and the data needs one of "
            f"{labels.head}. Name the model that it was trained from"
        )
    previous = pretrained_head(config, pretrained, labels.head)
    names = labels.names or (labels.number,)
    note = None
    is_replaced = bool(previous) and len(previous) != len(names)
    if is_replaced and not ignore_mismatched_sizes:
        ours = f"{len(names)} labels ({', '.join(names)})" if labels.names else "one number"
        raise UserError(
            f"{pretrained!r} has {len(previous)} labels ({', '.join(previous)}), the data {ours}: "
            "--ignore_mismatched_sizes"
        )
    is_renamed = previous and labels.names and {name.lower() for name in previous} != {name.lower() for name in names}
    if is_renamed and not is_replaced:
        pairs = ", ".join(f"{old} as {new}" for old, new in zip(previous, names))
        note = f"note      the pretrained head is used with other names: {pairs}"
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.num_labels = len(names)
    config.problem_type = MULTI_LABEL if labels.is_multi_label else "single_label_classification"
    if not labels.names:
        config.problem_type = "regression"
    return len(previous) if is_replaced else 0, note


def name_of(value: Any) -> str:
    """Return the name of a label: a text as it is written, without the blanks at its ends; 1 and 1.0 as "1"."""
    return text_of(value).strip()


def is_missing(value: Any, column: str = "") -> bool:
    """Return whether there is no label: an empty text, or nan as a number, which is pandas' missing value. As a text
    nan is a name."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    return not str(value).strip() or (column == GOLD_LABEL_COLUMN and value == "-")


def _number(value: Any, decimal_comma: bool = False) -> float | None:
    """Return a label as a number; None if it is not a number."""
    try:
        if isinstance(value, str):
            text = value.strip()
            if decimal_comma and DECIMAL_COMMA_NUMBER.fullmatch(text):
                text = text.replace(",", ".")
            value = text if NUMBER_TEXT.fullmatch(text) else None
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def label_report(labels: Labels, trained: list[np.ndarray], held_out: list[np.ndarray]) -> list[str]:
    """Return lines for the log: the number of records of each class, and classes with few or none. `trained,
    held_out`: the labels of samples; empty where there are no such samples."""
    names = labels.names
    if names is None or labels.choices or not (trained or held_out):
        return []
    noun = "words" if labels.is_token_level else "records"
    counts = np.zeros(len(names), dtype=np.int64)
    held_counts = np.zeros_like(counts)
    for count, parts in ((counts, trained), (held_counts, held_out)):
        for part in parts:
            count += (
                part.sum(axis=0).astype(np.int64) if labels.is_multi_label else np.bincount(part, minlength=len(names))
            )
    both = " + ".join([*(["training"] if trained else []), *(["held out"] if held_out else [])])
    largest = sorted(np.argsort(-(counts + held_counts), kind="stable")[:MAX_COUNTED_CLASSES])
    columns = [*([counts] if trained else []), *([held_counts] if held_out else [])]
    counted = [f"{names[place]} {' + '.join(f'{column[place]:,}' for column in columns)}" for place in largest]
    others = (
        f", and {len(names) - MAX_COUNTED_CLASSES:,} labels with fewer" if len(names) > MAX_COUNTED_CLASSES else ""
    )
    lines = [f"labels    {noun} of each label ({both}): {', '.join(counted)}{others}"]
    if trained:
        rare = [f"{names[place]} ({counts[place]})" for place in np.flatnonzero((counts > 0) & (counts < MIN_RECORDS))]
        lines += _note(f"fewer than {MIN_RECORDS} training {noun}", rare)
        lines += _note(f"no training {noun}", [names[place] for place in np.flatnonzero(counts == 0)])
    if held_out:
        lines += _note(f"no held-out {noun}", [names[place] for place in np.flatnonzero(held_counts == 0)])
    return lines


def _note(problem: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    other_names = f", and {len(names) - MAX_NAMED_CLASSES:,} more" if len(names) > MAX_NAMED_CLASSES else ""
    return [f"note      {problem}: {', '.join(names[:MAX_NAMED_CLASSES])}{other_names}"]


# The text or the pair of each row (one, or one a choice), and the label (0 or 1 for each class of a set).
LabelledRows = tuple[list[tuple[str, ...]], int | float | list[float]]
LabelledWords = tuple[list[str], list[int | float]]  # words, and the tag of each
Example = LabelledRows | LabelledWords


@dataclass(frozen=True)
class LabelledColumns:
    """The columns of a table of texts, or of pairs, with labels. `label`: None for records of predict_file, all of
    which are read. `class_names`: the names of the data's class numbers, if it has class numbers."""

    text: tuple[str, ...]
    label: str | None
    labels: Labels
    class_names: tuple[str, ...] | None = None

    @property
    def columns(self) -> list[str]:
        return [*self.text, *([self.label] if self.label else [])]

    @property
    def describe(self) -> str:
        return f"texts {' and '.join(self.text)}{f', labels {self.label}' if self.label else ''}"

    def texts(self, content: Any) -> Iterator[str]:
        rows, _ = content
        return filter(None, rows[0])

    def read(self, record: dict[str, Any]) -> Any:
        """Return LabelledRows: ([the text or the pair], the label). Raises BadRecord: all texts are empty, or there is
        no label."""
        texts = tuple(record[name] or "" for name in self.text)
        if self.label is None:
            return [texts], [0.0] * self.labels.num_outputs if self.labels.is_multi_label else 0
        if all(map(is_blank, texts)):
            raise BadRecord(f"the text ({', '.join(self.text)}) is empty")
        label = record[self.label]
        if not self.labels.is_multi_label:
            return [texts], self.labels.encode(label, self.class_names)
        labels = label if isinstance(label, list) else [label]
        present = {self.labels.encode(each, self.class_names) for each in labels}
        return [texts], [float(place in present) for place in range(self.labels.num_outputs)]


@dataclass
class HeldOut:
    """A held-out part. `sources`: of a mixture, the samples of each source by its name."""

    samples: LabelledSamples
    tables: list[Dataset]  # the record of each sample, for predictions.jsonl: of a mixture a table a source
    suffix: str  # the part's name in figures: "" or "_mismatched"
    sources: dict[str, LabelledSamples] = field(default_factory=dict)


@dataclass(kw_only=True)
class ExampleData(TaskData):
    """The data of classification and regression: samples of all parts, and the labels. `to_answer`: whether the
    records are those of predict_file, whose labels are not used."""

    train: LabelledSamples | None = None
    held_out: list[HeldOut]
    labels: Labels
    max_length: int
    to_answer: bool = False

    @property
    def longest(self) -> dict[str, Any]:
        """Return the maximum number of tokens of a training sample, by column."""
        return {"input_ids": self.max_length * (self.labels.num_outputs if self.labels.choices else 1)}

    @property
    def num_held_out(self) -> int:
        return sum(len(part.samples) for part in self.held_out)

    def describe(self) -> list[str | list[tuple[str, ...]]]:
        held_out = self.held_out[0].samples.stats if self.held_out else None
        parts = (None, held_out) if self.to_answer else (held_out,)
        return [f"data      {self.labels.describe}", stats_rows(self.train.stats if self.train else None, *parts)]

    @property
    def row_length(self) -> int:
        """Return the mean number of tokens of a training row, without padding."""
        return round(self.trained.stats.mean_length / np.size(self.trained[0].get("sizes", 0)))


def encode_parts(
    options: DataOptions, config: PretrainedConfig, parts: dict[str, RecordSet], labels: Labels, length: int
) -> ExampleData:
    """Tokenise the records of all parts, whose readers return an Example; notes say which texts are truncated."""
    parts = options.limited(parts)
    train = next(iter(parts.values()))
    tokenizer = get_tokenizer(options.recipe, config, train.texts, table_key(train.table), pairs=True)
    if getattr(config, "type_vocab_size", None) == 1:  # a RoBERTa has no second type of tokens
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    columns = tuple(padding_values(tokenizer))
    notes: list[str] = []
    sets: dict[str, TokenizedDataset] = {}
    encode: Encode = partial(_encode_words if labels.is_token_level else _encode_rows, tokenizer, length)
    if labels.is_token_level:
        read_by_words(tokenizer)
        kinds: dict[str, Any] = {"tags": TOKEN_IDS, "starts": TOKEN_IDS}
    else:
        kind = List(Value("float32")) if labels.is_multi_label else Value("int64" if labels.names else "float32")
        kinds = {"sizes": TOKEN_IDS, "label": kind}
    numbers = dict.fromkeys(("truncated", "longest"), Value("int32"))
    features = Features({**dict.fromkeys(columns, TOKEN_IDS), **kinds, **numbers})
    extra_columns = ("sizes",) if labels.choices else ("tags", "starts") if labels.is_token_level else ()
    for name, part in parts.items():
        table = part.encode(encode, features, (tokenizer_hash(tokenizer), length, columns), options.cache)
        sets[name] = TokenizedDataset(table, (*columns, *extra_columns))
        texts_cut = f"{PART_NAMES.get(name, PART_NAMES['validation'])} texts are cut at {length} tokens (max_length)"
        longest = np.asarray(table.with_format("numpy")["longest"][:])
        cut = int((longest > length).sum())
        notes += report_data_loss(True, cut, len(part), texts_cut, longest, option="max_length", config=config)
    held_out = []
    for name in sorted(parts.keys() - {"train"}):  # all columns for predictions.jsonl, where the label is a name
        suffix = name.removeprefix("validation").removeprefix(PREDICT)
        label = getattr(parts[name].reader, "label", None)
        records = parts[name].records
        records = records.remove_columns("label") if label == "label" else records
        reserved = ("prediction", "probability", "probabilities", *(("label",) if label else ()))
        held_out.append(HeldOut(sets[name], [input_columns(records, *reserved)], suffix))
    return ExampleData(
        train=sets.get("train"),
        held_out=held_out,
        labels=labels,
        tokenizer=tokenizer,
        max_length=length,
        notes=notes,
    )


def _encode_rows(
    tokenizer: PreTrainedTokenizerBase, length: int, examples: list[Example], names: list[str]
) -> dict[str, list[Any]]:
    """Return the token ids of the rows of each record, concatenated. `sizes` are the lengths of the rows, `longest` is
    the largest before truncation. If a pair does not fit, its longer text is truncated first."""
    columns = tuple(padding_values(tokenizer))
    texts = list(zip(*chain.from_iterable(rows for rows, _ in examples)))
    encoded = tokenizer(
        *map(list, texts),
        return_attention_mask=False,
        return_token_type_ids="token_type_ids" in columns,
        verbose=False,
    )
    ids = {name: list(encoded[name]) for name in columns}
    full_lengths = [len(row) for row in ids["input_ids"]]
    for index, size in enumerate(full_lengths):
        if size > length:
            cut = tokenizer(*(column[index] for column in texts), truncation=True, max_length=length)
            for name in columns:
                ids[name][index] = cut[name]
    sizes = [len(row) for row in ids["input_ids"]]
    spans = list(pairwise(accumulate((len(rows) for rows, _ in examples), initial=0)))
    return {
        **{name: [list(chain.from_iterable(ids[name][a:b])) for a, b in spans] for name in columns},
        "sizes": [sizes[a:b] for a, b in spans],
        "truncated": [sum(full_lengths[a:b]) - sum(sizes[a:b]) for a, b in spans],
        "longest": [max(full_lengths[a:b]) for a, b in spans],
        "label": [label for _, label in examples],
    }


def _encode_words(
    tokenizer: PreTrainedTokenizerBase, length: int, examples: list[Example], names: list[str]
) -> dict[str, list[Any]]:
    """Return the token ids of the words of each record. `tags` are the tags of the words, `starts` the index of each
    word's first token: -1 if the word is cut off, or has no token."""
    rows = [words for words, _ in examples]
    full, shortened = (
        tokenizer(rows, is_split_into_words=True, return_attention_mask=False, verbose=False, **cut)
        for cut in ({}, {"truncation": True, "max_length": length})
    )
    first = [dict(map(reversed, reversed([*enumerate(shortened.word_ids(row))]))) for row in range(len(rows))]
    longest = [len(row) for row in full["input_ids"]]
    return {
        **{name: shortened[name] for name in padding_values(tokenizer)},
        "tags": [tags for _, tags in examples],
        "starts": [[of_word.get(word, -1) for word in range(len(row))] for of_word, row in zip(first, rows)],
        "truncated": [size - len(row) for size, row in zip(longest, shortened["input_ids"])],
        "longest": longest,
    }


def class_weights(recipe: ClsRecipe, data: ExampleData) -> list[float] | None:
    """Return the weight of each class, in the order of their numbers; None if all have the same weight.

    `balanced` is scikit-learn's: examples / (classes x examples of the class), so that each class weighs as much as
    any other in the whole training set, or in an epoch of a mixture. Raises UserError: the labels are numbers or
    choices, which no option of this group is for; or a class is not there.
    """
    names = data.labels.names
    if names is None or data.labels.choices or data.labels.is_multi_label:
        changed = [name for name in ("class_weights", "focal_gamma", "label_smoothing") if getattr(recipe, name)]
        if not changed:
            return None
        noun = "numbers (regression)" if names is None else "choices" if data.labels.choices else "lists"
        raise UserError(f"{' and '.join(changed)}: the labels are {noun}, and this is for classes. Remove it")
    train = data.train if recipe.trains else None
    if not recipe.class_weights or train is None:
        return None
    if recipe.class_weights == [BALANCED]:
        sets = train.sets if isinstance(train, MixedSamples) else [train]
        counts = np.zeros(len(names))
        for each, times in zip(sets, data.passes or [1.0]):
            counts += times * np.bincount(each.labels, minlength=len(names))
        present = np.count_nonzero(counts)
        return np.where(counts > 0, counts.sum() / (present * np.where(counts > 0, counts, 1.0)), 1.0).tolist()
    weights = recipe.weight_of_class
    if unknown := weights.keys() - set(names):
        raise UserError(
            f"class_weights: {', '.join(sorted(unknown))} is not a class of the data ({', '.join(names[:20])}"
            f"{', ...' if len(names) > 20 else ''})"
        )
    return [weights.get(name, 1.0) for name in names]


def describe_weights(weights: list[float], names: tuple[str, ...]) -> str:
    """Return a line for the log that names the classes with the largest and the smallest weight."""
    low = int(np.argmin(weights))
    high = int(np.argmax(weights))
    return f"loss      class weights from {weights[low]:.4g} ({names[low]}) to {weights[high]:.4g} ({names[high]})"
