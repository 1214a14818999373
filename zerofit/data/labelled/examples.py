"""Records with labels for classification and regression: columns found, labels numbered, texts tokenised."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from datasets import ClassLabel, Dataset, Features, Value
from transformers import PretrainedConfig

from zerofit.data import tables
from zerofit.data.labelled.choices import Choices, find_choices, known_choices, labels_of_choices
from zerofit.data.labelled.label_report import label_report
from zerofit.data.labelled.labels import Labels, find_labels, in_model_order, refuse_flags, trained_labels
from zerofit.data.labelled.samples import ExampleData, HeldOut, LabelledColumns, encode_parts
from zerofit.data.labelled.tags import TaggedWords, find_tags, find_words
from zerofit.data.lengths import choose_length
from zerofit.data.mixture import MixedSamples, mixed, options_of_sources
from zerofit.data.options import PREDICT, DataOptions
from zerofit.data.records import read_parts
from zerofit.data.sources import HELD_OUT, Source, read_source
from zerofit.data.turns import blank
from zerofit.model.configuration import has_head
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClsRecipe

TEXTS = (  # columns that hold the text, or the texts of a pair, by default
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"),
    ("text1", "text2"), ("text_a", "text_b"), ("text", "text_pair"), ("sentence_a", "sentence_b"),
    ("sentence",), ("text",), ("review",), ("content",), ("title", "content"),
)  # fmt: skip
LABELS = ("label", "labels", "class", "category", "target", "score", "gold_label")


@dataclass(frozen=True)
class GlueTask:
    """A task of GLUE (Wang et al. 2019): its texts and labels under the hub's names. `labels`: names in the order of
    the hub's class numbers; None if the label is a number (STS-B)."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] | None
    metric: str
    released: tuple[str, ...] = ()  # the names of the text columns in the original .tsv files, if they differ
    label_column: str = "label"
    header: tuple[str, ...] = ()  # the columns of original training and development files without a header (CoLA)


PAIR = ("sentence1", "sentence2")
GLUE = {
    "cola": GlueTask(("sentence",), ("unacceptable", "acceptable"), "matthews_correlation",
                     header=("source", "label", "mark", "sentence")),
    "mnli": GlueTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), "accuracy",
                     PAIR, "gold_label"),
    "mrpc": GlueTask(PAIR, ("not_equivalent", "equivalent"), "accuracy", ("#1 String", "#2 String"),
                     "Quality"),
    "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment"), "accuracy"),
    "qqp": GlueTask(("question1", "question2"), ("not_duplicate", "duplicate"), "accuracy",
                    label_column="is_duplicate"),
    "rte": GlueTask(PAIR, ("entailment", "not_entailment"), "accuracy"),
    "sst2": GlueTask(("sentence",), ("negative", "positive"), "accuracy"),
    "stsb": GlueTask(PAIR, None, "pearson", label_column="score"),
    "wnli": GlueTask(PAIR, ("not_entailment", "entailment"), "accuracy"),
}  # fmt: skip


Reader = Choices | LabelledColumns


@dataclass
class LabelledSource:
    """The records of a source, and how they are read; the labels of the reader are not known yet."""

    options: DataOptions
    source: Source
    reader: Reader
    of_sets: bool = False  # the label is a list of labels

    @property
    def kind(self) -> str:
        if self.of_sets:
            return "lists of labels"
        if isinstance(self.reader, Choices):
            return "choices"
        return "tags of words" if isinstance(self.reader, TaggedWords) else "labels"

    @property
    def describe(self) -> str:
        """Describe the columns of the examples, for the log."""
        if isinstance(self.reader, Choices):
            return self.reader.describe
        *texts, label = (self.source.written.get(name, name) for name in self.reader.columns)
        return f"texts {' and '.join(texts)}, labels {label}"

    def values(self, reader: LabelledColumns, as_names: bool) -> list[Any]:
        """All labels; class numbers as their names, or as they are."""
        column = self.source.first[reader.label][:]
        has_lists = self.of_sets or isinstance(reader, TaggedWords)
        values = list(chain.from_iterable(row or () for row in column)) if has_lists else column
        if reader.class_names is None or not as_names:
            return values
        names = dict(enumerate(reader.class_names))
        return [names.get(value) for value in values]


