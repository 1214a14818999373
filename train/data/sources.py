"""From files or the hub to tables of records, one for each part of the data."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
from datasets import Dataset, DatasetDict, Features, List, Value, get_dataset_config_names, load_dataset
from datasets.exceptions import DatasetGenerationError

from train.data.encodings import open_bytes, proposal
from train.data.plain_files import plain_files
from train.recipe.cache import cache_root
from train.recipe.data_options import SourceOptions
from train.recipe.errors import UserError, first_line
from train.recipe.paths import FILE_OPTIONS, find_files

FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tokens": "text", ".py": "text", ".tex": "text",
}  # fmt: skip
CSV = {"encoding": "utf-8-sig", "keep_default_na": False}  # "None" and "NA" are words, and Excel writes a BOM
BUILDERS = {"csv": ("csv", CSV), "tsv": ("csv", {**CSV, "sep": "\t", "quoting": 3})}  # in .tsv, quotes are text
HELD_OUT = ("validation", "valid", "val", "dev")  # what data sets call that part
PREDICT = "predict"  # the part that has no labels
EMBEDDED = ("stdlib-docstrings", "stdlib-functions")  # made from Python's own library (train/data/stdlib.py)
SPLIT_SEED = 0  # the held-out part stays the same when the run's seed changes


@dataclass
class Source:
    """What was read: `train`, the held-out parts that there are, and from what (hub, embedded, json, csv, ...).

    Without training there is `train` only where the held-out part is still to be drawn from it; of a file to be
    answered there is PREDICT alone.
    """

    parts: dict[str, Dataset]
    kind: str
    files: dict[str, list[Path]]  # of each part; empty where no option names files

    @property
    def first(self) -> Dataset:
        """The table that says which columns there are."""
        return next(iter(self.parts.values()))

    def where(self, part: str) -> str:
        """The name of a part for a message. Records are counted through all of its files."""
        files = self.files.get(part)
        if not files:
            return f"the {part} split"
        return str(files[0]) + (f" and {len(files) - 1} more files, taken as one" if len(files) > 1 else "")


def read_source(
    recipe: SourceOptions,
    held_out: dict[str, tuple[str, ...]] | None = None,
    sample_by: Callable[[list[Path]], str] | None = None,
    reader: Callable[[list[Path]], Dataset | None] | None = None,
    header: tuple[str, ...] = (),
) -> Source:
    """Read what the recipe names.

    Args:
        held_out: the held-out parts, each with the names that it may have on the hub. The option of part P is P_file.
        sample_by: for text files: line, paragraph or document, by a look at them. Without it they are refused.
        reader: asked first for the table of JSON and text files of a form of their own; None where it is none.
        header: names of the columns of .csv and .tsv files that have no line of names.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not of its format; the hub is out of reach.
    """
    held_out = {PREDICT: ()} if getattr(recipe, "predict_file", None) else held_out or {"validation": HELD_OUT}
    if recipe.dataset_name in EMBEDDED:
        from train.data.stdlib import read_stdlib

        return Source(_wanted(read_stdlib(recipe.dataset_name, recipe), recipe), "embedded", {})
    options = {part: f"{part}_file" for part in ("train", *held_out)}
    files = {part: find_files(option, getattr(recipe, option)) for part, option in options.items()
             if getattr(recipe, option)}  # fmt: skip
    if not files:
        return Source(_wanted(_from_hub(recipe, held_out), recipe), "hub", {})
    named = next(iter(files))
    kind = format_of(files[named])
    for part, paths in files.items():
        if format_of(paths) != kind:
            raise UserError(f"{part}_file is {format_of(paths)} and {named}_file is {kind}: use one format for both")
    plain = {part: plain_files(paths, kind, recipe, part == PREDICT) for part, paths in files.items()}
    builder, kwargs = BUILDERS.get(kind, (kind, {}))
    if kind == "text":
        kwargs = {"sample_by": sample_by(plain[named]) if sample_by else None}
    if header and builder == "csv":
        kwargs = {**kwargs, "names": list(header)}
    parts = {part: _load(builder, part, paths, kind, recipe, kwargs, reader) for part, paths in plain.items()}
    return Source(_plain_names(parts, recipe), kind, files)


def _plain_names(parts: dict[str, Dataset], recipe: SourceOptions) -> dict[str, Dataset]:
    """The tables with their columns in small letters: Text is found as text is. Not those that an option names, nor
    those of GLUE's own files."""
    named = {name for option, value in recipe.to_dict().items() if option.endswith(("_column", "_columns")) and value
             for name in ([value] if isinstance(value, str) else value)}  # fmt: skip
    if getattr(recipe, "task_name", None):
        return parts
    for part, table in parts.items():
        small = {name: name.strip().lower() for name in table.column_names if name not in named}
        new = [*small.values(), *(name for name in table.column_names if name in named)]
        changed = {name: other for name, other in small.items() if name != other and new.count(other) == 1}
        if changed:
            parts[part] = table.rename_columns(changed)
            parts[part].as_written = {other: name for name, other in changed.items()}
    return parts


