"""Options of the data that several tasks have: where records come from, which are skipped, how rows are padded."""

import codecs
from dataclasses import dataclass

from train.recipe.base import Recipe
from train.recipe.fields import option


def unknown_encoding(name: str | None) -> list[str]:
    """A problem, if there is no such encoding of text."""
    try:
        return [] if name is None or codecs.lookup(name)._is_text_encoding else [_NO_ENCODING.format(name)]
    except LookupError:
        return [_NO_ENCODING.format(name)]


_NO_ENCODING = (
    "encoding = {!r}: there is no such encoding. Known are cp932, euc_jp, gb18030, cp950, utf-16, cp1252, ..."
)


@dataclass
class SourceOptions(Recipe):
    """Where the data comes from"""

    dataset_name: str | None = option(
        None,
        "A dataset on the hub, or a folder that the datasets library can load. Made from Python's own library and not "
        "from the hub: stdlib-docstrings (text, label: its package) and stdlib-functions (source, target).",
        common=True,
    )
    dataset_config_name: str | None = option(None, "Its configuration.")
    # RUF009 does not see that option() is dataclasses.field(): no list is shared between recipes.
    train_file: list[str] | None = option(  # noqa: RUF009
        None, ".txt, .json(l), .csv, .tsv, .parquet, also .gz: files or globs.", common=True
    )
    validation_file: list[str] | None = option(None, "The same for the held-out data.", common=True)  # noqa: RUF009
    encoding: str | None = option(
        None, "Encoding of text, .json(l), .csv and .tsv files that are not UTF-8: cp932, euc_jp, gb18030, utf-16, ..."
    )
    field: str | None = option(
        None, 'Key of the records in .json files that hold one object: data for {"data": [...]}; a.b for a key in it.'
    )
    validation_split_percentage: float = option(
        5.0, "Share of the training data to hold out where there is no validation data, in percent.", minimum=0
    )
    max_train_samples: int | None = option(
        None, "Use only this many records for training (of conversations: pairs).", positive=True, aliases=("n_train",)
    )
    max_eval_samples: int | None = option(
        None, "Use only this many records for evaluation (or pairs).", positive=True, aliases=("n_val",)
    )
    allow_data_loss: bool = option(
        False, "Train although more than half of the samples are left out, or more than half of the answers are cut."
    )
    preprocessing_num_workers: int | None = option(
        None, "Processes that tokenise; by default the tokenizer's own threads do.", positive=True
    )
    cache_dir: str | None = option(None, "Where prepared data is kept; by default the datasets library's cache.")
    overwrite_cache: bool = option(False, "Prepare the data anew.")

    def problems(self) -> list[str]:
        found = super().problems()
        what = "train_file" if self.trains else "validation_file"
        known = (
            "dataset_name",
            "train_file",
            "data_path",
            *(() if self.trains else ("validation_file", "predict_file")),
        )
        if not any(getattr(self, name, None) for name in known):
            found.append(f"no data: set dataset_name, or {what} to a .txt, .jsonl, .csv or .parquet file")
        if self.dataset_name and self.train_file:
            found.append(
                f"dataset_name = {self.dataset_name!r} and train_file = {self.train_file}: keep one of the two"
            )
        found += unknown_encoding(self.encoding)
        for name in ("validation_file", "validation_mismatched_file", "encoding", "field"):
            if self.dataset_name and getattr(self, name, None):
                found.append(
                    f"{name} goes with train_file; with dataset_name = {self.dataset_name!r} it has no effect"
                )
        if self.validation_split_percentage >= 100:
            found.append(
                f"validation_split_percentage = {self.validation_split_percentage:g}: "
                "it leaves no sample to train on; choose a value below 100"
            )
        return found


@dataclass
class RecordOptions(Recipe):
    """Records that cannot be used"""

    skip_bad_records: bool = option(
        False, "Leave out records that cannot be used (an empty text, no label, no answer), and count them."
    )


@dataclass
class PaddingOptions(Recipe):
    """Batches of rows that differ in length"""

    pad_to_max_length: bool = option(False, "Pad every row to the longest length allowed, not to its batch's longest.")
    length_grouping: str = option(
        "window",
        "Who shares a batch. window: rows of similar length; update: an update's rows are drawn at random, and only "
        "its micro-batches hold similar lengths; none: at random.",
        choices=("window", "update", "none"),
    )
