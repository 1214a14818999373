"""Plain text for the causal task: from records to documents, in a training and a held-out part, to packed samples."""

from pathlib import Path
from typing import Any

import numpy as np
import psutil
from datasets import Dataset, Features
from transformers import PreTrainedTokenizerBase

from zerofit.data import tables
from zerofit.data.delimited_files import open_text
from zerofit.data.lengths import report_data_loss
from zerofit.data.options import PART_NAMES, DataOptions
from zerofit.data.pack import NO_TEXT, Documents, PackedBlocks, SeparateDocuments, TextData
from zerofit.data.sources import Source, read_source
from zerofit.model.tokenizer import END_OF_TEXT, padding_token
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClmRecipe

NUM_COMPARED_RECORDS = 100  # records in which the columns are compared
MIN_SPLIT_DOCUMENTS = 20  # with fewer, the held-out part is cut from the texts, not from the list of documents
CHARACTERS_PER_CALL = 4 << 20  # total length of the texts that are tokenised in one call
BYTES_PER_CHARACTER = 175  # memory to tokenise a text: 7.05 GiB for 40 MB


def read_records(recipe: ClmRecipe, options: DataOptions) -> Source:
    """Read the data. Text files are cut into documents at document_separator, by default at <|endoftext|>. Raises
    UserError as read_source does."""

    def unit_of(files: list[Path]) -> str:
        if recipe.document_separator:
            return recipe.document_separator
        for path in files:
            with open_text(path, recipe.encoding) as file:
                if any(END_OF_TEXT in line for line in file):
                    return END_OF_TEXT
        return "line" if recipe.packing == "none" else "file"

    return read_source(options, unit_of=unit_of)


def take_texts(source: Source, recipe: ClmRecipe, options: DataOptions) -> dict[str, Dataset]:
    """Return the documents of each part (column `text`); a held-out part is split off if needed. Raises UserError:
    there is no such column; most records have no text; a split is empty. Adds notes to those of the source."""
    columns = {name: text_column(part, recipe.text_column) for name, part in source.parts.items()}
    first = columns[next(iter(columns))]
    if others := source.names(name for name in source.first.column_names if name != first):
        (read,) = source.names([first])
        source.notes.append(f"data      each text is in the column {read} (not read: {', '.join(others)})")
    parts = {}
    for name, column in columns.items():
        table = source.parts[name].select_columns([column]).rename_columns({column: "text"})
        problem = f"records of {source.where(name)} have no text ({column}), and are left out"
        lost = table.data.column("text").null_count
        source.notes += report_data_loss(recipe.allow_data_loss, lost, len(table), problem)
        if lost:
            table = table.filter(lambda text: text is not None, input_columns="text", desc="Removing empty records")
        parts[name] = tables.derive_table_key(table, source.parts[name], column, "with text")
    if "validation" not in parts and options.held_out_fraction > 0:
        parts["train"], parts["validation"] = split_documents(parts["train"], options.held_out_fraction)
    train = parts.pop("train", None)
    if not options.trains:
        return parts
    return {"train": tables.first_records(train, recipe.max_train_samples), **parts}


def text_column(dataset: Dataset, name: str | None) -> str:
    """Return the column of text. Raises UserError: there is none, several are possible, or columns of lists or
    objects hold more than the only one."""
    name = name or next((each for each in dataset.column_names if each == "text"), None)
    tables.check_column(dataset, "text_column", name, "text")
    if name:
        return name
    texts = tables.word_columns(dataset)
    if len(texts) != 1:
        raise UserError(f"no column is called text; {tables.list_columns(dataset)}. Name the one with --text_column")
    tables.check_name(texts[0], "text_column")
    first = dataset[:NUM_COMPARED_RECORDS]
    others = [each for each, kind in dataset.features.items() if tables.holds_lists(kind) or isinstance(kind, dict)]
    if larger := [each for each in others if len(str(first[each])) > len(str(first[texts[0]]))]:
        raise UserError(
            f"the only column of text is {texts[0]}, and {larger[0]} holds more, in no form of chats or pairs that is "
            f"known; {tables.list_columns(dataset)}. Name the text with --text_column"
        )
    return texts[0]


