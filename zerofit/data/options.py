"""What a recipe says about data, as values. The doors of this room read them once; nothing below takes a recipe."""

from dataclasses import dataclass
from pathlib import Path

from zerofit.data.token_tables import TableCache
from zerofit.model.tokenizer import TokenizerOptions
from zerofit.recipe.cache import cache_root
from zerofit.recipe.growth import Difficulty
from zerofit.recipe.tasks import TaskRecipe

PREDICT = "predict"  # the part of predict_file, without labels
PARTS = {"train": "training", "validation": "held-out"}  # in messages
PART_FILES = {name: f"{name}_file" for name in ("train", "validation", "validation_mismatched", PREDICT)}
COLUMN_OPTIONS = ("messages_column", "dialogue_column", "source_column", "target_column", "text_column",
                  "text_columns", "label_column")  # fmt: skip


@dataclass(frozen=True)
class DataFiles:
    """The data to read: a data set of the hub, or files, and how they are written.

    Args:
        patterns: files or globs of each part.
        hub_cache: folder for data sets of the datasets library; None: its own.
        named_columns: columns that options name; they keep their capital letters.
        lowercases: whether the names of other columns become lower case.
        trains: whether the launch trains; without, training data are read only to hold out a part of them.
    """

    patterns: dict[str, list[str]]
    cache: TableCache
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    encoding: str | None = None
    delimiter: str | None = None
    field: str | None = None
    hub_cache: Path | None = None
    named_columns: frozenset[str] = frozenset()
    lowercases: bool = True
    trains: bool = True


@dataclass(frozen=True)
class DataOptions:
    """The options of data that every task has.

    Args:
        held_out_fraction: of the training records, where the data has no held-out part.
        max_train_samples, max_eval_samples: None: all.
        column_options: those of the task, for messages.
    """

    files: DataFiles
    tokenizer: TokenizerOptions
    difficulty: Difficulty | None
    held_out_fraction: float
    max_train_samples: int | None
    max_eval_samples: int | None
    trains: bool
    skip_bad_records: bool
    allow_data_loss: bool
    column_options: tuple[str, ...]

    @property
    def cache(self) -> TableCache:
        return self.files.cache

    @classmethod
    def of(cls, recipe: TaskRecipe) -> "DataOptions":
        cache = TableCache(cache_root(recipe.cache_dir), recipe.preprocessing_num_workers)
        columns = [value for name, value in recipe.to_dict().items() if name.endswith(("_column", "_columns"))]
        files = DataFiles(
            patterns={part: files for part, option in PART_FILES.items() if (files := getattr(recipe, option, None))},
            cache=cache,
            dataset_name=recipe.dataset_name,
            dataset_config_name=recipe.dataset_config_name,
            encoding=recipe.encoding,
            delimiter=recipe.separator,
            field=recipe.field,
            hub_cache=cache.folder if recipe.cache_dir else None,
            named_columns=frozenset(
                name for value in columns if value for name in ([value] if isinstance(value, str) else value)
            ),
            lowercases=not getattr(recipe, "task_name", None),
            trains=recipe.trains,
        )
        return cls(
            files,
            TokenizerOptions.of(recipe),
            recipe.difficulty,
            recipe.validation_split_percentage / 100,
            recipe.max_train_samples,
            recipe.max_eval_samples,
            recipe.trains,
            recipe.skip_bad_records,
            recipe.allow_data_loss,
            tuple(name for name in COLUMN_OPTIONS if hasattr(recipe, name)),
        )

    def limit(self, part: str) -> int | None:
        """The largest number of samples of a part; every record of predict_file is answered."""
        return {"train": self.max_train_samples, PREDICT: None}.get(part, self.max_eval_samples)
