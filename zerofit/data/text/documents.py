"""From records to documents: one `text` column, in a training and a held-out part."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from datasets import Dataset

from zerofit.data.encodings import open_bytes
from zerofit.data.options import DataFiles, PartOptions
from zerofit.data.sources import Source, read_source
from zerofit.data.tables import (
    check_name,
    columns_present,
    empty_split,
    first_records,
    hold_out,
    set_fingerprint,
    text_columns,
)
from zerofit.data.token_row import NO_TEXT
from zerofit.model.families.gpt2 import END_OF_TEXT
from zerofit.recipe.errors import UserError

FEW_DOCUMENTS = 20  # with fewer, the held-out part is cut from the texts, not from the list of documents


@dataclass
class Records:
    """Training and held-out records (column `text`), and the unit of documents in a text file."""

    train: Dataset | None
    validation: Dataset | None
    unit: str


def read_records(data: DataFiles, separator: str | None, packing: str) -> tuple[Source, str]:
    """(the data, the unit of a record).

    Args:
        separator: document_separator.

    Raises:
        UserError: a file is missing, empty, not UTF-8 or not of its format; the hub cannot be reached.
    """
    units: list[str] = []

    def sample_by(files: list[Path]) -> str:
        units.append(_text_unit(separator, packing, files))
        return units[0] if units[0] in ("line", "paragraph") else "document"

    source = read_source(data, sample_by=sample_by)
    return source, units[0] if units else "row" if source.kind == "hub" else "record"


def take_texts(source: Source, unit: str, column: str | None, separator: str | None, options: PartOptions) -> Records:
    """The column of text; a held-out part is split off if there is none; max_train_samples is applied.

    Args:
        column: text_column.
        separator: document_separator.

    Raises:
        UserError: there is no such column; a split is empty.
    """
    parts = {name: _only_text(part, text_column(part, column)) for name, part in source.parts.items()}
    if unit == "mark":
        parts = {name: _cut_at_mark(part, separator or END_OF_TEXT) for name, part in parts.items()}
    train, validation = parts.get("train"), parts.get("validation")
    if validation is None and options.held_out_fraction > 0:
        train, validation = split_off(train, options.held_out_fraction)
    train = first_records(train, options.max_train_samples) if options.trains else None
    return Records(train, validation, unit)


def _text_unit(separator: str | None, packing: str, files: list[Path]) -> str:
    """The unit of documents in these text files: line, paragraph, file or mark."""
    if separator in ("line", "paragraph", "file"):
        return separator
    if separator or _contains(files[0], END_OF_TEXT):
        return "mark"
    return "line" if packing == "none" else "file"


def _contains(path: Path, mark: str) -> bool:
    needle, tail = mark.encode(), b""
    with open_bytes(path) as file:
        while chunk := file.read(2**24):
            if needle in tail + chunk:
                return True
            tail = chunk[-len(needle) :]
    return False


def text_column(dataset: Dataset, name: str | None) -> str:
    """The column of text. Raises UserError if there is none, or several are possible."""
    texts, present = text_columns(dataset), columns_present(dataset)
    if name:
        if name not in dataset.column_names:
            raise UserError(f"text_column = {name!r}: there is no such column; {present}")
        if name not in texts:
            raise UserError(f"text_column = {name!r} holds no text; {present}")
        return name
    if "text" in texts:
        return "text"
    if len(texts) != 1:
        raise UserError(f"no column is called text; {present}. Name the one with --text_column")
    check_name(texts[0], "text_column")
    return texts[0]


def _only_text(dataset: Dataset, column: str) -> Dataset:
    dataset = dataset.remove_columns([name for name in dataset.column_names if name != column])
    dataset = dataset if column == "text" else dataset.rename_column(column, "text")
    if dataset.data.column("text").null_count:  # records without text
        dataset = dataset.filter(lambda text: text is not None, input_columns="text", desc="Removing empty records")
    return dataset


def _cut_at_mark(dataset: Dataset, mark: str) -> Dataset:
    def cut(batch: dict) -> dict:
        pieces = (piece.strip("\n") for text in batch["text"] for piece in text.split(mark))
        return {"text": [piece for piece in pieces if piece.strip()]}

    name = sha256(f"{dataset._fingerprint} cut at {mark}".encode()).hexdigest()[:32]
    return dataset.map(cut, batched=True, batch_size=16, new_fingerprint=name, desc="Cutting into documents")


def split_off(dataset: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """(training, held-out) parts: documents drawn at random with a fixed seed, or the ends of a few long documents."""
    if len(dataset) >= FEW_DOCUMENTS:
        return hold_out(dataset, fraction)
    cuts = [_cut_near_the_end(text, fraction) for text in dataset["text"]]
    parts = [[text for text in part if text.strip()] for part in zip(*cuts)] if cuts else [[], []]
    if not any(parts):
        raise UserError(NO_TEXT)
    if not all(parts):
        raise empty_split(dataset, fraction, texts=True)
    train, held_out = (
        set_fingerprint(Dataset.from_dict({"text": part}), dataset._fingerprint, fraction, name)
        for part, name in zip(parts, ("train", "held out"))
    )
    return train, held_out


def _cut_near_the_end(text: str, fraction: float) -> tuple[str, str]:
    """Cut off about the last `fraction` of a text, at the start of a line if one is near."""
    target = round(len(text) * (1 - fraction))
    newline = text.rfind("\n", 0, target)
    near = target - newline <= fraction * len(text) / 2
    cut = newline + 1 if newline > 0 and near else target
    return text[:cut], text[cut:]