def _wanted(parts: dict[str, Dataset], recipe) -> dict[str, Dataset]:
    """The parts, without that for training where nothing is trained and something is held out."""
    return parts if recipe.trains or len(parts) == 1 else {name: parts[name] for name in parts if name != "train"}


def _load(builder: str, part: str, paths: list[Path], kind: str, recipe, kwargs: dict, reader) -> Dataset:
    try:
        table = reader(paths) if reader and kind in ("json", "text") else None
        if table is not None:
            return table
        if kind == "text" and not kwargs["sample_by"]:
            raise UserError(f"{part}_file = {paths[0]}: this task reads records: .jsonl, .json, .csv, .tsv, .parquet")
        names = [str(path) for path in paths]
        if builder == "csv":
            for path in paths:
                _check_fields(path, kwargs)
        load = partial(load_dataset, builder, data_files={part: names}, cache_dir=_cache_dir(recipe), **kwargs)
        try:
            loaded = load()
        except DatasetGenerationError:
            if builder != "csv":
                raise
            loaded = load(features=_all_text(paths[0], kwargs))
    except UserError:
        raise
    except Exception as error:  # the library raises a dozen types
        raise unreadable(paths, kind, error) from None
    return loaded[part]


def _check_fields(path: Path, kwargs: dict) -> None:
    """Raises UserError if the first record has more fields than the header: pandas would drop the first of them."""
    with open_bytes(path) as file:
        lines = csv.reader(
            io.TextIOWrapper(file, encoding=kwargs["encoding"], newline=""),
            delimiter=kwargs.get("sep", ","),
            quoting=kwargs.get("quoting", csv.QUOTE_MINIMAL),
        )
        header = kwargs.get("names") or next(lines, [])
        record = next(lines, [])
    if len(record) > len(header):
        raise UserError(
            f"{path}: its first record has {len(record)} fields and there are {len(header)} columns "
            f"({', '.join(header)}). Put texts that hold the separator in quotes"
        )


def _all_text(path: Path, kwargs: dict) -> Features:
    """Every column of a .csv as text. The library guesses types from the first 10,000 rows; where a word, or an empty
    place, turns up later in a column of numbers, it gives up."""
    columns = pd.read_csv(path, nrows=0, **kwargs).columns
    return Features(dict.fromkeys(columns, Value("string")))


def first(dataset: Dataset, limit: int | None) -> Dataset:
    """The first `limit` records; all of them without a limit."""
    return dataset if limit is None or limit >= len(dataset) else dataset.select(range(limit))


def hold_out(dataset: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """(training, held-out) records, drawn at random with a fixed seed, each part in its old order.

    Raises:
        UserError: one side would be empty.
    """
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(dataset))
    held = max(1, round(share * len(dataset)))
    if held >= len(dataset):
        raise empty_split(dataset, share)
    return dataset.select(np.sort(shuffled[held:])), dataset.select(np.sort(shuffled[:held]))


def empty_split(dataset: Dataset, share: float, texts: bool = False) -> UserError:
    """The message for a split that leaves one side empty.

    Args:
        texts: a record is one long text, which is cut.
    """
    alone = len(dataset) == 1 and not texts  # no share cuts a record in two
    other = "" if alone else f"a {'smaller' if share > 0.5 else 'larger'} share, "
    return UserError(
        f"validation_split_percentage = {100 * share:g} leaves no sample on one side: the data is {len(dataset):,} "
        f"record{'s' * (len(dataset) != 1)}{under_a_key(dataset) if alone else ''}. Name {other}a validation_file, or "
        "0, which holds nothing out"
    )


def bad_record(where: str, index: int, what: str, problems: Iterable[str]) -> UserError:
    """The message for a record that cannot be used.

    Args:
        what: is wrong with it.
        problems: of all records that cannot be used, this one included.
    """
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"\d+", "", problem), []).append(problem)
    alike = kinds.pop(re.sub(r"\d+", "", what))
    more = [f"{len(alike):,} such records"] if len(alike) > 1 else []
    if kinds:
        shown = "; ".join(others[0] for others in list(kinds.values())[:3])
        more.append(f"{sum(map(len, kinds.values())):,} more that cannot be used: {shown}")
    more = f" ({'; '.join(more)})" if more else ""
    return UserError(
        f"{where}, record {index + 1}: {what}{more}. Correct the data, or leave such records out with "
        "--skip_bad_records"
    )


def name_for_the_cache(dataset: Dataset, *words: object) -> Dataset:
    """Give a table that was made in memory a fingerprint that every process agrees on."""
    dataset._fingerprint = sha256(" ".join(map(str, words)).encode()).hexdigest()[:32]
    return dataset


def text_columns(dataset: Dataset) -> list[str]:
    """The columns that hold text."""
    return [
        name
        for name, feature in dataset.features.items()
        if getattr(feature, "dtype", "") in ("string", "large_string")
    ]


