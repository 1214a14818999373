"""Text for the causal task: from records to packed samples."""

from collections.abc import Iterator

import numpy as np
import psutil
from datasets import Dataset, Features

from zerofit.data.pack import DatasetStats, PackedBlocks, SampleSet, SeparateDocuments, TextData
from zerofit.data.text.documents import Records
from zerofit.data.token_row import Documents
from zerofit.data.token_tables import IDS, TableCache, encode_table, fingerprint
from zerofit.model.tokenizer import padding_token
from zerofit.recipe.errors import UserError

GROUP = 4 << 20  # characters
BYTES_PER_CHARACTER = 175  # while a text is tokenised: 7.05 GiB for one of 40 MB


def prepare_text(
    records: Records,
    tokenizer,
    block_size: int,
    packing: str,
    append_eos: bool | None,
    max_eval_samples: int | None,
    cache: TableCache,
) -> TextData:
    """Tokenise and pack texts.

    Args:
        append_eos: None: unless documents are concatenated.

    Raises:
        UserError: a part is empty, or block_size leaves it no sample.
    """
    ends = _append_eos(append_eos, packing, tokenizer)
    sets: dict[str, SampleSet | None] = {"train": None, "validation": None}
    for part, dataset in (("train", records.train), ("validation", records.validation)):
        if dataset is not None:
            documents = Documents(tokenize_texts(dataset, tokenizer, ends, cache))
            limit = max_eval_samples if part == "validation" else None
            sets[part] = _samples(documents, block_size, packing, tokenizer, part, limit)
    hints = _hints((sets["train"] or sets["validation"]).stats, packing, records.unit, block_size)
    return TextData(sets["train"], sets["validation"], tokenizer, block_size, hints)


def _hints(stats: DatasetStats, packing: str, unit: str, block_size: int) -> list[str]:
    """A hint about the unit of documents, if the numbers suggest that it is not the intended one.

    `unit` is that of a document in the source: row, record, file, line, paragraph or mark.
    """
    mean = stats.tokens / stats.documents
    if packing == "documents" and mean < block_size / 4:
        return [
            f"hint      a document ({unit}) has {mean:.0f} tokens on average and attention stays inside it: "
            "if these are lines of longer texts, --packing concatenate or another --document_separator gives "
            "longer contexts"
        ]
    if stats.truncated > 0.1 * stats.tokens:
        return [
            f"hint      {stats.truncated / stats.tokens:.0%} of all tokens are cut away: "
            "a larger --block_size, or packing, keeps them"
        ]
    return []


def _append_eos(append_eos: bool | None, packing: str, tokenizer) -> bool:
    if tokenizer.eos_token_id is None:
        if append_eos:
            raise UserError("append_eos = true: the tokenizer has no end-of-text token. Leave the option out")
        return False
    return packing != "concatenate" if append_eos is None else append_eos


def _samples(
    documents: Documents, block_size: int, packing: str, tokenizer, part: str, limit: int | None
) -> SampleSet:
    if packing == "none":
        return SeparateDocuments(documents, block_size, limit)
    filler = padding_token(tokenizer)
    blocks = PackedBlocks(documents, block_size, packing == "documents", filler, limit)
    if not len(blocks):
        raise UserError(
            f"block_size = {block_size} leaves no {part} sample: there are {documents.num_tokens} tokens. "
            "Choose a smaller one, or --packing documents, which fills the last block up"
        )
    return blocks


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """Texts in groups that are tokenised at once, of about GROUP characters."""
    group, size = [], 0
    for text in texts:
        if group and size + len(text) > GROUP:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    yield group


def _ids_of(tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The ids of each text, int32. Raises UserError if the memory is too small for a long one."""
    needed, free = BYTES_PER_CHARACTER * max(map(len, texts)), psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"a text has {max(map(len, texts)):,} characters: to tokenise it takes {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free. Cut it into several records, or name a --document_separator"
        )
    return [
        np.array(row, np.int32) for row in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
    ]


def tokenize_texts(dataset: Dataset, tokenizer, append_eos: bool, cache: TableCache) -> Dataset:
    """Token ids of each document (column `input_ids`, int32), without empty documents."""

    def encode(batch: dict) -> dict:
        texts = [text for text in batch["text"] if text and not text.isspace()]
        if not texts:
            return {"input_ids": []}
        ids = [row for group in _groups(texts) for row in _ids_of(tokenizer, group)]
        if append_eos:
            end = tokenizer.eos_token_id
            ids = [row if len(row) and row[-1] == end else np.append(row, np.int32(end)) for row in ids]
        return {"input_ids": [row for row in ids if len(row)]}

    columns = Features({"input_ids": IDS})
    return encode_table(dataset, encode, columns, (fingerprint(tokenizer), append_eos), cache)
