"""From files or the hub to records: one `text` column, a training and a held-out part."""

import glob
import gzip
import json
import os
import sysconfig
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, get_dataset_config_names, load_dataset

from train.data.cache import cache_root
from train.model.tokenizer import END_OF_TEXT
from train.recipe.errors import UserError, first_line
from train.recipe.options import ClmRecipe, SourceOptions, TextOptions

FORMATS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet",
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text", ".tokens": "text", ".py": "text", ".tex": "text",
}  # fmt: skip
NO_TEXT = "the data holds no text: nothing to train on. Look at train_file and text_column"
SPLIT_SEED = 0  # the held-out part stays the same when the run's seed changes
FEW_DOCUMENTS = 20  # with fewer, the held-out part is cut from the text and not from the list of documents


@dataclass
class Records:
    """Training and held-out records (column `text`), and how a text file was cut into documents."""

    train: Dataset
    validation: Dataset | None
    unit: str


def not_utf8(recipe: SourceOptions, error: UnicodeDecodeError) -> Exception:
    """The user's message for text that is not UTF-8 (JSON files show it only when their text is looked at)."""
    for option in ("train_file", "validation_file"):
        patterns = getattr(recipe, option)
        if patterns:
            files = find_files(option, patterns)
            found = unreadable(files, _format_of(files), error)
            if "UTF-8" in str(found):
                return found
    return error


def load_records(recipe: ClmRecipe) -> Records:
    """Read what the recipe names, split off the held-out part if there is none, and apply max_*_samples.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not of its format; the hub is out of reach; a split is empty.
    """
    if recipe.dataset_name:
        parts, unit = _from_hub(recipe), "row"
    else:
        parts, unit = _from_files(recipe)
    parts = {name: _only_text(part, _text_column(part, recipe.text_column)) for name, part in parts.items()}
    if unit == "mark":
        parts = {name: _cut_at_mark(part, recipe.document_separator or END_OF_TEXT) for name, part in parts.items()}
    train, validation = parts["train"], parts.get("validation")
    if validation is None and recipe.validation_split_percentage > 0:
        train, validation = split_off(train, recipe.validation_split_percentage / 100)
    train = _first(train, recipe.max_train_samples)
    validation = validation if validation is None else _first(validation, recipe.max_eval_samples)
    return Records(train, validation, unit)


def _first(dataset: Dataset, limit: int | None) -> Dataset:
    return dataset if limit is None or limit >= len(dataset) else dataset.select(range(limit))


# ----------------------------------------------------------------------------------------------------------------- hub


def _from_hub(recipe: SourceOptions) -> dict[str, Dataset]:
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
    if "train" not in found:
        raise UserError(f"dataset_name = {name!r} has no split `train`; it has {', '.join(found)}")
    return {part: found[part] for part in ("train", "validation") if part in found}


# --------------------------------------------------------------------------------------------------------------- files


def _from_files(recipe: ClmRecipe) -> tuple[dict[str, Dataset], str]:
    given = {"train": ("train_file", recipe.train_file), "validation": ("validation_file", recipe.validation_file)}
    files = {part: find_files(option, patterns) for part, (option, patterns) in given.items() if patterns}
    kind = _format_of(files["train"])
    kwargs, unit = {}, "record"
    if kind == "text":
        unit = _text_unit(recipe, files["train"])
        kwargs["sample_by"] = {"line": "line", "paragraph": "paragraph"}.get(unit, "document")
    parts = {}
    for part, paths in files.items():
        if _format_of(paths) != kind:
            raise UserError(f"{part}_file is {_format_of(paths)} and train_file is {kind}: use one format for both")
        try:
            loaded = load_dataset(
                kind, data_files={part: [str(path) for path in paths]}, cache_dir=_cache_dir(recipe), **kwargs
            )
        except Exception as error:
            raise unreadable(paths, kind, error) from None
        parts[part] = loaded[part]
    return parts, unit


def find_files(option: str, patterns: list[str]) -> list[Path]:
    """The files that paths and globs name, in a fixed order. `{stdlib}` stands for Python's own library.

    Raises:
        UserError: something is missing, a folder, or empty.
    """
    problems, found = [], []
    for pattern in patterns:
        pattern = os.path.expanduser(pattern.replace("{stdlib}", sysconfig.get_path("stdlib")))
        matches = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
        files = [Path(match) for match in matches if not os.path.isdir(match) or not glob.has_magic(pattern)]
        if not files:
            problems.append(f"{option} = {pattern!r}: no file matches")
        for path in files:
            if not path.exists():
                problems.append(f"{option} = {str(path)!r}: there is no such file")
            elif path.is_dir():
                problems.append(f"{option} = {str(path)!r} is a folder; name its files, e.g. {path}/*.txt")
            elif path.stat().st_size == 0 and not glob.has_magic(pattern):
                problems.append(f"{option} = {str(path)!r}: the file is empty")
        found += [path for path in files if path.is_file() and path.stat().st_size > 0]
    if not problems and not found:
        problems.append(f"{option} = {patterns}: all files that match are empty")
    if problems:
        raise UserError(problems)
    return sorted(dict.fromkeys(path.resolve() for path in found))


def _format_of(files: list[Path]) -> str:
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


