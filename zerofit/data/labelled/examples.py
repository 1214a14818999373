"""Records with labels: their columns, and the texts, choices or tagged words of each.

Multiple choice: which columns hold a question and its choices, and records as samples of several rows.

Each choice is read with its question, as a pair of texts: `[CLS] question [SEP] choice [SEP]`. Where a question has
two texts (an article and what is asked of it, or SWAG's two sentences), the second is put before each choice.

Token classification (named entities, parts of speech): which columns hold words and their tags, and how they are
read. A tag belongs to a word's first token; the word's other tokens are not trained on.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from datasets import ClassLabel, Dataset, Features, Value
from transformers import PretrainedConfig

from zerofit.data import tables
from zerofit.data.chat.instructions import is_blank
from zerofit.data.labelled.labels import (
    INTEGER_LABEL,
    ExampleData,
    HeldOut,
    LabelledColumns,
    LabelledRows,
    Labels,
    encode_parts,
    find_labels,
    is_missing,
    label_report,
    name_of,
    order_as_model,
    refuse_flags,
    trained_labels,
)
from zerofit.data.lengths import choose_length
from zerofit.data.mixture import MixedSamples, mix_sources, options_of_sources
from zerofit.data.options import PREDICT, DataOptions
from zerofit.data.records import BadRecord, read_parts
from zerofit.data.sources import HELD_OUT_SPLITS, Source, read_source
from zerofit.model.configuration import has_head
from zerofit.model.loss import IGNORE
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClsRecipe

NUMBERED_CHOICE = re.compile(r"(choice|ending|option|answer|sol|alternative)_?(\d+|[a-h])")
CHOICE_LIST_COLUMNS = ("choices", "options", "endings")
CONTEXT_COLUMNS = (  # the columns of a question, by default
    ("sent1", "sent2"),
    ("article", "question"),
    ("context", "question"),
    ("passage", "question"),
    ("premise", "question"),
    ("premise",),
    ("startphrase",),
    ("question",),
    ("ctx",),
    ("goal",),
    ("sentence",),
    ("context",),
)
RIGHT_CHOICE_COLUMNS = ("label", "answerkey", "answer", "labels", "gold")
WORD_COLUMNS = ("tokens", "words")  # columns that hold lists of words, by default, and those of their tags
TAG_COLUMNS = ("ner_tags", "tags", "labels", "label", "pos_tags")
SENTENCE_COLUMNS = (  # columns that hold the text, or the texts of a pair, by default
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("text", "text_pair"),
    ("sentence_a", "sentence_b"),
    ("sentence",),
    ("text",),
    ("review",),
    ("content",),
    ("title", "content"),
)
LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "score", "gold_label")
SENTENCE_PAIR = ("sentence1", "sentence2")


@dataclass(frozen=True)
class Choices:
    """The columns of a table of multiple choice."""

    context: tuple[str, ...]  # the column of the question, or the two of them
    choices: tuple[str, ...]  # a column each, or one column of lists
    label: str  # the column that says which choice is right: by its number, its letter, its name or that of its column
    start: int = 0  # the number of the first choice
    by_text: bool = False  # True: in all records the label is the text of a choice

    @property
    def columns(self) -> list[str]:
        return [*self.context, *self.choices, self.label]

    @property
    def describe(self) -> str:
        return f"question {' and '.join(self.context)}, choices {', '.join(self.choices)}, label {self.label}"

    def texts(self, content: LabelledRows) -> Iterator[str]:
        rows, _ = content
        yield rows[0][0]
        yield from (choice for _, choice in rows)

    def read(self, record: dict[str, Any]) -> LabelledRows:
        """Return (the two texts of each choice, which is right). Raises BadRecord: a text is empty, or the label is
        none."""
        names, choices = self._choices(record)
        texts = [text for text in choices if text and not is_blank(text)]
        parts = [record[name] for name in self.context]
        if any(is_blank(text) for text in parts):
            raise BadRecord(f"the question ({', '.join(self.context)}) is empty")
        if len(choices) < 2 or len(texts) < len(choices):
            raise BadRecord(f"it has {len(choices)} choices" if len(choices) < 2 else "a choice is empty")
        value = record[self.label]
        if is_missing(value):
            raise BadRecord(f"it has no label ({self.label})")
        name = name_of(value)
        stripped = [text.strip() for text in texts] if self.by_text else []
        answer = next((labels.index(name) for labels in (names, stripped) if name in labels), self._number(name))
        if not 0 <= answer < len(texts):
            raise BadRecord(f"its label {value!r} is not one of the {len(texts)} choices")
        return [(parts[0], " ".join([*parts[1:], text])) for text in texts], answer

    def _choices(self, record: dict[str, Any]) -> tuple[list[str], list[str | None]]:
        """Return (names of the choices, where they have some; their texts)."""
        if len(self.choices) > 1:
            return [*self.choices], _as_texts(record[name] for name in self.choices)
        cell = record[self.choices[0]] or []
        if isinstance(cell, dict) and "text" not in cell:  # {"A": text, ...}, as MedQA has it
            cell = {name: text for name, text in cell.items() if text is not None}
            return [*cell], _as_texts(cell.values())
        if isinstance(cell, dict):  # {"label": ["A", ...], "text": [...]}, as ARC and CommonsenseQA have it
            return [name_of(name) for name in cell.get("label") or []], _as_texts(cell.get("text") or [])
        if cell and isinstance(cell[0], dict):
            return [name_of(choice.get("label")) for choice in cell], _as_texts(choice.get("text") for choice in cell)
        return [], _as_texts(cell)

    def _number(self, name: str) -> int:
        if len(name) == 1 and name.isalpha():
            return ord(name.upper()) - ord("A")
        integer = INTEGER_LABEL.fullmatch(name)
        return int(integer[1]) - self.start if integer else -1


def _as_texts(values: Iterable[Any]) -> list[str | None]:
    return [None if value is None else tables.text_of(value) for value in values]


def find_choices(recipe: ClsRecipe, table: Dataset) -> Choices | None:
    """Return the columns of multiple choice; None if the records have another form. Raises UserError: `choice_columns`
    names columns that are not there, or no column of the question or label is found."""
    present = table.column_names
    choices = tuple(recipe.choice_columns or ()) or find_choice_columns(table)
    if not choices or (recipe.text_columns and not recipe.choice_columns):
        return None
    texts = set(tables.text_columns(table)) - set(choices)
    context = tuple(recipe.text_columns or tables.match_columns(CONTEXT_COLUMNS, texts) or ())
    label = recipe.label_column or tables.match_columns(RIGHT_CHOICE_COLUMNS, {*present} - {*choices})
    missing = [name for name in (*choices, *context, label) if name and name not in present]
    if not recipe.choice_columns and not (context and label):
        return None  # it may be another kind of data
    is_list = len(choices) > 1 or _is_list(table, choices[0])
    if missing or not (context and label and is_list):
        columns = f"question: {' '.join(context) or 'none'}, label: {label or 'none'}; {tables.list_columns(table)}"
        problem = f"there is no column {missing[0]!r}" if missing else f"name two columns, or one of lists ({columns})"
        raise UserError(f"choice_columns = {' '.join(choices)}: {problem}. See also --text_columns and --label_column")
    reader = Choices(context, choices, label)
    rows = table.select_columns([*dict.fromkeys((*choices, label))])
    values: set[tuple[str, int, bool]] = set()  # (a label, the number of choices, whether it is the text of one)
    for row in rows:
        if not is_missing(row[label]):
            name = name_of(row[label])
            _, held = reader._choices(row)
            values.add((name, len(held), name in [text and text.strip() for text in held]))
    numbers = {(int(match[1]), size) for name, size, _ in values if (match := INTEGER_LABEL.fullmatch(name))}
    counts_from_one = any(number == size for number, size in numbers) and all(number for number, _ in numbers)
    return replace(reader, start=int(counts_from_one), by_text=all(is_text for _, _, is_text in values))


def find_choice_columns(table: Dataset) -> tuple[str, ...]:
    """Return the columns of choices that have usual names, in the order of their numbers or letters."""
    of_stem: dict[str, list[tuple[int, str]]] = {}
    for name in table.column_names:
        if match := NUMBERED_CHOICE.fullmatch(name):
            of_stem.setdefault(match[1], []).append((int(match[2], 18), name))  # h is 17
    numbered = next((names for names in of_stem.values() if len(names) > 1), [])
    lists = [(name,) for name in CHOICE_LIST_COLUMNS if name in table.column_names and _is_list(table, name)]
    return tuple(name for _, name in sorted(numbered)) or next(iter(lists), ())


def _is_list(table: Dataset, name: str) -> bool:
    return tables.holds_lists(table.features[name]) or isinstance(table.features[name], dict)


class TaggedWords(LabelledColumns):
    """The columns of a table of words with tags: `text` is the column of words, `class_names` are those of tags."""

    def texts(self, content: Any) -> Iterator[str]:
        yield " ".join(content[0])

    def read(self, record: dict[str, Any]) -> Any:
        """Return LabelledWords: (words, the class number of each tag). Raises BadRecord: there is no word, or a word
        does not have exactly one known tag."""
        (column,) = self.text
        words = record[column] or []
        if self.label is None:
            return [word or "" for word in words], [0] * len(words)
        if any(map(is_blank, words)) or not words:
            raise BadRecord(f"it has {'an empty word' if words else 'no words'} ({column})")
        tags = record[self.label] or []
        if len(tags) != len(words):
            raise BadRecord(f"it has {len(words)} words ({column}) and {len(tags)} tags ({self.label})")
        if IGNORE in tags or str(IGNORE) in tags:
            raise BadRecord(f"a tag is {IGNORE} ({self.label}), as parts of words have it: only whole words are read")
        return words, [self.labels.encode(tag, self.class_names) for tag in tags]


def find_words(texts: list[str] | None, table: Dataset) -> str | None:
    return next((name for name in texts or WORD_COLUMNS if _item_dtype(table, name) in tables.STRING_DTYPES), None)


def _item_dtype(table: Dataset, name: str) -> str | None:
    """Return the type of the elements of a column's lists; None if it has no lists."""
    return getattr(getattr(table.features.get(name), "feature", None), "dtype", None)


