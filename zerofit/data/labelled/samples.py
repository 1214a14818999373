"""Samples of labelled data: texts, pairs, choices and words as rows of token ids, and the held-out parts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerofit.data.chat.instructions import blank
from zerofit.data.labelled.labels import Labels
from zerofit.data.lengths import report_data_loss
from zerofit.data.mixture import MixedSamples
from zerofit.data.options import PARTS, PREDICT, DataOptions
from zerofit.data.pack import LabelledSamples, TaskData, TokenizedDataset, stats_rows
from zerofit.data.records import BadRecord, Encode, RecordSet
from zerofit.data.tables import IDS, kept_columns, table_key, tokenizer_hash
from zerofit.model.tokenizer import get_tokenizer, padding_values, read_by_words
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import BALANCED, ClsRecipe

# The text or the pair of each row (one, or one a choice), and the label (0 or 1 for each class of a set).
LabelledRows = tuple[list[tuple[str, ...]], int | float | list[float]]
LabelledWords = tuple[list[str], list[int | float]]  # words, and the tag of each
Example = LabelledRows | LabelledWords


@dataclass(frozen=True)
class LabelledColumns:
    """The columns of a table of texts, or of pairs, with labels. `label`: None: records to be answered, of which every
    one is read. `class_names`: the names of the data's class numbers, if it has class numbers."""

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
        """LabelledRows: ([the text or the pair], the label). Raises BadRecord: all texts are empty, or there is no
        label."""
        texts = tuple(record[name] or "" for name in self.text)
        if self.label is None:
            return [texts], [0.0] * self.labels.num_outputs if self.labels.of_sets else 0
        if all(map(blank, texts)):
            raise BadRecord(f"the text ({', '.join(self.text)}) is empty")
        label = record[self.label]
        if not self.labels.of_sets:
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
        """The maximum number of tokens of a training sample, by column."""
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
        """Mean number of tokens of a training row, without padding."""
        return round(self.trained.stats.mean_length / np.size(self.trained[0].get("sizes", 0)))


def encode_parts(
    options: DataOptions, config: PretrainedConfig, parts: dict[str, RecordSet], labels: Labels, length: int
) -> ExampleData:
    """The samples of all parts, whose readers return an Example; notes say which texts are truncated."""
    parts = options.limited(parts)
    train = next(iter(parts.values()))
    tokenizer = get_tokenizer(options.recipe, config, train.texts, table_key(train.table), pairs=True)
    if getattr(config, "type_vocab_size", None) == 1:  # as of a RoBERTa, which has no second type of tokens
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
    columns, notes = tuple(padding_values(tokenizer)), list[str]()
    sets: dict[str, TokenizedDataset] = {}
    encode: Encode = partial(_encode_words if labels.of_words else _encode_rows, tokenizer, length)
    if labels.of_words:
        read_by_words(tokenizer)
        kinds: dict[str, Any] = {"tags": IDS, "starts": IDS}
    else:
        kind = List(Value("float32")) if labels.of_sets else Value("int64" if labels.names else "float32")
        kinds = {"sizes": IDS, "label": kind}
    numbers = dict.fromkeys(("truncated", "longest"), Value("int32"))
    features = Features({**dict.fromkeys(columns, IDS), **kinds, **numbers})
    more = ("sizes",) if labels.choices else ("tags", "starts") if labels.of_words else ()
    for name, part in parts.items():
        table = part.encode(encode, features, (tokenizer_hash(tokenizer), length, columns), options.cache)
        sets[name] = TokenizedDataset(table, (*columns, *more))
        what = f"{PARTS.get(name, PARTS['validation'])} texts are cut at {length} tokens (max_length)"
        longest = np.asarray(table.with_format("numpy")["longest"][:])
        cut = int((longest > length).sum())
        notes += report_data_loss(
            False, cut, len(part), what, longest, option="max_length", config=config, stops=False
        )
    suffixes = {
        name: name.removeprefix("validation").removeprefix(PREDICT) for name in sorted(parts.keys() - {"train"})
    }
    held = []
    for name, suffix in suffixes.items():  # all columns for predictions.jsonl, where the label is a name
        label, records = getattr(parts[name].reader, "label", None), parts[name].records
        records = records.remove_columns("label") if label == "label" else records
        own = ("prediction", "probability", "probabilities", *(("label",) if label else ()))
        held.append(HeldOut(sets[name], [kept_columns(records, *own)], suffix))
    return ExampleData(
        train=sets.get("train"), held_out=held, labels=labels, tokenizer=tokenizer, max_length=length, notes=notes
    )


