"""The data to read, as a recipe describes it: a mixture has such options for each of its sources."""

from dataclasses import dataclass
from pathlib import Path

from zerofit.data.tables import Records, first_records
from zerofit.recipe.files import cache_root
from zerofit.recipe.tasks import TaskRecipe

PREDICT = "predict"  # the part of predict_file, without labels
PART_NAMES = {"train": "training", "validation": "held-out"}  # in messages
PART_FILES = {name: f"{name}_file" for name in ("train", "validation", "validation_mismatched", PREDICT)}


@dataclass(frozen=True)
class DataOptions:
    """A recipe, and which of its data to read: a source of a mixture has files of its own, and a window of a stream a
    cache of its own."""

    recipe: TaskRecipe
    patterns: dict[str, list[str]]  # files or globs of each part
    cache: Path
    lowercases: bool  # column names that no option names become lower case
    trains: bool  # False: training data are read only to hold out a part of them
    held_out_fraction: float  # fraction of training records to hold out, where the data has no held-out part

    @classmethod
    def of(cls, recipe: TaskRecipe) -> "DataOptions":
        return cls(
            recipe,
            patterns={part: files for part, option in PART_FILES.items() if (files := getattr(recipe, option, None))},
            cache=cache_root(recipe.cache_dir),
            lowercases=not getattr(recipe, "task_name", None),
            trains=recipe.trains,
            held_out_fraction=recipe.validation_split_percentage / 100,
        )

    @property
    def hub_cache(self) -> str | None:
        """Return the cache folder for the datasets library; None: its default."""
        return str(cache_root(self.recipe.cache_dir)) if self.recipe.cache_dir else None

    @property
    def skip_bad_records(self) -> bool:
        return bool(getattr(self.recipe, "skip_bad_records", False))

    def limited(self, parts: dict[str, Records]) -> dict[str, Records]:
        """Return the first records of each part: max_train_samples, max_eval_samples, or all of predict_file."""
        limits = {"train": self.recipe.max_train_samples, PREDICT: None}
        max_held_out = self.recipe.max_eval_samples
        return {name: first_records(part, limits.get(name, max_held_out)) for name, part in parts.items()}