def find_entities(sentences: list[list[str]]) -> set[tuple[int, str, int, int]]:
    """Return (sentence, kind, first word, last word) of each named entity in the tags of these sentences: B-PER,
    I-PER, O (IOB1, IOB2, IOBES and BILOU). One begins at B or S, after O, E or S, and where the kind changes: I needs
    no B before it, as in conlleval."""
    entities: list[tuple[int, str, int, int]] = []
    for sentence, tags in enumerate(sentences):
        previous = "O"
        previous_kind = ""
        for place, tag in enumerate(tags):
            mark, _, kind = tag.partition("-")
            mark = {"L": "E", "U": "S"}.get(mark, mark)  # BILOU's marks
            if mark != "O":
                begins = mark in "BS" or previous in "OES" or kind != previous_kind
                entities.append((sentence, kind, place if begins else entities.pop()[2], place))
            previous = mark
            previous_kind = kind
    return set(entities)


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


GLUE_TASKS = {
    "cola": GlueTask(
        ("sentence",),
        ("unacceptable", "acceptable"),
        "matthews_correlation",
        header=("source", "label", "mark", "sentence"),
    ),
    "mnli": GlueTask(
        ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), "accuracy", SENTENCE_PAIR, "gold_label"
    ),
    "mrpc": GlueTask(
        SENTENCE_PAIR, ("not_equivalent", "equivalent"), "accuracy", ("#1 String", "#2 String"), "Quality"
    ),
    "qnli": GlueTask(("question", "sentence"), ("entailment", "not_entailment"), "accuracy"),
    "qqp": GlueTask(
        ("question1", "question2"), ("not_duplicate", "duplicate"), "accuracy", label_column="is_duplicate"
    ),
    "rte": GlueTask(SENTENCE_PAIR, ("entailment", "not_entailment"), "accuracy"),
    "sst2": GlueTask(("sentence",), ("negative", "positive"), "accuracy"),
    "stsb": GlueTask(SENTENCE_PAIR, None, "pearson", label_column="score"),
    "wnli": GlueTask(SENTENCE_PAIR, ("not_entailment", "entailment"), "accuracy"),
}