def _encode_rows(
    tokenizer: PreTrainedTokenizerBase, length: int, examples: list[Example], names: list[str]
) -> dict[str, list[Any]]:
    """Token ids of the rows of each record, one after another; `sizes` are their lengths, `longest` is that of the
    longest before it was cut. Of a pair that does not fit the longer text is truncated first."""
    columns, texts = tuple(padding_values(tokenizer)), list(zip(*chain.from_iterable(rows for rows, _ in examples)))
    encoded = tokenizer(
        *map(list, texts),
        return_attention_mask=False,
        return_token_type_ids="token_type_ids" in columns,
        verbose=False,
    )
    ids = {name: list(encoded[name]) for name in columns}
    whole = [len(row) for row in ids["input_ids"]]
    for index, size in enumerate(whole):
        if size > length:
            cut = tokenizer(*(column[index] for column in texts), truncation=True, max_length=length)
            for name in columns:
                ids[name][index] = cut[name]
    sizes = [len(row) for row in ids["input_ids"]]
    spans = list(pairwise(accumulate((len(rows) for rows, _ in examples), initial=0)))
    return {
        **{name: [list(chain.from_iterable(ids[name][a:b])) for a, b in spans] for name in columns},
        "sizes": [sizes[a:b] for a, b in spans],
        "truncated": [sum(whole[a:b]) - sum(sizes[a:b]) for a, b in spans],
        "longest": [max(whole[a:b]) for a, b in spans],
        "label": [label for _, label in examples],
    }


def _encode_words(
    tokenizer: PreTrainedTokenizerBase, length: int, examples: list[Example], names: list[str]
) -> dict[str, list[Any]]:
    """Token ids of the words of each record; `tags` are the words' tags, `starts` the place of each one's first token:
    -1 of a word that is cut off, or has no token."""
    rows = [words for words, _ in examples]
    whole, kept = (
        tokenizer(rows, is_split_into_words=True, return_attention_mask=False, verbose=False, **cut)
        for cut in ({}, {"truncation": True, "max_length": length})
    )
    first = [dict(map(reversed, reversed([*enumerate(kept.word_ids(row))]))) for row in range(len(rows))]
    longest = [len(row) for row in whole["input_ids"]]
    return {
        **{name: kept[name] for name in padding_values(tokenizer)},
        "tags": [tags for _, tags in examples],
        "starts": [[of_word.get(word, -1) for word in range(len(row))] for of_word, row in zip(first, rows)],
        "truncated": [size - len(row) for size, row in zip(longest, kept["input_ids"])],
        "longest": longest,
    }


def class_weights(recipe: ClsRecipe, data: ExampleData) -> list[float] | None:
    """The weight of each class, in the order of their numbers; None where all weigh the same.

    `balanced` is scikit-learn's: examples / (classes x examples of the class), so that each class weighs as much as
    any other in the whole training set, or in an epoch of a mixture. Raises UserError: the labels are numbers or
    choices, which no option of this group is for; or a class is not there.
    """
    names = data.labels.names
    if names is None or data.labels.choices or data.labels.of_sets:
        changed = [name for name in ("class_weights", "focal_gamma", "label_smoothing") if getattr(recipe, name)]
        if not changed:
            return None
        what = "numbers (regression)" if names is None else "choices" if data.labels.choices else "lists"
        raise UserError(f"{' and '.join(changed)}: the labels are {what}, and this is for classes. Remove it")
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
    given = recipe.weight_of_class
    if unknown := given.keys() - set(names):
        raise UserError(
            f"class_weights: {', '.join(sorted(unknown))} is not a class of the data ({', '.join(names[:20])}"
            f"{', ...' if len(names) > 20 else ''})"
        )
    return [given.get(name, 1.0) for name in names]


def describe_weights(weights: list[float], names: tuple[str, ...]) -> str:
    """Name the heaviest and the lightest class, for the log."""
    low, high = int(np.argmin(weights)), int(np.argmax(weights))
    return f"loss      class weights from {weights[low]:.4g} ({names[low]}) to {weights[high]:.4g} ({names[high]})"