def split_documents(dataset: Dataset, fraction: float) -> tuple[Dataset, Dataset]:
    """Return (training, held-out) parts: documents drawn at random with a fixed seed, or the ends of a few long
    documents."""
    if len(dataset) >= MIN_SPLIT_DOCUMENTS:
        return tables.random_split(dataset, fraction)
    cuts = [_cut_near_the_end(text, fraction) for text in dataset["text"]]
    parts = [[text for text in part if text.strip()] for part in zip(*cuts)] if cuts else [[], []]
    if not any(parts):
        raise UserError(NO_TEXT)
    if not all(parts):
        raise tables.empty_split(fraction, len(dataset))
    train = tables.derive_table_key(Dataset.from_dict({"text": parts[0]}), dataset, fraction, "train")
    held_out = tables.derive_table_key(Dataset.from_dict({"text": parts[1]}), dataset, fraction, "held out")
    return train, held_out


def _cut_near_the_end(text: str, fraction: float) -> tuple[str, str]:
    """Cut off about the last `fraction` of a text, at the start of a line if one is near."""
    target = round(len(text) * (1 - fraction))
    newline = text.rfind("\n", 0, target)
    near = target - newline <= fraction * len(text) / 2
    cut = newline + 1 if newline > 0 and near else target
    return text[:cut], text[cut:]


def prepare_text(
    parts: dict[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    recipe: ClmRecipe,
    options: DataOptions,
    block_size: int,
) -> TextData:
    """Tokenise and pack texts. Raises UserError: a part is empty, or block_size leaves it no sample."""
    packing = recipe.packing
    if recipe.append_eos and tokenizer.eos_token_id is None:
        raise UserError("append_eos = true: the tokenizer has no end-of-text token. Leave the option out")
    appends_eos = packing != "concatenate" if recipe.append_eos is None else recipe.append_eos
    ends = appends_eos and tokenizer.eos_token_id is not None
    sets: dict[str, SeparateDocuments | PackedBlocks] = {}
    notes: list[str] = []
    for part, dataset in parts.items():
        documents = Documents(tokenize_texts(dataset, tokenizer, ends, options.cache))
        if empty := len(dataset) - len(documents):
            notes.append(
                f"note      {empty:,} of {len(dataset):,} {PART_NAMES[part]} texts are empty, and are left out"
            )
        limit = recipe.max_eval_samples if part == "validation" else None
        if packing == "none":
            sets[part] = SeparateDocuments(documents, block_size, limit)
            continue
        sets[part] = PackedBlocks(documents, block_size, packing == "documents", padding_token(tokenizer), limit)
        if not len(sets[part]):
            raise UserError(f"block_size = {block_size} leaves no {part} sample. Make it smaller")
    if appends_eos and not ends:
        notes.append("note      the tokenizer has no end-of-text token: documents end without a separator")
    train = sets.get("train")
    held_out = sets.get("validation")
    return TextData(train=train, validation=held_out, tokenizer=tokenizer, block_size=block_size, notes=notes)


def tokenize_texts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, append_eos: bool, cache: Path) -> Dataset:
    """Return token ids of each document (column `input_ids`, int32), without empty documents. Raises UserError: the
    memory is too small for a long one."""

    def encode(batch: dict[str, list[Any]], _: list[int]) -> dict[str, list[Any]]:
        texts = [text for text in batch["text"] if text and not text.isspace()]
        longest = max(map(len, texts), default=0)
        free = psutil.virtual_memory().available
        if BYTES_PER_CHARACTER * longest > free:
            raise UserError(f"a text of {longest:,} characters needs more than {free / 2**30:.1f} GiB. Cut it up")
        ids: list[np.ndarray] = []
        while len(ids) < len(texts):
            start = len(ids)
            stop = start + 1
            size = len(texts[start])
            while stop < len(texts) and size + len(texts[stop]) <= CHARACTERS_PER_CALL:
                size += len(texts[stop])
                stop += 1
            rows = tokenizer(texts[start:stop], return_attention_mask=False, verbose=False)["input_ids"]
            ids += [np.array(row, np.int32) for row in rows]
        if append_eos:
            end = tokenizer.eos_token_id
            ids = [row if len(row) and row[-1] == end else np.append(row, np.int32(end)) for row in ids]
        return {"input_ids": [row for row in ids if len(row)]}

    columns = Features({"input_ids": tables.TOKEN_IDS})
    return tables.encode_table(dataset, encode, columns, (tables.tokenizer_hash(tokenizer), append_eos), cache)