Reader = Choices | LabelledColumns


class LabelledSource(NamedTuple):
    """The records of a source, and how they are read; the labels of the reader are not known yet."""

    options: DataOptions
    source: Source
    reader: Reader


def prepare_examples(recipe: ClsRecipe, config: PretrainedConfig) -> ExampleData:
    """Read, check and tokenise; the first process of the machine works, the others find the result in the cache.
    Raises UserError: columns are not found, a text is empty, a label is missing or outside the label set."""
    task = GLUE_TASKS.get(recipe.task_name or "")
    options = DataOptions.of(recipe)
    length = choose_length("max_length", recipe.max_length, recipe.source("max_length"), config)
    if recipe.predict_file:
        if not recipe.lora and not any("For" in name for name in config.architectures or ("For",)):
            raise UserError("predict_file: the model has no head for labels. Name a classifier that was trained")
        return _prepare_unlabelled(recipe, options, config, task, length)
    with tables.one_process_at_a_time(options.cache):
        options_by_source = options_of_sources(options, recipe)
        sources = [_find_reader(recipe, each, task) for each in options_by_source.values()]
        readers = _readers(recipe, sources, task, config)
        parts_and_notes = [
            read_parts(each.source, dict.fromkeys(each.source.parts, reader), each.options)
            for each, reader in zip(sources, readers)
        ]
        if isinstance(readers[0], Choices):
            used = chain.from_iterable(options.limited(parts).values() for parts, _ in parts_and_notes)
            num_choices = max(len(rows) for part in used for rows, _ in part.contents())
            numbers = range(readers[0].start, readers[0].start + num_choices)
            labels = Labels(tuple(map(str, numbers)), True, readers[0].label)
        else:
            labels = readers[0].labels
        prepared = []
        for each, (parts, notes) in zip(sources, parts_and_notes):
            prepared.append(encode_parts(each.options, config, parts, labels, length))
            prepared[-1].notes[:0] = [f"data      {each.source.describe(each.reader)}", *labels.notes, *notes]
    data = prepared[0]
    if recipe.mixture:
        by_name = dict(zip(options_by_source, prepared))
        held_parts: list[HeldOut] = []
        parts_held = [(name, part) for name, each in by_name.items() for part in each.held_out]
        for suffix in dict.fromkeys(part.suffix for _, part in parts_held):
            samples = {name: part.samples for name, part in parts_held if part.suffix == suffix}
            records = [table for _, part in parts_held if part.suffix == suffix for table in part.tables]
            held_parts.append(HeldOut(MixedSamples(list(samples.values())), records, suffix, samples))
        data = mix_sources(by_name, recipe, held_out=held_parts)
    trained = [each.train.labels for each in prepared if each.train is not None]
    held_out = [part.samples.labels for part in data.held_out]
    data.notes += label_report(labels, trained, held_out)
    return data


