"""Records with labels for classification and regression: columns found, labels numbered, texts tokenised."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from datasets import ClassLabel, Dataset, Value

from zerofit.data.labelled import glue
from zerofit.data.labelled.choices import LabelColumns, find_choices, prepare_choices
from zerofit.data.labelled.labels import Labels, find_labels, in_model_order, trained_labels
from zerofit.data.labelled.samples import Example, ExampleData, encode_parts
from zerofit.data.labelled.tags import TaggedWords, find_tags, find_words, tagged_words
from zerofit.data.lengths import choose_length
from zerofit.data.options import PREDICT, DataOptions
from zerofit.data.records import BadRecord, read_parts
from zerofit.data.sources import HELD_OUT, Source, read_source
from zerofit.data.tables import check_column, check_name, columns_present, text_columns
from zerofit.data.token_tables import one_process_at_a_time
from zerofit.data.turns import blank
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClsRecipe

TEXTS = (  # columns that hold the text, or the texts of a pair, by default
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"),
    ("text1", "text2"), ("sentence",), ("text",), ("review",), ("content",), ("title", "content"),
)  # fmt: skip
LABELS = ("label", "labels", "class", "category", "target", "score", "gold_label")


@dataclass(frozen=True)
class LabelledColumns:
    """The columns of a table of texts, or of pairs, with labels.

    Args:
        label: None: records to be answered, of which every one is read.
        class_names: the names of the data's class numbers, if it has class numbers.
    """

    text: tuple[str, ...]
    label: str | None
    labels: Labels
    class_names: tuple[str, ...] | None = None

    @property
    def columns(self) -> list[str]:
        return [*self.text, *([self.label] if self.label else [])]

    def texts(self, content: Example) -> Iterator[str]:
        rows, _ = content
        return filter(None, rows[0])

    def read(self, record: dict[str, Any]) -> Example:
        """([the text or the pair], the label). Raises BadRecord: all texts are empty, or there is no label."""
        texts = tuple(record[name] or "" for name in self.text)
        if self.label is None:
            return [texts], 0
        if all(map(blank, texts)):
            raise BadRecord(f"the text ({', '.join(self.text)}) is empty")
        return [texts], self.labels.encode(record[self.label], self.class_names)


def prepare_examples(recipe: ClsRecipe, config) -> ExampleData:
    """Read, check and tokenise; the first process of the machine works, the others find the result in the cache.

    Raises:
        UserError: columns are not found, a text is empty, a label is missing or outside the label set.
    """
    task, options = glue.TASKS.get(recipe.task_name or ""), DataOptions.of(recipe)
    length = choose_length("max_length", recipe.max_length, recipe.source("max_length"), config)
    named = LabelColumns(tuple(recipe.text_columns or ()), recipe.label_column, tuple(recipe.choice_columns or ()))
    if recipe.predict_file:
        return _prepare_unlabelled(options, config, task, recipe.task_name, named, length)
    with one_process_at_a_time(options.cache.folder):
        source, held_out = _read(options, recipe.task_name)
        if task is None and (choices := find_choices(named, source.first)):
            if recipe.lora:
                raise UserError("lora = true: multiple choice has no adapters. Remove --lora, or name --label_column")
            return prepare_choices(options, config, source, held_out, choices, length)
        if task is None and (found := find_tags(named.texts, named.label, source.first)):
            (*texts, label), columns = found, tagged_words(options, source, *found, config)
        else:
            texts, label = _columns(named, source.first, task, recipe.task_name)
            columns = _labelled(options, source, texts, label, task, recipe.regression, config)
            source.parts = {name: _as_text(table, texts) for name, table in source.parts.items()}
        parts, notes = read_parts(source, dict.fromkeys(source.parts, columns), options)
        data = encode_parts(options, config, parts, held_out, columns.labels, length)
    data.notes[:0] = [f"data      texts {' and '.join(texts)}, labels {label}", *notes]
    return data


def _prepare_unlabelled(
    options: DataOptions, config, task: glue.GlueTask | None, task_name: str | None, named: LabelColumns, length: int
) -> ExampleData:
    """All records of predict_file, with labels that are not used; the classes are those of the model."""
    if any("MultipleChoice" in name for name in config.architectures or ()):
        raise UserError("predict_file: a model of multiple choice needs labels. Use --evaluate_only")
    with one_process_at_a_time(options.cache.folder):
        source = read_source(options, sample_by=lambda files: "line")
        table = source.first
        labels, _ = trained_labels(config, task.labels if task else None, [], bool(task) and task.labels is None)
        if any("TokenClassification" in name for name in config.architectures or ()):
            if (words := find_words(named.texts, table)) is None:
                raise UserError(f"text_columns: no column of lists of words is found; {columns_present(table)}")
            texts, columns = (words,), TaggedWords(words, None, replace(labels, of_words=True))
        else:
            texts, _ = _columns(named, table, task, task_name, labelled=False)
            columns = LabelledColumns(texts, None, in_model_order(labels, config))
            source.parts = {PREDICT: _as_text(table, texts)}
        parts, _ = read_parts(source, {PREDICT: columns}, options)
        data = encode_parts(options, config, parts, (PREDICT,), columns.labels, length)
    data.notes.insert(0, f"data      texts {' and '.join(texts)}")
    if empty := sum(all(map(blank, columns.texts(content))) for content in parts[PREDICT].contents()):
        data.notes.append(f"note      {empty:,} of {len(table):,} texts are empty")
    data.held_out = [replace(data.held_out[0], suffix="")]
    return data


def _read(options: DataOptions, task_name: str | None) -> tuple[Source, tuple[str, ...]]:
    """(the tables, the names of possible held-out parts)."""
    held_out = {"validation": HELD_OUT}
    if task_name == "mnli":
        held_out = {"validation": ("validation_matched",), "validation_mismatched": ("validation_mismatched",)}
    source = read_source(options, held_out)
    header = glue.TASKS[task_name].header if task_name and source.files else ()
    if header and not set(header) & set(source.first.column_names):
        source = read_source(options, held_out, header=header)
    return source, tuple(held_out)


def _columns(
    named: LabelColumns,
    table: Dataset,
    task: glue.GlueTask | None,
    task_name: str | None,
    labelled: bool = True,
) -> tuple[tuple[str, ...], str | None]:
    """(the text columns, the label column if `labelled`)."""
    present = set(table.column_names)
    for name in named.texts:
        check_column(table, "text_columns", name)
    check_column(table, "label_column", named.label if labelled else None)
    texts, problems = named.texts, []
    if not texts:
        known = [task.texts, task.released] if task else [pair for pair in TEXTS if len(pair) == 2]
        known += [] if task else [(name,) for name in text_columns(table) if (name,) in TEXTS]
        known += [] if task else [names for names in TEXTS if len(names) == 1]  # texts of digits, read as numbers
        texts = next((names for names in known if names and set(names) <= present - {named.label}), ())
        words = [name for name in text_columns(table) if name not in (*LABELS, named.label)]
        if not texts and not task and len(words) == 1:
            check_name(words[0], "text_columns")
            texts = (words[0],)
        if not texts:
            missing = f"no column of text is found{f' ({chr(32).join(task.texts)})' if task else ''}"
            problems.append(f"{missing}. Name it (or two, of a pair) with --text_columns")
    label = named.label if labelled else None
    if labelled and not label:
        known = ("label", task.label_column) if task else LABELS
        label = next((name for name in known if name in present), None)
        if label is None:
            problems.append("no column of labels is found. Name it with --label_column")
    if label in texts:
        problems.append(f"label_column = {label!r} is a text column too: name another one")
    for option, names in (("text_columns", texts), ("label_column", (label,) if label else ())):
        bad = [name for name in names if not isinstance(table.features[name], (Value, ClassLabel))]
        problems += [f"{option}: {name!r} holds lists or records, not one value each" for name in bad]
    if problems:
        raise UserError([f"{problem}; {columns_present(table)}" for problem in problems])
    return texts, label


def _labelled(
    options: DataOptions,
    source: Source,
    texts: tuple[str, ...],
    label: str,
    task: glue.GlueTask | None,
    regression: bool | None,
    config,
) -> LabelledColumns:
    """The columns, with the labels that are in them."""
    values, feature = source.first[label][:], source.first.features[label]
    class_names = task.labels if task else tuple(getattr(feature, "names", ()) or ()) or None
    if not options.trains:
        labels, class_names = trained_labels(config, class_names, values, bool(task) and task.labels is None)
    elif task is not None:
        labels = Labels(task.labels)
    else:
        labels = find_labels(values, source.where("train"), feature, regression)
    labels = replace(in_model_order(labels, config), number=label)
    return LabelledColumns(texts, label, labels, class_names)


def _as_text(table: Dataset, texts: tuple[str, ...]) -> Dataset:
    """The table with the text columns as text (a .csv column of digits is read as numbers)."""
    for name in texts:
        if name in table.column_names and name not in text_columns(table):
            table = table.cast_column(name, Value("string"))
    return table
