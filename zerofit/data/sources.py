"""Read files or a dataset of the hub into tables of records, one for each part of the data."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

from datasets import Dataset, DatasetDict, get_dataset_config_names, load_dataset
from datasets.exceptions import DatasetGenerationError

from zerofit.data.file_formats import (
    BUILDERS,
    check_fields,
    check_size,
    format_of,
    text_features,
    unreadable,
    with_delimiter,
)
from zerofit.data.plain_files import plain_files
from zerofit.data.stdlib import EMBEDDED, read_stdlib
from zerofit.recipe.cache import cache_root
from zerofit.recipe.data_options import SourceOptions
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.paths import FILE_OPTIONS, find_files
from zerofit.recipe.words import counted

HELD_OUT = ("validation", "valid", "val", "dev")  # its names in data sets
PREDICT = "predict"  # the part of predict_file, without labels


@dataclass
class Source:
    """The data that was read: `train` and the held-out parts, and its kind (hub, embedded, json, csv, ...).

    Without training there is `train` only if the held-out part must still be split off from it. For predict_file there
    is only PREDICT.
    """

    parts: dict[str, Dataset]
    kind: str
    files: dict[str, list[Path]]  # of each part; empty if no option names files

    @property
    def first(self) -> Dataset:
        """The first table, for its columns."""
        return next(iter(self.parts.values()))

    def where(self, part: str) -> str:
        """The name of a part in messages. Records are numbered through all of its files."""
        files = self.files.get(part)
        if not files:
            return f"the {part} split"
        return str(files[0]) + (
            f" and {counted(len(files) - 1, 'more file')}, counted as one" if len(files) > 1 else ""
        )


def read_source(
    recipe: SourceOptions,
    held_out: dict[str, tuple[str, ...]] | None = None,
    sample_by: Callable[[list[Path]], str] | None = None,
    reader: Callable[[list[Path]], Dataset | None] | None = None,
    header: tuple[str, ...] = (),
) -> Source:
    """Read the data that the recipe names.

    Args:
        held_out: the held-out parts, each with its possible names on the hub. The option of part P is P_file.
        sample_by: for text files: returns line, paragraph or document. Without it text files are refused.
        reader: reads JSON and text files of a special form first; it returns None for any other file.
        header: names of the columns of .csv and .tsv files without a header.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not of its format; the hub cannot be reached.
    """
    held_out = {PREDICT: ()} if getattr(recipe, "predict_file", None) else held_out or {"validation": HELD_OUT}
    if recipe.dataset_name in EMBEDDED:
        return Source(_used_parts(read_stdlib(recipe.dataset_name, recipe), recipe), "embedded", {})
    options = {part: f"{part}_file" for part in ("train", *held_out)}
    files = {part: find_files(option, getattr(recipe, option)) for part, option in options.items()
             if getattr(recipe, option)}  # fmt: skip
    if not files:
        return Source(_used_parts(_from_hub(recipe, held_out), recipe), "hub", {})
    named = next(iter(files))
    kind = format_of(files[named])
    for part, paths in files.items():
        if format_of(paths) != kind:
            raise UserError(f"{part}_file is {format_of(paths)} and {named}_file is {kind}: use one format for both")
    plain = {part: plain_files(paths, kind, recipe, part == PREDICT) for part, paths in files.items()}
    builder, kwargs = BUILDERS.get(kind, (kind, {}))
    if kind == "text":
        kwargs = {"sample_by": sample_by(plain[named]) if sample_by else None}
    if builder == "csv":
        kwargs = {**kwargs, "names": list(header)} if header else kwargs
        kwargs = with_delimiter(plain[named], kwargs, recipe.separator)
    parts = {part: _load(builder, part, paths, kind, recipe, kwargs, reader) for part, paths in plain.items()}
    return Source(_lowercase_columns(parts, recipe), kind, files)


def _lowercase_columns(parts: dict[str, Dataset], recipe: SourceOptions) -> dict[str, Dataset]:
    """The tables with lower-case column names, so that Text is found as text. Columns that an option names keep their
    names, as do those of GLUE's original files."""
    named = {name for option, value in recipe.to_dict().items() if option.endswith(("_column", "_columns")) and value
             for name in ([value] if isinstance(value, str) else value)}  # fmt: skip
    if getattr(recipe, "task_name", None):
        return parts
    for part, table in parts.items():
        lower = {name: name.strip().lower() for name in table.column_names if name not in named}
        new = [*lower.values(), *(name for name in table.column_names if name in named)]
        changed = {name: other for name, other in lower.items() if name != other and new.count(other) == 1}
        if changed:
            parts[part] = table.rename_columns(changed)
            parts[part].as_written = {other: name for name, other in changed.items()}
    return parts