def _find_reader(recipe: ClsRecipe, options: DataOptions, task: GlueTask | None) -> LabelledSource:
    """Read a source (a GLUE task in its published form), and find the columns that hold texts and labels."""
    held_out: dict[str, tuple[str, ...]] = {"validation": HELD_OUT_SPLITS}
    if recipe.task_name == "mnli":
        held_out = {"validation": ("validation_matched",), "validation_mismatched": ("validation_mismatched",)}
    source = read_source(options, held_out)
    if task and task.header and source.files and not {*task.header} & {*source.first.column_names}:
        source = read_source(options, held_out, header=task.header)
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
    words = find_words(recipe.text_columns, source.first) if task is None else None
    candidates = (recipe.label_column,) if recipe.label_column else TAG_COLUMNS
    tags = next((name for name in candidates if name != words and _item_dtype(source.first, name)), None)
    if words and tags:
        names = tables.class_names(source.first.features[tags])
        return LabelledSource(options, source, TaggedWords((words,), tags, Labels(None, is_token_level=True), names))
    texts, label = _columns(recipe, source.first, task)
    feature = source.first.features[label]
    if is_multi_label := tables.holds_lists(feature):
        feature = feature.feature
        if not tables.class_names(feature):
            refuse_flags(source.first[label][:], source.where(next(iter(source.parts))))
    class_names = task.labels if task else tables.class_names(feature)
    source.parts = {name: _as_text(table, texts) for name, table in source.parts.items()}
    reader = LabelledColumns(texts, label, Labels(None, is_multi_label=is_multi_label), class_names)
    return LabelledSource(options, source, reader)


