"""Labels: the classes, their names, and the label of each record."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from zerofit.data.records import BadRecord
from zerofit.model.configuration import has_head
from zerofit.recipe.errors import UserError

MISSING = -1  # the hub's GLUE marks records without a label so
NO_LABEL = (None, "", "-")  # SNLI and MNLI write "-" where the annotators did not agree
MOST_CLASSES = 1000


@dataclass(frozen=True)
class Labels:
    """The names of the classes, in the order of their numbers; None if the label is a number (regression).

    Args:
        choices: multiple choice: the classes are the choices of an example, by their numbers.
        number: the name of the label column, and of the number in a regression.
        of_words: token classification: each word of an example has a class, its tag.
        of_pairs: embeddings: there are no labels, but pairs of texts.
    """

    names: tuple[str, ...] | None
    choices: bool = False
    number: str = "number"
    of_words: bool = False
    of_pairs: bool = False

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the model for an example."""
        return len(self.names) if self.names else 1

    @property
    def head(self) -> str:
        """What transformers calls the model: AutoModelFor..."""
        if self.choices:
            return "MultipleChoice"
        return "TokenClassification" if self.of_words else "SequenceClassification"

    @property
    def unit(self) -> str:
        """What the loss is a mean over."""
        if self.names is None:
            return "anchor" if self.of_pairs else "number"
        return "word" if self.of_words else "example"

    @property
    def entities(self) -> bool:
        """Whether the tags mark entities of several words: B-PER, I-PER, O (IOB1, IOB2 and IOBES)."""
        return self.of_words and all(name == "O" or re.fullmatch("[BIES]-.+", name) for name in self.names or ())

    @property
    def describe(self) -> str:
        """For the log."""
        if self.of_pairs:
            return "pairs of texts, for embeddings"
        if self.names is None:
            return "each label is a number (regression)"
        if self.choices:
            return f"multiple choice, one of {len(self.names)}"
        what = "tags of words" if self.of_words else "labels"
        shown = f"{len(self.names)} {what}: {', '.join(self.names[:10])}" + ", ..." * (len(self.names) > 10)
        is_binary = len(self.names) == 2 and not self.of_words
        return shown + (f" (f1 is that of {self.names[1]})" if is_binary else "")

    def encode(self, value: Any, class_names: tuple[str, ...] | None = None) -> int | float:
        """The label of a record: the number of its class, or a number.

        Args:
            class_names: the names of the data's class numbers, if it has class numbers.

        Raises:
            BadRecord: there is none; it is none of the classes, or no number.
        """
        name = "" if _is_missing(value) else _name(value)
        if class_names and name.lstrip("-").isdigit():
            index = int(name)
            name = "" if index == MISSING else class_names[index] if 0 <= index < len(class_names) else name
        if not name:
            raise BadRecord(f"it has no label ({self.number})")
        if self.names is None:
            if not (_is_number(value) or isinstance(value, bool)):
                raise BadRecord(f"the label {value!r} is no number. With words as labels remove --regression")
            return float(value)
        if name not in self.names:
            raise BadRecord(f"the label {value!r} is outside the label set ({', '.join(self.names)})")
        return self.names.index(name)


def find_labels(values: list[Any], where: str, class_names: tuple[str, ...] | None, regression: bool | None) -> Labels:
    """The label set of the training data.

    Names of class numbers are used unchanged; words and integers are classes, sorted; numbers with a fractional part
    make a regression. `regression` overrides all of these.

    Raises:
        UserError: there are no labels, only one, or too many.
    """
    if class_names and not regression:
        return Labels(class_names)
    present = {value for value in values if not _is_missing(value)}
    if not present:
        raise UserError(f"{where}: no record has a label. Check that label_column names the right column")
    if regression or (
        regression is None and all(_is_number(v) for v in present) and not all(_is_whole(v) for v in present)
    ):
        return Labels(None)
    ordered = sorted(present, key=float if all(_is_whole(v) for v in present) else _name)
    names = tuple(dict.fromkeys(_name(value) for value in ordered))
    if len(names) < 2 or len(names) > MOST_CLASSES:
        what = f"only one label, {names[0]!r}" if len(names) < 2 else f"{len(names):,} different labels"
        raise UserError(f"{where} has {what}: nothing to classify. Correct label_column, or use --regression")
    return Labels(names)


