"""Options of the data and of batches, which several tasks have, and of launches without training."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from zerofit.recipe.base import FOLDER_FORM, Clash, Recipe, option, quote
from zerofit.recipe.model_options import ModelOptions
from zerofit.recipe.paths import is_weight

DELIMITER_NAMES = {"tab": "\t", r"\t": "\t"}  # a delimiter as it is typed


# str.encode raises LookupError where Python knows no text encoding of this name.
ENCODING_FORM = ("a".encode, "the name of an encoding: cp932, euc_jp, gb18030, cp950, utf-16, cp1252, ...")


def split_weights(words: list[str] | None) -> list[tuple[float, list[str]]]:
    """Return (weight, names) of the words WEIGHT NAMES WEIGHT NAMES ...; empty without a weight."""
    sources: list[tuple[float, list[str]]] = []
    for word in words or []:
        if is_weight(word):
            sources.append((float(word), []))
        elif sources:
            sources[-1][1].append(word)
    return sources


def problems_of_weights(option: str, words: list[str], most_names: float = math.inf) -> list[str]:
    """Return the problems of an option's words, if one is a weight. `most_names`: how many may follow a weight."""
    sources = split_weights(words)
    is_right = all(weight > 0 and 0 < len(names) <= most_names for weight, names in sources)
    if not sources or (is_weight(words[0]) and is_right):
        return []
    return [f"{option} = {' '.join(words)}: write WEIGHT SOURCE WEIGHT SOURCE ..., each weight above 0"]


@dataclass
class SourceOptions(Recipe):
    """Data sources"""

    dataset_name: str | None = option(
        None,
        "A dataset on the hub, or a folder that the datasets library can load. Two are made from Python's standard "
        "library, without the hub: stdlib-docstrings (text, label) and stdlib-functions (source, target).",
        common=True,
        phase="data",
        needs="!streaming",
        excludes="train_file data_path",
    )
    dataset_config_name: str | None = option(
        None, "Configuration of dataset_name.", follows="dataset_name", phase="data", noted="dataset_name"
    )
    train_file: list[str] | None = option(
        None,
        "Files or globs: .txt, .json(l), .csv, .tsv, .conll, also packed; .parquet; .xlsx.",
        common=True,
        phase="data",
        excludes="data_path",
    )
    validation_file: list[str] | None = option(
        None, "Files or globs of the held-out data.", common=True, phase="data", needs="!dataset_name !data_path"
    )
    encoding: str | None = option(
        None,
        "Encoding of text, .json(l), .csv, .tsv and .conll files that are not UTF-8: cp932, euc_jp, gb18030, ...",
        form=ENCODING_FORM,
        needs="!dataset_name !data_path !streaming",
    )
    delimiter: str | None = option(
        None,
        "What separates the fields of .csv and .tsv files: one character, or tab; by default a comma or a tab, or "
        "the semicolon, tab or | that the header has.",
        form=(lambda text: len(DELIMITER_NAMES.get(text) or text) == 1, "one character, such as ';', or tab"),
        needs="!dataset_name !data_path !streaming",
    )
    field: str | None = option(
        None,
        'Key of the records in a .json file that holds one object: data for {"data": [...]}; a.b for a nested key.',
        needs="!dataset_name !data_path !streaming",
    )
    validation_split_percentage: float = option(
        5.0,
        "Percentage of the training data to hold out if there is no validation data.",
        minimum=0,
        below=100,
        phase="data",
        needs="!data_path !streaming",
    )
    max_train_samples: int | None = option(
        None,
        "Train on at most this many records (for conversations: pairs).",
        positive=True,
        aliases=("n_train",),
        phase="train",
        needs="!data_path !streaming",
    )
    max_eval_samples: int | None = option(
        None,
        "Evaluate on at most this many held-out samples: records (of conversations: pairs); of text, blocks of "
        "block_size.",
        positive=True,
        aliases=("n_val",),
        phase="data",
    )
    allow_data_loss: bool = option(
        False, "Train even if more than half of the samples or answers are skipped or cut.", needs="!data_path"
    )
    skip_bad_records: bool = option(
        False, "Skip and count records that cannot be used (no text, label or answer).", needs="!data_path"
    )
    cache_dir: str | None = option(
        None,
        "Folder for prepared data; by default the cache of the datasets library.",
        form=FOLDER_FORM,
        identity=False,
    )

    @property
    def separator(self) -> str | None:
        """The delimiter as the character that it means."""
        return self.delimiter and DELIMITER_NAMES.get(self.delimiter, self.delimiter)

    @property
    def mixture(self) -> list[tuple[float, list[str]]]:
        """Return (weight, files) of each source in train_file = WEIGHT FILES WEIGHT FILES ...; empty: one source."""
        return split_weights(self.train_file)

    def problems(self) -> list[str]:
        problems = super().problems()
        option = "train_file" if self.trains else "validation_file"
        names = (
            "dataset_name",
            "train_file",
            "data_path",
            *(() if self.trains else ("validation_file", "predict_file")),
        )
        if not any(getattr(self, name, None) for name in names):
            problems.append(f"no data: set dataset_name, or {option} to a .txt, .jsonl, .csv or .parquet file")
        problems += problems_of_weights("train_file", self.train_file or [])
        if len(self.mixture) == 1:
            problems.append("train_file: a mixture of one source. Name a second one, or leave the weight out")
        if self.mixture and getattr(self, "train_tokenizer_vocab_size", None):
            problems.append("train_tokenizer_vocab_size and a mixture: not supported. Leave one of the two out")
        return problems