def _readers(
    recipe: ClsRecipe, sources: list[LabelledSource], task: GlueTask | None, config: PretrainedConfig
) -> list[Reader]:
    """Return a reader for each source, all with the same label set: that of all sources together, or without training
    the trained model's. Raises UserError: there are no labels, or only one; the model was trained for others."""
    kinds = {(type(each.reader), getattr(each.reader, "labels", None)): each for each in sources}
    if len(kinds) > 1:
        descriptions = "; ".join(f"{each.source.where('train')}: {each.reader.describe}" for each in kinds.values())
        raise UserError(f"train_file: a mixture needs sources of one kind, and there are several: {descriptions}")
    labelled_readers = [each.reader for each in sources if isinstance(each.reader, LabelledColumns)]
    if not labelled_readers:
        return [each.reader for each in sources]
    is_multi_label = labelled_readers[0].labels.is_multi_label
    is_token_level = labelled_readers[0].labels.is_token_level
    column = str(labelled_readers[0].label)
    names_differ = any(reader.class_names != labelled_readers[0].class_names for reader in labelled_readers)
    class_names = None if names_differ else labelled_readers[0].class_names
    values: list[Any] = []
    for each, reader in zip(sources, labelled_readers):
        source_values: list[Any] = each.source.first[reader.label][:]
        if is_multi_label or is_token_level:
            source_values = list(chain.from_iterable(row or () for row in source_values))
        if names_differ and reader.class_names:
            names = dict(enumerate(reader.class_names))
            source_values = [names.get(value) for value in source_values]
        values += source_values
    if not recipe.trains:
        labels, class_names = trained_labels(config, class_names, values, task is not None and task.labels is None)
        if is_multi_label and not labels.is_multi_label:
            raise UserError(f"label_column = {column!r} holds lists, and the model was trained for one label a record")
    elif task is not None:
        labels = Labels(task.labels)
    else:
        where = " and ".join(each.source.where("train") for each in sources)
        if is_multi_label and recipe.regression:
            raise UserError(f"regression = true: {where} has lists of labels ({column}), and no numbers")
        regression = False if is_token_level or is_multi_label else recipe.regression
        labels = replace(find_labels(values, where, class_names, regression, column), is_multi_label=is_multi_label)
    labels = replace(order_as_model(labels, config), is_token_level=is_token_level)
    return [
        replace(
            reader,
            labels=replace(labels, number=str(reader.label)),
            class_names=reader.class_names if names_differ and reader.class_names else class_names,
        )
        for reader in labelled_readers
    ]