def _text_unit(recipe: TextOptions, files: list[Path]) -> str:
    """line, paragraph, file or mark: how these text files are cut into documents."""
    if recipe.document_separator in ("line", "paragraph", "file"):
        return recipe.document_separator
    if recipe.document_separator or _contains(files[0], END_OF_TEXT):
        return "mark"
    return "line" if recipe.packing == "none" else "file"


def _open(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _contains(path: Path, mark: str) -> bool:
    needle, tail = mark.encode(), b""
    with _open(path) as file:
        while chunk := file.read(2**24):
            if needle in tail + chunk:
                return True
            tail = chunk[-len(needle) :]
    return False


def unreadable(files: list[Path], kind: str, error: Exception) -> UserError:
    """Why these files could not be read: the first that is not UTF-8 or not of its format, and where in it."""
    for path in files if kind != "parquet" else []:
        with _open(path) as file:
            data = file.read()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as wrong:
            line = data.count(b"\n", 0, wrong.start) + 1
            return UserError(
                f"{path} is not UTF-8: byte 0x{data[wrong.start]:02x} at offset {wrong.start} (line {line}). "
                "Convert it, e.g. iconv -f latin1 -t utf-8"
            )
        if kind == "json" and not data.lstrip().startswith(b"["):
            for number, line in enumerate(data.splitlines(), 1):
                try:
                    json.loads(line or b"{}")
                except json.JSONDecodeError as wrong:
                    return UserError(f"{path}, line {number}: not valid JSON: {wrong}")
    cause = error.__cause__ or error
    return UserError(f"{files[0]} cannot be read as {kind}: {' '.join(str(cause).split())[:400]}")


# ------------------------------------------------------------------------------------------------------------- records


def _text_column(dataset: Dataset, wanted: str | None) -> str:
    texts = [
        name
        for name, feature in dataset.features.items()
        if getattr(feature, "dtype", "") in ("string", "large_string")
    ]
    present = f"the columns are {', '.join(dataset.column_names)}"
    if wanted:
        if wanted not in dataset.column_names:
            raise UserError(f"text_column = {wanted!r}: there is no such column; {present}")
        if wanted not in texts:
            raise UserError(f"text_column = {wanted!r} holds no text; {present}")
        return wanted
    if "text" in texts:
        return "text"
    if len(texts) != 1:
        raise UserError(f"no column is called text; {present}. Name the one with --text_column")
    return texts[0]


def _only_text(dataset: Dataset, column: str) -> Dataset:
    dataset = dataset.remove_columns([name for name in dataset.column_names if name != column])
    dataset = dataset if column == "text" else dataset.rename_column(column, "text")
    if dataset.data.column("text").null_count:  # records without text
        dataset = dataset.filter(lambda text: text is not None, input_columns="text", desc="Leaving out empty records")
    return dataset


def _cut_at_mark(dataset: Dataset, mark: str) -> Dataset:
    def cut(batch: dict) -> dict:
        pieces = (piece.strip("\n") for text in batch["text"] for piece in text.split(mark))
        return {"text": [piece for piece in pieces if piece.strip()]}

    name = sha256(f"{dataset._fingerprint} cut at {mark}".encode()).hexdigest()[:32]
    return dataset.map(cut, batched=True, batch_size=16, new_fingerprint=name, desc="Cutting into documents")


def split_off(dataset: Dataset, share: float) -> tuple[Dataset, Dataset]:
    """(training, held-out) parts: documents drawn at random with a fixed seed, or, of a few long ones, their ends."""
    if len(dataset) >= FEW_DOCUMENTS:
        shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(dataset))
        held = max(1, round(share * len(dataset)))
        if held == len(dataset):
            raise _empty_split(dataset, share)
        return dataset.select(np.sort(shuffled[held:])), dataset.select(np.sort(shuffled[:held]))
    cuts = [_cut_near_the_end(text, share) for text in dataset["text"]]
    parts = [[text for text in part if text.strip()] for part in zip(*cuts)] if cuts else [[], []]
    if not any(parts):
        raise UserError(NO_TEXT)
    if not all(parts):
        raise _empty_split(dataset, share)
    train, held_out = (Dataset.from_dict({"text": part}) for part in parts)
    for name, part in (("train", train), ("held out", held_out)):  # a name for the cache that every process agrees on
        part._fingerprint = sha256(f"{dataset._fingerprint} {share} {name}".encode()).hexdigest()[:32]
    return train, held_out


def _empty_split(dataset: Dataset, share: float) -> UserError:
    return UserError(
        f"validation_split_percentage = {100 * share:g} leaves no sample on one side: the data is "
        f"{len(dataset)} documents. Choose another share, or name a validation_file"
    )


def _cut_near_the_end(text: str, share: float) -> tuple[str, str]:
    """Cut off about the last `share` of a text, at the start of the line that the cut falls into if that is near."""
    wanted = round(len(text) * (1 - share))
    newline = text.rfind("\n", 0, wanted)
    near = wanted - newline <= share * len(text) / 2
    cut = newline + 1 if newline > 0 and near else wanted
    return text[:cut], text[cut:]


def _cache_dir(recipe: SourceOptions) -> str | None:
    return str(cache_root(recipe.cache_dir)) if recipe.cache_dir else None
