"""Read files or a dataset of the hub into tables of records, one for each part of the data."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Value, load_dataset, load_from_disk

from zerofit.data.delimited_files import DELIMITERS, delimiter_of
from zerofit.data.file_formats import FORMATS, format_of, read_table
from zerofit.data.options import PREDICT, DataOptions
from zerofit.data.stdlib import EMBEDDED, read_stdlib
from zerofit.data.stream_reader import find_shards
from zerofit.data.tables import derived, texts_of
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import ending_of
from zerofit.recipe.parsing import counted
from zerofit.recipe.paths import FILE_OPTIONS, find_files
from zerofit.recipe.tasks import TaskRecipe

SAVED = ("dataset_dict.json", "state.json")  # in a folder that save_to_disk has written
HELD_OUT = ("validation", "valid", "val", "dev")  # its names in data sets


@dataclass
class Source:
    """The data that was read: `train` and the held-out parts.

    Without training there is `train` only if the held-out part must still be split off from it. For predict_file there
    is only PREDICT.
    """

    parts: dict[str, Dataset]
    files: dict[str, list[Path]]  # of each part; empty if no option names files
    name: str = ""  # of data that are in no file of their own, in messages
    notes: list[str] = field(default_factory=list)  # how files were read
    written: dict[str, str] = field(default_factory=dict)  # {column in lower case: as the file has it}

    @property
    def first(self) -> Dataset:
        """The first table, for its columns."""
        return next(iter(self.parts.values()))

    def as_written(self, columns: Any) -> Any:
        """The columns that a reader has found, with their names in the file: for the log."""
        written = {each: self.written.get(name, name) for each, name in vars(columns).items()}
        return replace(columns, **written)

    def where(self, part: str) -> str:
        """The name of a part in messages. Records are numbered through all of its files."""
        files = self.files.get(part)
        if not files:
            return self.name or f"the {part} split"
        return str(files[0]) + (
            f" and {counted(len(files) - 1, 'more file')}, counted as one" if len(files) > 1 else ""
        )


def read_source(
    data: DataOptions,
    held_out: dict[str, tuple[str, ...]] | None = None,  # the held-out parts, each with its possible names on the hub
    unit_of: Callable[[list[Path]], str] | None = None,
    header: tuple[str, ...] = (),  # names of the columns of .csv and .tsv files without a header
) -> Source:
    """Read files, or a data set of the hub. Raises UserError: a file is missing, empty, not UTF-8 or not of its
    format; the hub cannot be reached. `unit_of`: for text files: returns which part of them is a record, see
    `read_table`. Without it text files are refused."""
    held_out = {PREDICT: ()} if PREDICT in data.patterns else held_out or {"validation": HELD_OUT}
    if data.recipe.dataset_name in EMBEDDED:
        return Source(_used_parts(read_stdlib(data.recipe.dataset_name, data.cache), data.trains), {})
    files = {
        part: find_files(f"{part}_file", data.patterns[part]) for part in ("train", *held_out) if part in data.patterns
    }
    if not files:
        parts, notes = _from_hub(data, held_out)
        return in_lower_case(Source(_used_parts(parts, data.trains), {}, notes=notes), data)
    named = next(iter(files))
    kind, unit = format_of(files[named]), ""
    for part, paths in files.items():
        if format_of(paths) != kind:
            raise UserError(f"{part}_file is {format_of(paths)} and {named}_file is {kind}: use one format for both")
    if kind == "text":
        if unit_of is None:
            what = f"this task reads records: {', '.join(name for name in FORMATS if FORMATS[name] != 'text')}"
            raise UserError(f"{named}_file = {files[named][0]}: {what}")
        unit = unit_of([path for paths in files.values() for path in paths])
    parts, notes = {}, []
    for part, paths in files.items():
        parts[part], of_part = read_table(paths, kind, data, unit, header)
        notes += of_part
    return in_lower_case(Source(parts, files, notes=notes), data)


def in_lower_case(source: Source, data: DataOptions) -> Source:
    """The source with lower-case column names, so that Text is found as text. Columns that an option names keep their
    names (as do those of GLUE's original files)."""
    if not data.lowercases:
        return source
    parts = source.parts
    of_options = [value for name, value in data.recipe.to_dict().items() if name.endswith(("_column", "_columns"))]
    named = {name for value in of_options if value for name in ([value] if isinstance(value, str) else value)}
    for part, table in parts.items():
        lower = {name: name.strip().lower() for name in table.column_names if name not in named}
        new = [*lower.values(), *(name for name in table.column_names if name in named)]
        changed = {name: other for name, other in lower.items() if name != other and new.count(other) == 1}
        again = [name for name, other in lower.items() if new.count(other) > 1]
        if again and all(table.data.column(name).null_count for name in again):
            raise UserError(
                f"{source.where(part)}: the columns {', '.join(again)} differ in upper and lower case alone, and some "
                "records have one and some the other. Give them one name"
            )
        if changed:
            parts[part] = derived(table.rename_columns(changed), table)
            source.written |= {other: name for name, other in changed.items()}
    return source


def _used_parts(parts: dict[str, Dataset], trains: bool) -> dict[str, Dataset]:
    """The parts, without training data if the launch does not train and held-out data exist."""
    return parts if trains or len(parts) == 1 else {name: parts[name] for name in parts if name != "train"}


def _from_hub(data: DataOptions, held_out: dict[str, tuple[str, ...]]) -> tuple[dict[str, Dataset], list[str]]:
    """Return (the splits that are used, a note about the others)."""
    name, config = data.recipe.dataset_name or "", data.recipe.dataset_config_name
    folder = Path(name).expanduser()
    try:
        if any((folder / file).is_file() for file in SAVED):
            saved = load_from_disk(str(folder))
            dataset = saved if isinstance(saved, DatasetDict) else DatasetDict({"train": saved})
        else:
            dataset = load_dataset(name, config, cache_dir=data.hub_cache)
            first = next(iter(dataset.values()))
            if first.info.builder_name == "csv" and all(isinstance(kind, Value) for kind in first.features.values()):
                texts = texts_of(first.column_names)  # as they are written: 0110 is not a number
                dataset = load_dataset(name, config, cache_dir=data.hub_cache, features=texts, keep_default_na=False)
    except Exception as error:  # the library raises a dozen types, from ConnectionError to DatasetNotFoundError
        raise UserError(
            f"dataset_name = {name!r}: {first_line(error.__cause__ or error)}. Or name files with train_file"
        ) from None
    assert isinstance(dataset, DatasetDict)
    known = {"train", *(name for names in held_out.values() if not data.trains for name in names)}
    if not known & set(dataset):
        has = f"it has {', '.join(dataset)}. Name the files of one with train_file"
        raise UserError(f"dataset_name = {name!r} has no split `train`; {has}")
    names = {"train": ("train",), **held_out}
    splits = {part: each for part, known in names.items() for each in known[::-1] if each in dataset}
    notes = []
    if others := ", ".join(each for each in dataset if each not in splits.values()):
        notes = [f"note      splits of {name} that are read: {', '.join(splits.values())}; not read: {others}"]
    return {part: dataset[each] for part, each in splits.items()}, notes


def table_format(data: DataOptions) -> tuple[str, str] | None:
    """The ending and the delimiter of the .csv or .tsv file that is answered or evaluated; None: another file is."""
    part = next((part for part in (PREDICT, "validation", "train") if part in data.patterns), None)
    if part is None:
        return None
    path = find_files(f"{part}_file", data.patterns[part])[0]
    ending = ending_of(path)
    return (ending, delimiter_of(path, data)) if ending in DELIMITERS else None


def files_and_sizes(recipe: TaskRecipe) -> dict[str, str]:
    """{option that names data: the number of its files, their bytes, and a hash of their names and sizes}."""
    named = {option: getattr(recipe, option, None) for option in FILE_OPTIONS}
    summaries = {}
    if recipe.trains and getattr(recipe, "streaming", None):
        shards = find_shards(tuple(named.pop("train_file") or ()))
        summaries["train_file"] = f"{len(shards.names):,} shards of {sum(shards.sizes):,} bytes ({shards.key})"
    files = {option: find_files(option, patterns) for option, patterns in named.items() if patterns}
    corpora = [Path(prefix + ending) for _, prefix in getattr(recipe, "blend", []) for ending in (".bin", ".idx")]
    for option, paths in {**files, **({"data_path": corpora} if corpora else {})}.items():
        sizes = [(path.name, path.stat().st_size) for path in paths]
        digest = sha256(repr(sizes).encode()).hexdigest()[:8]
        summaries[option] = f"{len(sizes):,} of {sum(size for _, size in sizes):,} bytes (names and sizes: {digest})"
    return summaries