def _prepare_unlabelled(
    recipe: ClsRecipe, options: DataOptions, config: PretrainedConfig, task: GlueTask | None, length: int
) -> ExampleData:
    """Prepare all records of predict_file. Their labels are not used; the classes are those of the model."""
    if has_head(config, "MultipleChoice"):
        raise UserError("predict_file: a model of multiple choice needs labels. Use --evaluate_only")
    with tables.one_process_at_a_time(options.cache):
        source = read_source(options, unit_of=lambda files: "line")
        table = source.first
        recipe = recipe.columns_in(table.column_names)
        names = task.labels if task else None
        labels, _ = trained_labels(config, names, [], task is not None and names is None)
        kind = LabelledColumns
        texts = tuple[str, ...]()
        if has_head(config, "TokenClassification"):
            if (words := find_words(recipe.text_columns, table)) is None:
                raise UserError(f"text_columns: no column of lists of words is found; {tables.list_columns(table)}")
            kind = TaggedWords
            texts = (words,)
            labels = replace(labels, is_token_level=True)
        else:
            texts, _ = _columns(recipe, table, task, labelled=False)
            labels = order_as_model(labels, config)
            source.parts = {PREDICT: _as_text(table, texts)}
        columns = kind(texts, None, labels)
        parts, notes = read_parts(source, {PREDICT: columns}, options)
        data = encode_parts(options, config, parts, labels, length)
    data.notes[:0] = [f"data      {source.describe(columns)}", *notes]
    if empty := sum(all(map(is_blank, columns.texts(content))) for content in parts[PREDICT].contents()):
        data.notes.append(f"note      {empty:,} of {len(table):,} texts are empty")
    data.to_answer = True
    return data


def _columns(
    recipe: ClsRecipe, table: Dataset, task: GlueTask | None, labelled: bool = True
) -> tuple[tuple[str, ...], str]:
    """Return (the text columns, the label column; empty unless `labelled`)."""
    present = set(table.column_names)
    texts = tuple(recipe.text_columns or ())
    label = recipe.label_column
    for name in texts:
        tables.check_column(table, "text_columns", name)
    tables.check_column(table, "label_column", label if labelled else None)
    problems = []
    if not texts:
        candidates: list[tuple[str, ...]] = [pair for pair in SENTENCE_COLUMNS if len(pair) == 2]
        if task:
            candidates = [task.texts, task.released]
        candidates += [] if task else [(name,) for name in tables.word_columns(table) if (name,) in SENTENCE_COLUMNS]
        candidates += [] if task else [names for names in SENTENCE_COLUMNS if len(names) == 1]  # texts of digits
        texts = tables.match_columns(filter(None, candidates), present - {label}) or ()
        words = [name for name in tables.word_columns(table) if name not in (*LABEL_COLUMNS, label)]
        if not texts and not task and len(words) == 1:
            tables.check_name(words[0], "text_columns")
            texts = (words[0],)
        if not texts:
            missing = f"no column of text is found{f' ({chr(32).join(task.texts)})' if task else ''}"
            problems.append(f"{missing}. Name it (or two, of a pair) with --text_columns")
    label = label if labelled else None
    if labelled and not label:
        label = tables.match_columns(("label", task.label_column) if task else LABEL_COLUMNS, present)
        if label is None:
            problems.append("no column of labels is found. Name it with --label_column")
    if problems and not task and (choices := find_choice_columns(table)):
        problems.append(f"For multiple choice name the choices, too: --choice_columns {' '.join(choices)}")
    if label in texts:
        problems.append(f"label_column = {label!r} is a text column too: name another one")
    for option, names in (("text_columns", texts), ("label_column", (label,) if label else ())):
        for name in names:
            feature = table.features[name]
            if option == "label_column" and tables.holds_lists(feature):
                feature = getattr(feature, "feature", None)
            if not isinstance(feature, (Value, ClassLabel)):
                problems.append(f"{option}: {name!r} holds lists or records, not one value each")
    if problems:
        raise UserError([f"{problem}; {tables.list_columns(table)}" for problem in problems])
    return texts, label or ""


def _as_text(table: Dataset, texts: tuple[str, ...]) -> Dataset:
    for name in texts:
        if name in table.column_names and name not in tables.text_columns(table):
            table = table.cast_column(name, Value("string"))
    return table
