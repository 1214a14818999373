"""Options of the data that several tasks have: the source of records, records to skip, padding."""

from dataclasses import dataclass

from zerofit.recipe.base import Recipe
from zerofit.recipe.fields import WRITTEN_OUT, option
from zerofit.recipe.model_options import ModelOptions
from zerofit.recipe.paths import is_weight

WRITTEN = {"tab": "\t", r"\t": "\t"}  # a delimiter as it is typed


def is_encoding(name: str) -> bool:
    """Return whether Python knows a text encoding of this name."""
    try:
        "".encode(name)
    except LookupError:
        return False
    return True


ENCODING = (is_encoding, "the name of an encoding: cp932, euc_jp, gb18030, cp950, utf-16, cp1252, ...")


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
    # RUF009 does not see that option() is dataclasses.field(): no list is shared between recipes.
    train_file: list[str] | None = option(  # noqa: RUF009
        None,
        "Files or globs: .txt, .json(l), .csv, .tsv, .conll, also packed; .parquet; .xlsx.",
        common=True,
        phase="data",
        excludes="data_path",
    )
    validation_file: list[str] | None = option(  # noqa: RUF009
        None, "Files or globs of the held-out data.", common=True, phase="data", needs="!dataset_name !data_path"
    )
    encoding: str | None = option(
        None,
        "Encoding of text, .json(l), .csv, .tsv and .conll files that are not UTF-8: cp932, euc_jp, gb18030, ...",
        form=ENCODING,
        needs="!dataset_name !data_path !streaming",
    )
    delimiter: str | None = option(
        None,
        "What separates the fields of .csv and .tsv files: one character, or tab; by default a comma or a tab, or "
        "the semicolon, tab or | that the header has.",
        form=(lambda text: len(WRITTEN.get(text) or text) == 1, "one character, such as ';', or tab"),
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
    cache_dir: str | None = option(
        None,
        "Folder for prepared data; by default the cache of the datasets library.",
        form=WRITTEN_OUT,
        identity=False,
    )

    @property
    def separator(self) -> str | None:
        """The delimiter as the character that it means."""
        return self.delimiter and WRITTEN.get(self.delimiter, self.delimiter)

    def problems(self) -> list[str]:
        problems = super().problems()
        option = "train_file" if self.trains else "validation_file"
        known = (
            "dataset_name",
            "train_file",
            "data_path",
            *(() if self.trains else ("validation_file", "predict_file")),
        )
        if not any(getattr(self, name, None) for name in known):
            problems.append(f"no data: set dataset_name, or {option} to a .txt, .jsonl, .csv or .parquet file")
        return problems


WEIGHTS = "Write WEIGHT SOURCE WEIGHT SOURCE ..."


def weighted(words: list[str] | None) -> list[tuple[float, list[str]]]:
    """Return (weight, names) of the words WEIGHT NAMES WEIGHT NAMES ...; empty without a weight."""
    sources: list[tuple[float, list[str]]] = []
    for word in words or []:
        if is_weight(word):
            sources.append((float(word), []))
        elif sources:
            sources[-1][1].append(word)
    return sources


def problems_of_weights(option: str, words: list[str]) -> list[str]:
    """Return what is wrong with the words WEIGHT NAMES WEIGHT NAMES ... of an option."""
    shown, sources, problems = f"{option} = {' '.join(words)}", weighted(words), []
    if sources and not is_weight(words[0]):
        problems.append(f"{shown}: {words[0]} stands before any weight. {WEIGHTS}")
    if not all(names for _, names in sources):
        problems.append(f"{shown}: a weight has no source. {WEIGHTS}")
    if any(weight == 0 for weight, _ in sources):
        problems.append(f"{shown}: a source of weight 0 would not be read. Remove it")
    return problems


@dataclass
class MixtureOptions(SourceOptions, ModelOptions):
    """Mixtures of sources (train_file: WEIGHT FILES WEIGHT FILES ...)"""

    @property
    def mixture(self) -> list[tuple[float, list[str]]]:
        """Return (weight, files) of each source. Empty: all files are one source."""
        return weighted(self.train_file)

    def problems(self) -> list[str]:
        problems, sources = super().problems(), self.mixture
        if not sources:
            return problems
        problems += problems_of_weights("train_file", self.train_file or [])
        if len(sources) == 1:
            problems.append("train_file: a mixture of one source. Name a second one, or leave the weight out")
        if self.train_tokenizer_vocab_size:
            problems.append("train_tokenizer_vocab_size and a mixture: not supported. Leave one of the two out")
        return problems


@dataclass
class RecordOptions(Recipe):
    """Records that cannot be used"""

    skip_bad_records: bool = option(
        False, "Skip and count records that cannot be used (no text, label or answer).", needs="!data_path"
    )


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