@dataclass
class PaddingOptions(Recipe):
    """Padding"""

    pad_to_max_length: bool = option(
        False, "Pad every row to the maximum length, not to the longest row of its batch.", needs="!tokens_per_batch"
    )
    length_grouping: str = option(
        "window",
        "Group rows by length. window: each update has rows of similar length; update: the rows of an update "
        "are random, each micro-batch has rows of similar length; none: no grouping.",
        choices=("window", "update", "none"),
        phase="train",
        needs="!tokens_per_batch",
    )


WITHOUT_TRAINING = "To train nothing, say --evaluate_only, or --predict_file FILE"


@dataclass(frozen=True)
class Warmup:
    """A warm-up of sizes: the first update has the size `first`. It grows in steps of `first` until, after `updates`
    updates, it is `last`, which is a multiple of `first`."""

    first: int
    last: int
    updates: int

    def __call__(self, update: int) -> int:
        """Return the size of an update, counted from 1."""
        steps = self.last // self.first - 1
        return self.first * (1 + min(update - 1, self.updates) * steps // self.updates)


def read_warmup(text: str) -> tuple[int, int] | None:
    """Return (first size, updates that grow) of `START@UPDATES`; None: it is not such a text."""
    match = re.fullmatch(r"([1-9]\d*)@([1-9]\d*)", text)
    return match and (int(match[1]), int(match[2]))


WARMUP_FORM = (
    read_warmup,
    "START@UPDATES, the size in the first update and the number of updates in which it grows, e.g. 64@5000",
)


@dataclass
class BatchOptions(Recipe, phase="train"):
    """Batches and length of the run"""

    per_device_train_batch_size: int = option(
        8,
        "Micro-batch size: samples on one device in one pass.",
        positive=True,
        aliases=("micro_batch_size",),
        common=True,
        identity=False,
    )
    per_device_eval_batch_size: int = option(
        8, "Micro-batch size in evaluation.", positive=True, phase="always", identity=False
    )
    gradient_accumulation_steps: int | None = option(
        None, "Micro-batches per update (default 1).", positive=True, follows="global_batch_size", identity=False
    )
    global_batch_size: int | None = option(
        None,
        "Samples per update on all devices; sets gradient_accumulation_steps.",
        positive=True,
        follows="gradient_accumulation_steps",
        common=True,
        identity=False,
    )
    tokens_per_batch: int | None = option(
        None,
        "Tokens per update on all devices, padding included, instead of global_batch_size: a micro-batch has as many "
        "rows of similar length as fit into per_device_train_batch_size rows of full length. For rows of different "
        "lengths of clm (--packing none) and seq2seq.",
        positive=True,
        needs="!streaming !preference_loss",
    )
    global_batch_warmup: str | None = option(
        None,
        "START@UPDATES, as 64@5000: the first update takes START samples, and updates grow in steps of START to the "
        "global batch, reached after UPDATES updates.",
        form=WARMUP_FORM,
        needs="!tokens_per_batch",
    )
    num_train_epochs: float = option(
        3.0,
        "Passes over the training data.",
        positive=True,
        common=True,
        zero=WITHOUT_TRAINING,
        noted="!max_train_steps",
    )
    max_train_steps: int | None = option(
        None,
        "Number of updates; overrides num_train_epochs.",
        positive=True,
        aliases=("train_iters",),
        common=True,
        zero=WITHOUT_TRAINING,
    )
    seed: int = option(
        42, "Seed of the order of samples, the initial weights and dropout.", minimum=0, below=2**31, phase="always"
    )
    dataloader_num_workers: int | None = option(
        None, "Processes per rank that load batches; by default 2 with a GPU, else 0.", minimum=0, identity=False
    )

    @property
    def row_tokens(self) -> int | None:
        """The tokens of a row of full length; None: batches are not by tokens, or a length is not set."""
        names = ("block_size",) if hasattr(self, "block_size") else ("max_source_length", "max_target_length")
        lengths = [getattr(self, name, None) or 0 for name in names]
        return sum(lengths) if self.tokens_per_batch and all(lengths) else None

    def settle(self) -> None:
        """Let the global batch, in full rows, follow from tokens_per_batch."""
        super().settle()
        if self.tokens_per_batch and self.row_tokens and self.global_batch_size is None:
            rows = self.tokens_per_batch // self.row_tokens
            self.adopt("global_batch_size", rows, f"tokens_per_batch = {self.tokens_per_batch}")

    def clashes(self) -> list[Clash]:
        found = super().clashes()
        tokens = self.tokens_per_batch
        row = self.row_tokens
        if tokens and row and not tokens % row and self.global_batch_size != tokens // row:
            text = (
                f"tokens_per_batch = {tokens} and global_batch_size = {self.global_batch_size}: set one of the two "
                f"({tokens} tokens are {tokens // row} full rows of {row})"
            )
            found.append(Clash("global_batch_size", ["tokens_per_batch"], text, excludes=True))
        return found

    def problems(self) -> list[str]:
        problems = super().problems()
        tokens = self.tokens_per_batch
        row = self.row_tokens
        stated = f"tokens_per_batch = {tokens}"
        if tokens and hasattr(self, "max_length"):
            problems.append(
                f"{stated}: the loss is a mean over examples here, and short ones, of which a batch has more, would "
                "count less each. Rows of similar length share a batch as it is (length_grouping). Set "
                "global_batch_size"
            )
        elif tokens and (row is None or getattr(self, "packing", "none") != "none" or getattr(self, "mixture", None)):
            problems.append(
                f"{stated}: it is for rows of different lengths of one source. Say --packing none and block_size, the "
                "tokens of a full row, and leave weights in train_file out; or set global_batch_size"
            )
        elif tokens and row and tokens % row:
            multiples = [str(number) for number in (tokens // row * row, -(-tokens // row) * row) if number]
            remedy = f"Say {' or '.join(multiples)}"
            problems.append(f"{stated} is not a multiple of a full row, {row} tokens. {remedy}")
        return problems


FROM_MODEL = "the model"  # the source of such an option
TRAINED_MODEL_HINT = (
    "the weights are those of model_name_or_path: a hub name, a folder such as outputs/RUN/model, or an adapter's"
)


@dataclass
class InferenceOptions(SourceOptions, ModelOptions):
    """Evaluation and predictions, without training"""

    evaluate_only: bool = option(
        False, "Do not train: evaluate model_name_or_path on the held-out data.", common=True, excludes="predict_file"
    )
    predict_file: list[str] | None = option(
        None,
        "Do not train: predict with model_name_or_path for each record of this file, which needs no labels.",
        aliases=("test_file",),
        common=True,
    )

    @property
    def trains(self) -> bool:
        return not (self.evaluate_only or self.predict_file)

    @property
    def inputs(self) -> dict[str, Any]:
        """The options that shape what the model reads, stored with it."""
        return {name: getattr(self, name) for name in self.names_with(shapes_input=True)}

    def adopt_inputs(self, trained: dict[str, Any]) -> list[str]:
        """Read as in training, except for what the user set. Returns notes. `trained`: the `inputs` of training."""
        used = []
        notes = []
        of_data = self.names_with(phase="data")
        for name, value in trained.items():
            of_other_data = name in of_data and (self.predict_file or not getattr(self, "data_path", None))
            if name not in self.inputs or value == getattr(self, name) or of_other_data:
                continue
            if source := self.source(name):
                was = f"trained with {quote(value)}" if value is not None else "trained without it"
                notes.append(f"{name} = {quote(getattr(self, name))} ({source}): the model was {was}")
            elif value is not None:
                self.adopt(name, value, FROM_MODEL)
                used.append(f"{name} = {quote(value)}")
        return [f"as in training: {option}" for option in used] + notes

    def columns_in(self, present: Iterable[str]) -> Self:
        """Return this recipe without the columns of training that data of another form lacks: its own are found."""
        present = set(present)
        recipe = self
        for name, value in self.inputs.items():
            if self.source(name) != FROM_MODEL or not name.endswith(("_column", "_columns")):
                continue
            if not {*([value] if isinstance(value, str) else value)} <= present:
                recipe = self.draft() if recipe is self else recipe
                recipe.reset_option(name)
        return recipe

    def settle(self) -> None:
        """Reset the options of training in a launch without training."""
        super().settle()
        if self.trains or not self.model_name_or_path:
            return
        reset = self.names_with(phase="train")
        if self.config_name or self.model_type:
            reset.append("config_overrides")  # they made the architecture, which the weights' folder has
        if self.predict_file:
            reset += self.names_with(phase="data")
        elif self.validation_file:
            reset += ["dataset_name", "dataset_config_name", "train_file", "validation_split_percentage"]
        sources = [self.reset_option(name) for name in reset]
        self.without_effect = [source for source in sources if source and source.startswith("--")]

    def problems(self) -> list[str]:
        problems = super().problems()
        if not self.trains and not self.model_name_or_path:
            problems.append(
                f"--{'evaluate_only' if self.evaluate_only else 'predict_file'}: {TRAINED_MODEL_HINT}. Name it"
            )
        if self.evaluate_only and self.train_file and not self.validation_split_percentage:
            problems.append(
                "evaluate_only: nothing is held out (validation_split_percentage = 0). Name a validation_file"
            )
        return problems
