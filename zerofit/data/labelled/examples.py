"""Records with labels for classification and regression: columns found, labels numbered, texts tokenised."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Features, Value

from zerofit.data.difficulty import score_column, scores_of
from zerofit.data.labelled import glue
from zerofit.data.labelled.choices import LabelColumns, find_choices, prepare_choices
from zerofit.data.labelled.labels import MISSING, Labels, find_labels, in_model_order, rare_labels, trained_labels
from zerofit.data.labelled.samples import ExampleData, HeldOut, encode_texts, truncation_notes
from zerofit.data.lengths import choose_length, report_data_loss
from zerofit.data.options import PREDICT, DataFiles, DataOptions
from zerofit.data.records import bad_record, require_columns
from zerofit.data.sources import HELD_OUT, Source, read_source
from zerofit.data.tables import check_name, columns_present, limit_parts, split_parts, text_columns
from zerofit.data.token_tables import one_process_at_a_time
from zerofit.model.tokenizer import get_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClsRecipe

TEXTS = (  # columns that hold the text, or the texts of a pair, by default
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"),
    ("text1", "text2"), ("sentence",), ("text",), ("review",), ("content",), ("title", "content"),
)  # fmt: skip
LABELS = ("label", "labels", "class", "category", "target", "score", "gold_label")


@dataclass
class LabelledTexts:
    """Texts of a part, in order, their labels, and how difficult each is."""

    texts: Dataset
    labels: np.ndarray
    scores: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, indices: Iterable[int]) -> "LabelledTexts":
        scores = self.scores if self.scores is None else self.scores[indices]
        return LabelledTexts(self.texts.select(indices), self.labels[indices], scores)


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
        source, held_out = _read(options.files, recipe.task_name)
        if task is None and (choices := find_choices(named, source.first)):
            if recipe.lora:
                raise UserError(
                    "lora = true: the data is multiple choice, for which there are no adapters. Remove --lora, or "
                    "name a text and a label with --text_columns and --label_column"
                )
            return prepare_choices(options, config, source, held_out, choices, length)
        texts, label = _columns(named, source.first, task, recipe.task_name)
        labels, parts, notes = _labelled(options, source, texts, label, task, recipe.regression, config)
        notes.insert(0, f"data      texts {' and '.join(texts)}, labels {label}")
        parts = limit_parts(split_parts(parts, options.parts), options.parts)
        train = next(iter(parts.values())).texts
        tokenizer = get_tokenizer(options.tokenizer, config, lambda: _all_texts(train), train._fingerprint, pairs=True)
        rows = {
            name: encode_texts(part.texts, tokenizer, length, options.cache, part.labels)
            for name, part in parts.items()
        }
        for name, part in parts.items():
            rows[name].scores = part.scores
    for name, part in rows.items():
        notes += truncation_notes(part, name, "texts", length, config)
    sets = [
        HeldOut(rows[name], parts[name].texts, name.removeprefix("validation")) for name in held_out if name in rows
    ]
    return ExampleData(rows.get("train"), sets, labels, tokenizer, length, notes)


def _prepare_unlabelled(
    options: DataOptions, config, task: glue.GlueTask | None, task_name: str | None, named: LabelColumns, length: int
) -> ExampleData:
    """All records of predict_file, with labels that are not used; the classes are those of the model."""
    if any("MultipleChoice" in name for name in config.architectures or ()):
        raise UserError(
            f"predict_file: {options.tokenizer.name!r} is a model of multiple choice, which cannot predict "
            "without labels. Use --evaluate_only"
        )
    with one_process_at_a_time(options.cache.folder):
        table = read_source(options.files, sample_by=lambda files: "line").parts[PREDICT]
        files = options.files.patterns[PREDICT]
        if task and len(files) > 1:
            raise UserError(f"predict_file = {' '.join(files)}: a GLUE task's files are answered one by one")
        texts, _ = _columns(named, table, task, task_name, labelled=False)
        labels, _ = trained_labels(config, task.labels if task else None, [], bool(task) and task.labels is None)
        labels = in_model_order(labels, config)
        kind = np.float32 if labels.names is None else np.int64
        part = LabelledTexts(_only(table, texts), np.zeros(len(table), dtype=kind))
        tokenizer = get_tokenizer(options.tokenizer, config, lambda: (), "")
        rows = encode_texts(part.texts, tokenizer, length, options.cache, part.labels)
    notes = [f"data      texts {' and '.join(texts)}"]
    if empty := len(_bad_records(part, texts, "")):
        notes.append(f"note      {empty:,} of {len(table):,} texts are empty")
    held_out = HeldOut(rows, part.texts, "", glue.numbers(table))
    return ExampleData(None, [held_out], labels, tokenizer, length, notes)


def _read(files: DataFiles, task_name: str | None) -> tuple[Source, tuple[str, ...]]:
    """(the tables, the names of possible held-out parts)."""
    held_out = {"validation": HELD_OUT}
    if task_name == "mnli":
        held_out = {"validation": ("validation_matched",), "validation_mismatched": ("validation_mismatched",)}
    source = read_source(files, held_out)
    header = glue.TASKS[task_name].header if task_name and source.files else ()
    if header and not set(header) & set(source.first.column_names):
        source = read_source(files, held_out, header=header)
    return source, tuple(held_out)


def _columns(
    named: LabelColumns,
    table: Dataset,
    task: glue.GlueTask | None,
    task_name: str | None,
    labelled: bool = True,
) -> tuple[tuple[str, ...], str | None]:
    """(the text columns, the label column if `labelled`)."""
    present, problems = set(table.column_names), []
    texts = named.texts
    if texts:
        problems += [f"text_columns: there is no column {name!r}" for name in texts if name not in present]
    else:
        known = [task.texts, task.released] if task else [pair for pair in TEXTS if len(pair) == 2]
        known += [] if task else [(name,) for name in text_columns(table) if (name,) in TEXTS]
        known += [] if task else [names for names in TEXTS if len(names) == 1]  # texts of digits, read as numbers
        texts = next((names for names in known if names and set(names) <= present - {named.label}), ())
        words = [name for name in text_columns(table) if name not in (*LABELS, named.label)]
        if not texts and not task and len(words) == 1:
            check_name(words[0], "text_columns")
            texts = (words[0],)
        if not texts:
            missing = "no column of text is found"
            if task:
                missing = f"task_name = {task_name} reads {' and '.join(task.texts)}, which are not found"
            problems.append(f"{missing}. Name it (or two, of a pair) with --text_columns")
    label = named.label
    if not labelled:
        label = None
    elif label and label not in present:
        problems.append(f"label_column: there is no column {label!r}")
    elif not label:
        known = ("label", task.label_column) if task else LABELS
        label = next((name for name in known if name in present), None)
        if label is None:
            problems.append("no column of labels is found. Name it with --label_column")
    if label in texts:
        problems.append(f"label_column = {label!r} is a text column too: name another one")
    for option, names in (("text_columns", texts), ("label_column", (label,) if label else ())):
        bad = [name for name in names if name in present and not isinstance(table.features[name], (Value, ClassLabel))]
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
) -> tuple[Labels, dict[str, LabelledTexts], list[str]]:
    """(labels, parts without bad records, notes for the log)."""
    train = source.first
    feature = train.features[label]
    where = {name: source.where(name) for name in source.parts}
    class_names = task.labels if task else tuple(getattr(feature, "names", ()) or ()) or None
    if not options.parts.trains:
        is_number = bool(task) and task.labels is None
        labels, class_names = trained_labels(config, class_names, train[label][:], is_number)
    elif task is not None:
        labels = Labels(task.labels)
    else:
        labels = find_labels(train[label][:], where["train"], feature, regression)
    labels = replace(in_model_order(labels, config), number=label)
    parts, notes = {}, []
    for name, table in source.parts.items():
        require_columns(source, name, (*texts, label))
        encoded = labels.encode(table[label][:], where[name], class_names)
        scores = scores_of(table, score_column(options.difficulty, table)) if name == "train" else None
        part = LabelledTexts(_only(table, texts), encoded, scores)
        bad = _bad_records(part, texts, label)
        if bad and not options.rules.skip_bad_records:
            index, what = min(bad.items())
            raise bad_record(where[name], index, what, bad.values())
        if len(bad) == len(table):
            raise UserError(f"{where[name]} has no record that can be used")
        if bad:
            part = part.select(np.setdiff1d(np.arange(len(table)), list(bad)))
            kinds = "; ".join(f"{count:,}: {what}" for what, count in Counter(bad.values()).items())
            what = f"records of {where[name]} are skipped: {kinds}"
            notes += report_data_loss(options.rules.allow_data_loss, len(bad), len(table), what)
        parts[name] = part
    return labels, parts, notes + (rare_labels(labels, parts["train"].labels) if options.parts.trains else [])


def _only(table: Dataset, texts: tuple[str, ...]) -> Dataset:
    """The text columns, as text (a .csv column of digits is read as numbers)."""
    table = table.select_columns(list(texts))
    if len(text_columns(table)) == len(texts):
        return table
    return table.cast(Features({name: Value("string") for name in texts}))


def _bad_records(part: LabelledTexts, texts: tuple[str, ...], label: str) -> dict[int, str]:
    """{record: what is wrong with it}: its texts are empty, or its label is missing."""
    empty = np.ones(len(part.texts), dtype=bool)
    for name in texts:
        column = part.texts.data.column(name)
        blank = pc.equal(pc.utf8_trim_whitespace(pc.fill_null(column, "")), "")
        empty &= blank.to_numpy()
    missing = np.isnan(part.labels) if part.labels.dtype == np.float32 else part.labels == MISSING
    bad = {int(index): f"it has no label ({label})" for index in np.flatnonzero(missing)}
    return {**bad, **{int(index): f"the text ({', '.join(texts)}) is empty" for index in np.flatnonzero(empty)}}


def _all_texts(table: Dataset):
    for batch in table.iter(1000):
        for column in batch.values():
            yield from (text for text in column if text)