def prepare_examples(recipe: ClsRecipe, config: PretrainedConfig) -> ExampleData:
    """Read, check and tokenise; the first process of the machine works, the others find the result in the cache.
    Raises UserError: columns are not found, a text is empty, a label is missing or outside the label set."""
    task, options = GLUE.get(recipe.task_name or ""), DataOptions.of(recipe)
    length = choose_length("max_length", recipe.max_length, recipe.source("max_length"), config)
    if recipe.predict_file:
        if not recipe.lora and not any("For" in name for name in config.architectures or ("For",)):
            raise UserError("predict_file: the model has no head for labels. Name a classifier that was trained")
        return _prepare_unlabelled(recipe, options, config, task, length)
    with tables.one_process_at_a_time(options.cache):
        sources = [_find(recipe, own, task) for own in options_of_sources(options, recipe).values()]
        readers = _readers(recipe, sources, task, config)
        read = [
            read_parts(each.source, dict.fromkeys(each.source.parts, reader), each.options)
            for each, reader in zip(sources, readers)
        ]
        if isinstance(readers[0], Choices):
            limited = [options.limited(parts) for parts, _ in read]
            labels = labels_of_choices(readers[0], chain.from_iterable(parts.values() for parts in limited))
        else:
            labels = readers[0].labels
        prepared = []
        for each, (parts, notes) in zip(sources, read):
            prepared.append(encode_parts(each.options, config, parts, labels, length))
            prepared[-1].notes[:0] = [f"data      {each.describe}", *labels.notes, *notes]
    names = options_of_sources(options, recipe)
    data = _mixed(recipe, dict(zip(names, prepared))) if recipe.mixture else prepared[0]
    trained = [each.train.labels for each in prepared if each.train is not None]
    held_out = [part.samples.labels for part in data.held_out]
    data.notes += label_report(labels, trained, held_out)
    return data


def _find(recipe: ClsRecipe, options: DataOptions, task: GlueTask | None) -> LabelledSource:
    source = _read(options, recipe.task_name)
    first = source.first.features
    source.parts = {name: tables.with_class_names(table, [first]) for name, table in source.parts.items()}
    recipe = recipe.columns_in(source.first.column_names)
    if task is None and (choices := find_choices(recipe, source.first)):
        if recipe.lora:
            raise UserError("lora = true: multiple choice has no adapters. Remove --lora, or name --label_column")
        if tables.class_names(source.first.features[choices.label]):  # the number of a class is not that of its choice
            named = [Features({choices.label: Value("string")})]
            source.parts = {name: tables.with_class_names(table, named) for name, table in source.parts.items()}
            choices = find_choices(recipe, source.first) or choices
        return LabelledSource(options, source, choices)
    if task is None and (found := find_tags(recipe.text_columns, recipe.label_column, source.first)):
        words, label = found
        names = tables.class_names(source.first.features[label])
        return LabelledSource(options, source, TaggedWords((words,), label, Labels(None), names))
    texts, label = _columns(recipe, source.first, task)
    feature = source.first.features[label]
    if of_sets := tables.holds_lists(feature):
        feature = feature.feature
        if not tables.class_names(feature):
            refuse_flags(source.first[label][:], source.where(next(iter(source.parts))))
    class_names = task.labels if task else tables.class_names(feature)
    source.parts = {name: _as_text(table, texts) for name, table in source.parts.items()}
    return LabelledSource(options, source, LabelledColumns(texts, label, Labels(None), class_names), of_sets)


def _readers(
    recipe: ClsRecipe, sources: list[LabelledSource], task: GlueTask | None, config: PretrainedConfig
) -> list[Reader]:
    """Return a reader for each source, all with the same label set: that of all sources together, or without training
    the trained model's. Raises UserError: there are no labels, or only one; the model was trained for others."""
    kinds = {each.kind: each.source.where("train") for each in sources}
    if len(kinds) > 1:
        found = ", ".join(f"{kind} in {where}" for kind, where in kinds.items())
        raise UserError(f"train_file: a mixture needs sources of one kind, and there are {found}")
    own = [(each, each.reader) for each in sources if isinstance(each.reader, LabelledColumns)]
    if not own:
        return [each.reader for each in sources]
    of_sets, (_, first) = sources[0].of_sets, own[0]
    class_names, of_words, column = first.class_names, isinstance(first, TaggedWords), str(first.label)
    differ = any(reader.class_names != class_names for _, reader in own)
    values = list(chain.from_iterable(each.values(reader, as_names=differ) for each, reader in own))
    class_names = None if differ else class_names
    if not recipe.trains:
        labels, class_names = trained_labels(config, class_names, values, task is not None and task.labels is None)
        if of_sets and not labels.of_sets:
            raise UserError(f"label_column = {column!r} holds lists, and the model was trained for one label a record")
    elif task is not None:
        labels = Labels(task.labels)
    else:
        where = " and ".join(each.source.where("train") for each in sources)
        if of_sets and recipe.regression:
            raise UserError(f"regression = true: {where} has lists of labels ({column}), and no numbers")
        regression = False if of_words or of_sets else recipe.regression
        labels = replace(find_labels(values, where, class_names, regression, column), of_sets=of_sets)
    labels = replace(in_model_order(labels, config), of_words=of_words)
    return [
        replace(
            reader,
            labels=replace(labels, number=str(reader.label)),
            class_names=reader.class_names if differ and reader.class_names else class_names,
        )
        for _, reader in own
    ]


def _mixed(recipe: ClsRecipe, sources: dict[str, ExampleData]) -> ExampleData:
    """The data of several sources with the same labels, by the source's name."""
    held_out = []
    for suffix in dict.fromkeys(part.suffix for data in sources.values() for part in data.held_out):
        parts = {name: part for name, data in sources.items() for part in data.held_out if part.suffix == suffix}
        own = {name: part.samples for name, part in parts.items()}
        records = [table for part in parts.values() for table in part.tables]
        held_out.append(HeldOut(MixedSamples(list(own.values())), records, suffix, own))
    return mixed(sources, recipe, held_out=held_out)