def _used_parts(parts: dict[str, Dataset], recipe) -> dict[str, Dataset]:
    """The parts, without training data if the launch does not train and held-out data exist."""
    return parts if recipe.trains or len(parts) == 1 else {name: parts[name] for name in parts if name != "train"}


def _load(builder: str, part: str, paths: list[Path], kind: str, recipe, kwargs: dict, reader) -> Dataset:
    try:
        for path in paths:
            check_size(path, kind)
        table = reader(paths) if reader and kind in ("json", "text") else None
        if table is not None:
            return table
        if kind == "text" and not kwargs["sample_by"]:
            raise UserError(f"{part}_file = {paths[0]}: this task reads records: .jsonl, .json, .csv, .xlsx, .parquet")
        names = [str(path) for path in paths]
        if builder == "csv":
            for path in paths:
                check_fields(path, kwargs)
        load = partial(load_dataset, builder, data_files={part: names}, cache_dir=_cache_dir(recipe), **kwargs)
        try:
            loaded = load()
        except DatasetGenerationError:
            if builder != "csv":
                raise
            loaded = load(features=text_features(paths[0], kwargs))
    except UserError:
        raise
    except Exception as error:  # the library raises a dozen types
        raise unreadable(paths, kind, error) from None
    return loaded[part]


def not_utf8(recipe: SourceOptions, error: UnicodeDecodeError) -> Exception:
    """The error for text that is not UTF-8 (in JSON files it appears only when a text is decoded)."""
    for option in ("train_file", "validation_file", "predict_file"):
        patterns = getattr(recipe, option, None)
        if patterns:
            files = find_files(option, patterns)
            user_error = unreadable(files, format_of(files), error)
            if "UTF-8" in str(user_error):
                return user_error
    return error


# ----------------------------------------------------------------------------------------------------------------- hub


def _from_hub(recipe: SourceOptions, held_out: dict[str, tuple[str, ...]]) -> dict[str, Dataset]:
    name, config = recipe.dataset_name, recipe.dataset_config_name
    try:
        dataset = load_dataset(name, config, cache_dir=_cache_dir(recipe))
    except Exception as error:  # the library raises a dozen types, from ConnectionError to DatasetNotFoundError
        if config and Path(name).is_dir():
            known = get_dataset_config_names(name)
            if config not in known:
                raise UserError(f"dataset_config_name = {config!r}: {name} has {', '.join(known)}") from None
        first = first_line(error)
        if Path(name).is_dir():
            raise UserError(f"dataset_name = {name!r}: the folder cannot be loaded: {first}") from None
        raise UserError(
            f"dataset_name = {name!r}: it is no local folder, and the hub did not return it: {first}. "
            "Name a file with train_file, or run once with access to the hub"
        ) from None
    assert isinstance(dataset, DatasetDict)
    known = {"train", *(name for names in held_out.values() if not recipe.trains for name in names)}
    if not known & set(dataset):
        raise UserError(f"dataset_name = {name!r} has no split `train`; it has {', '.join(dataset)}")
    names = {"train": ("train",), **held_out}
    return {part: dataset[name] for part, known in names.items() for name in known[::-1] if name in dataset}


# --------------------------------------------------------------------------------------------------------------- files


def files_and_sizes(recipe) -> dict[str, str]:
    """{option that names data: the number of its files, their bytes, and a hash of their names and sizes}."""
    named = {option: getattr(recipe, option, None) for option in FILE_OPTIONS}
    files = {option: find_files(option, patterns) for option, patterns in named.items() if patterns}
    corpora = [Path(prefix + ending) for _, prefix in getattr(recipe, "blend", []) for ending in (".bin", ".idx")]
    summaries = {}
    for option, paths in {**files, **({"data_path": corpora} if corpora else {})}.items():
        sizes = [(path.name, path.stat().st_size) for path in paths]
        digest = sha256(repr(sizes).encode()).hexdigest()[:8]
        summaries[option] = f"{len(sizes):,} of {sum(size for _, size in sizes):,} bytes (names and sizes: {digest})"
    return summaries


def _cache_dir(recipe: SourceOptions) -> str | None:
    return str(cache_root(recipe.cache_dir)) if recipe.cache_dir else None