def columns_present(dataset: Dataset) -> str:
    """For messages: the columns there are, as the file has them."""
    written = getattr(dataset, "as_written", {})
    names = [written.get(name, name) for name in dataset.column_names]
    wrong = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), None)
    hint = f" (is the file separated by {wrong!r}? A .csv takes commas, a .tsv tabs)" if wrong else ""
    if not hint and len(dataset) == 1:
        hint = under_a_key(dataset)
    return f"the columns are {', '.join(names)}{hint}"


def under_a_key(dataset: Dataset) -> str:
    """A hint where the one record that there is seems to hold the records."""
    inside = [
        name for name, kind in dataset.features.items() if isinstance(kind, List) and isinstance(kind.feature, dict)
    ]
    return f" (are the records under a key of the .json? Say --field {inside[0]})" if inside else ""


def not_utf8(recipe: SourceOptions, error: UnicodeDecodeError) -> Exception:
    """The user's message for text that is not UTF-8 (JSON files show it only when their text is looked at)."""
    for option in ("train_file", "validation_file", "predict_file"):
        patterns = getattr(recipe, option, None)
        if patterns:
            files = find_files(option, patterns)
            found = unreadable(files, format_of(files), error)
            if "UTF-8" in str(found):
                return found
    return error


# ----------------------------------------------------------------------------------------------------------------- hub


def _from_hub(recipe: SourceOptions, held_out: dict[str, tuple[str, ...]]) -> dict[str, Dataset]:
    name, config = recipe.dataset_name, recipe.dataset_config_name
    try:
        found = load_dataset(name, config, cache_dir=_cache_dir(recipe))
    except Exception as error:  # the library raises a dozen types, from ConnectionError to DatasetNotFoundError
        if config and Path(name).is_dir():
            known = get_dataset_config_names(name)
            if config not in known:
                raise UserError(f"dataset_config_name = {config!r}: {name} has {', '.join(known)}") from None
        first = first_line(error)
        if Path(name).is_dir():
            raise UserError(f"dataset_name = {name!r}: the folder cannot be loaded: {first}") from None
        raise UserError(
            f"dataset_name = {name!r}: it is no local folder, and the hub did not give it: {first}. "
            "Name a file with train_file, or run once where the hub can be reached"
        ) from None
    assert isinstance(found, DatasetDict)
    known = {"train", *(name for names in held_out.values() if not recipe.trains for name in names)}
    if not known & set(found):
        raise UserError(f"dataset_name = {name!r} has no split `train`; it has {', '.join(found)}")
    names = {"train": ("train",), **held_out}
    return {part: found[name] for part, known in names.items() for name in known[::-1] if name in found}


# --------------------------------------------------------------------------------------------------------------- files


def files_and_sizes(recipe) -> dict[str, str]:
    """{option that names data: how many files it names here, their bytes, and a hash of their names and sizes}."""
    named = {option: getattr(recipe, option, None) for option in FILE_OPTIONS}
    files = {option: find_files(option, patterns) for option, patterns in named.items() if patterns}
    corpora = [Path(prefix + ending) for _, prefix in getattr(recipe, "blend", []) for ending in (".bin", ".idx")]
    found = {}
    for option, paths in {**files, **({"data_path": corpora} if corpora else {})}.items():
        sizes = [(path.name, path.stat().st_size) for path in paths]
        digest = sha256(repr(sizes).encode()).hexdigest()[:8]
        found[option] = f"{len(sizes):,} of {sum(size for _, size in sizes):,} bytes (names and sizes: {digest})"
    return found


def format_of(files: list[Path]) -> str:
    """The format that the endings tell. Raises UserError if they tell none, or several."""
    kinds = {}
    for path in files:
        suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
        kinds.setdefault(FORMATS.get(suffixes[-1].lower() if suffixes else ""), path)
    if None in kinds:
        raise UserError(
            f"{kinds[None]}: the ending tells no known format; known are {', '.join(FORMATS)}, each also .gz"
        )
    if len(kinds) > 1:
        raise UserError(f"files of several formats in one option: {', '.join(sorted(kinds))}; use one")
    return next(iter(kinds))


def unreadable(files: list[Path], kind: str, error: Exception) -> UserError:
    """Why these files could not be read: the first that is not UTF-8 or not of its format, and where in it."""
    for path in files if kind != "parquet" else []:
        with open_bytes(path) as file:
            data = file.read()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as wrong:
            line = data.count(b"\n", 0, wrong.start) + 1
            return UserError(
                f"{path} is not UTF-8: byte 0x{data[wrong.start]:02x} at offset {wrong.start} (line {line}). "
                + proposal(data)
            )
        if kind == "json" and not data.lstrip().startswith(b"["):
            for number, line in enumerate(data.splitlines(), 1):
                try:
                    json.loads(line or b"{}")
                except json.JSONDecodeError as wrong:
                    return UserError(f"{path}, line {number}: not valid JSON: {wrong}")
    cause = error.__cause__ or error
    return UserError(f"{files[0]} cannot be read as {kind}: {' '.join(str(cause).split())[:400]}")


def _cache_dir(recipe: SourceOptions) -> str | None:
    return str(cache_root(recipe.cache_dir)) if recipe.cache_dir else None