def _prepare_unlabelled(
    recipe: ClsRecipe, options: DataOptions, config: PretrainedConfig, task: GlueTask | None, length: int
) -> ExampleData:
    """All records of predict_file, with labels that are not used; the classes are those of the model."""
    if has_head(config, "MultipleChoice"):
        raise UserError("predict_file: a model of multiple choice needs labels. Use --evaluate_only")
    with tables.one_process_at_a_time(options.cache):
        source = read_source(options, unit_of=lambda files: "line")
        table = source.first
        recipe = recipe.columns_in(table.column_names)
        names = task.labels if task else None
        labels, _ = trained_labels(config, names, [], task is not None and names is None)
        kind, texts = LabelledColumns, tuple[str, ...]()
        if has_head(config, "TokenClassification"):
            if (words := find_words(recipe.text_columns, table)) is None:
                raise UserError(f"text_columns: no column of lists of words is found; {tables.columns_present(table)}")
            kind, texts, labels = TaggedWords, (words,), replace(labels, of_words=True)
        else:
            texts, _ = _columns(recipe, table, task, labelled=False)
            labels = in_model_order(labels, config)
            source.parts = {PREDICT: _as_text(table, texts)}
        columns = kind(texts, None, labels)
        parts, notes = read_parts(source, {PREDICT: columns}, options)
        data = encode_parts(options, config, parts, labels, length)
    data.notes[:0] = [f"data      texts {' and '.join(source.written.get(name, name) for name in texts)}", *notes]
    if empty := sum(all(map(blank, columns.texts(content))) for content in parts[PREDICT].contents()):
        data.notes.append(f"note      {empty:,} of {len(table):,} texts are empty")
    data.to_answer = True
    return data


def _read(options: DataOptions, task_name: str | None) -> Source:
    """The tables of records, those of GLUE as its task is published."""
    held_out: dict[str, tuple[str, ...]] = {"validation": HELD_OUT}
    if task_name == "mnli":
        held_out = {"validation": ("validation_matched",), "validation_mismatched": ("validation_mismatched",)}
    source = read_source(options, held_out)
    header = GLUE[task_name].header if task_name and source.files else ()
    if header and not set(header) & set(source.first.column_names):
        source = read_source(options, held_out, header=header)
    return source


def _columns(
    recipe: ClsRecipe, table: Dataset, task: GlueTask | None, labelled: bool = True
) -> tuple[tuple[str, ...], str]:
    """Return (the text columns, the label column; empty unless `labelled`)."""
    present = set(table.column_names)
    texts, label = tuple(recipe.text_columns or ()), recipe.label_column
    for name in texts:
        tables.check_column(table, "text_columns", name)
    tables.check_column(table, "label_column", label if labelled else None)
    problems = []
    if not texts:
        known: list[tuple[str, ...]] = [pair for pair in TEXTS if len(pair) == 2]
        if task:
            known = [task.texts, task.released]
        known += [] if task else [(name,) for name in tables.worded_columns(table) if (name,) in TEXTS]
        known += [] if task else [names for names in TEXTS if len(names) == 1]  # texts of digits
        texts = tables.match_columns(filter(None, known), present - {label}) or ()
        words = [name for name in tables.worded_columns(table) if name not in (*LABELS, label)]
        if not texts and not task and len(words) == 1:
            tables.check_name(words[0], "text_columns")
            texts = (words[0],)
        if not texts:
            missing = f"no column of text is found{f' ({chr(32).join(task.texts)})' if task else ''}"
            problems.append(f"{missing}. Name it (or two, of a pair) with --text_columns")
    label = label if labelled else None
    if labelled and not label:
        label = tables.match_columns(("label", task.label_column) if task else LABELS, present)
        if label is None:
            problems.append("no column of labels is found. Name it with --label_column")
    if problems and not task and (choices := known_choices(table)):
        problems.append(f"For multiple choice name the choices, too: --choice_columns {' '.join(choices)}")
    if label in texts:
        problems.append(f"label_column = {label!r} is a text column too: name another one")
    for option, names in (("text_columns", texts), ("label_column", (label,) if label else ())):
        bad = [name for name in names if not _holds_values(table.features[name], option == "label_column")]
        problems += [f"{option}: {name!r} holds lists or records, not one value each" for name in bad]
    if problems:
        raise UserError([f"{problem}; {tables.columns_present(table)}" for problem in problems])
    return texts, label or ""


def _holds_values(feature: Any, or_lists: bool) -> bool:
    """Return whether a column has one value each; or lists of values."""
    item = getattr(feature, "feature", None) if or_lists and tables.holds_lists(feature) else feature
    return isinstance(item, (Value, ClassLabel))


def _as_text(table: Dataset, texts: tuple[str, ...]) -> Dataset:
    """The table with the text columns as text."""
    for name in texts:
        if name in table.column_names and name not in tables.text_columns(table):
            table = table.cast_column(name, Value("string"))
    return table