def in_model_order(labels: Labels, config) -> Labels:
    """The classes in the order of a pretrained model that has the same names; else unchanged."""
    theirs = [name for _, name in sorted(config.id2label.items())]
    ours = {name.lower(): name for name in labels.names or ()}
    if len(theirs) == labels.num_outputs and set(ours) == {str(name).lower() for name in theirs}:
        return replace(labels, names=tuple(ours[str(name).lower()] for name in theirs))
    return labels


def trained_labels(
    config, class_names: tuple[str, ...] | None, values: list[Any], is_number: bool = False
) -> tuple[Labels, tuple[str, ...] | None]:
    """(the labels of a trained classifier, the names of the data's class numbers), for a launch without training.

    Args:
        class_names: the names of the data's class numbers, if it has class numbers.
        values: the labels of the data; empty if it has none.
        is_number: the task asks for a number.

    Raises:
        UserError: the model was trained for other labels.
    """
    theirs = tuple(str(name) for _, name in sorted(config.id2label.items()))
    gives_number = config.problem_type == "regression" or len(theirs) == 1
    trained = "one number" if gives_number else f"{len(theirs)} labels ({', '.join(theirs)})"
    if is_number != gives_number and (is_number or class_names):
        asked = "a number" if is_number else ", ".join(class_names)
        raise UserError(f"the model was trained for {trained}, and the task asks for {asked}. Name another model")
    if gives_number:
        return Labels(None), None
    if class_names:
        if len(class_names) != len(theirs):
            raise UserError(f"the model was trained for {trained}, the data has {', '.join(class_names)}")
        return Labels(class_names), class_names
    written = {name.lower(): name for name in map(_name, {value for value in values if not _is_missing(value)})}
    if written.keys() <= {name.lower() for name in theirs}:
        return Labels(tuple(written.get(name.lower(), name) for name in theirs)), None
    return Labels(theirs), theirs


def pretrained_head(config, pretrained: str | None, head: str = "SequenceClassification") -> list[str] | None:
    """The labels of the pretrained head; None if the weights have no such head."""
    if not pretrained or not has_head(config, head):
        return None
    return [str(name) for _, name in sorted(config.id2label.items())]


def renamed_head(config, labels: Labels, pretrained: str | None) -> str | None:
    """A note if a pretrained head with the same number of labels gets other names for them."""
    had, names = pretrained_head(config, pretrained, labels.head), labels.names or ()
    if had is None or len(had) != len(names) or {name.lower() for name in had} == {name.lower() for name in names}:
        return None
    pairs = ", ".join(f"{before} as {now}" for before, now in zip(had, names))
    return f"note      the pretrained head is used with other names: {pairs}"


def configure_labels(config, labels: Labels, pretrained: str | None, ignore_mismatched_sizes: bool) -> int | None:
    """Write the labels into the model's configuration.

    Returns: the number of outputs of the pretrained head if it must be replaced, else None.

    Raises:
        UserError: the pretrained model's head has another number of classes, and it may not be replaced; it is one of
            sentences where words have tags, or the other way round.
    """
    other = "SequenceClassification" if labels.of_words else "TokenClassification"
    if pretrained_head(config, pretrained, other):
        raise UserError(
            f"model_name_or_path = {pretrained!r} has a head of {other}, and the data needs one of {labels.head}. "
            "Name the model that it was trained from"
        )
    had, replaced = pretrained_head(config, pretrained, labels.head), None
    if had is not None and len(had) != labels.num_outputs:
        if not ignore_mismatched_sizes:
            ours = f"{len(labels.names)} labels ({', '.join(labels.names)})" if labels.names else "one number"
            raise UserError(
                f"{pretrained!r} has {len(had)} labels ({', '.join(had)}), the data {ours}: --ignore_mismatched_sizes"
            )
        replaced = len(had)
    names = labels.names or (labels.number,)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.num_labels = len(names)
    config.problem_type = "single_label_classification" if labels.names else "regression"
    return replaced


def _name(value: Any) -> str:
    """The name of a label: 1, 1.0, "1" and "1.0" are the same class."""
    if isinstance(value, int) or not _is_whole(value):  # True is an int too, and its name is True
        return str(value)
    return str(int(float(value)))


def _is_missing(value: Any) -> bool:
    """Whether a label is empty or nan, which is pandas' missing value."""
    return value in NO_LABEL or str(value).strip().lower() in ("", "nan")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, bool) or (_is_number(value) and float(value).is_integer())
