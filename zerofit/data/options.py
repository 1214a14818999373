"""The data to read, as a recipe describes it: a mixture has such options for each of its sources."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from zerofit.data.tables import Records, first_records
from zerofit.model.tokenizer import TokenizerOptions
from zerofit.recipe.places import cache_root
from zerofit.recipe.tasks import TaskRecipe

PREDICT = "predict"  # the part of predict_file, without labels
PARTS = {"train": "training", "validation": "held-out"}  # in messages
PART_FILES = {name: f"{name}_file" for name in ("train", "validation", "validation_mismatched", PREDICT)}
COLUMN_OPTIONS = ("dialogue_column", "source_column", "target_column", "text_column",
                  "text_columns", "label_column")  # fmt: skip
NO_TOKENIZER = TokenizerOptions("tokenizer_name", "")


@dataclass(frozen=True)
class DataOptions:
    """The data to read: a data set of the hub, or files, and how they are written; and what becomes of the records.
    `max_train_samples, max_eval_samples`: None: all."""

    patterns: dict[str, list[str]]  # files or globs of each part
    cache: Path
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    encoding: str | None = None
    delimiter: str | None = None
    field: str | None = None
    hub_cache: Path | None = None  # folder for data sets of the datasets library; None: its own
    named_columns: frozenset[str] = frozenset()  # columns that options name; they keep their capital letters
    lowercases: bool = True  # whether the names of other columns become lower case
    tokenizer: TokenizerOptions = NO_TOKENIZER
    trains: bool = True  # whether the launch trains; without, training data are read only to hold out a part of them
    held_out_fraction: float = 0.0  # of the training records, where the data has no held-out part
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    skip_bad_records: bool = False
    allow_data_loss: bool = False
    column_options: tuple[str, ...] = ()  # those of the task, for messages

    @classmethod
    def of(cls, recipe: TaskRecipe) -> "DataOptions":
        cache = cache_root(recipe.cache_dir)
        named = [value for name, value in recipe.to_dict().items() if name.endswith(("_column", "_columns")) and value]
        return cls(
            patterns={part: files for part, option in PART_FILES.items() if (files := getattr(recipe, option, None))},
            dataset_name=recipe.dataset_name,
            dataset_config_name=recipe.dataset_config_name,
            encoding=recipe.encoding,
            delimiter=recipe.separator,
            field=recipe.field,
            cache=cache,
            hub_cache=cache if recipe.cache_dir else None,
            named_columns=frozenset(chain.from_iterable([name] if isinstance(name, str) else name for name in named)),
            lowercases=not getattr(recipe, "task_name", None),
            tokenizer=TokenizerOptions.of(recipe),
            trains=recipe.trains,
            held_out_fraction=recipe.validation_split_percentage / 100,
            max_train_samples=recipe.max_train_samples,
            max_eval_samples=recipe.max_eval_samples,
            skip_bad_records=getattr(recipe, "skip_bad_records", False),
            allow_data_loss=recipe.allow_data_loss,
            column_options=tuple(name for name in COLUMN_OPTIONS if hasattr(recipe, name)),
        )

    def limited(self, parts: dict[str, Records]) -> dict[str, Records]:
        """The first records of each part, as max_train_samples and max_eval_samples say; all of predict_file."""
        limits = {"train": self.max_train_samples, PREDICT: None}
        return {name: first_records(part, limits.get(name, self.max_eval_samples)) for name, part in parts.items()}
