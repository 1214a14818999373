"""Text for the causal task: from records to packed samples."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from datasets import Dataset, Features

from zerofit.data.pack import DatasetStats, PackedBlocks, SampleSet, SeparateDocuments, TextData
from zerofit.data.sources import Source
from zerofit.data.text.documents import take_texts
from zerofit.data.token_row import Documents
from zerofit.data.token_tables import IDS, encode_table, fingerprint
from zerofit.model.tokenizer import get_tokenizer, padding_token
from zerofit.recipe.cache import cache_root, prepare_anew
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClmRecipe

GROUP = 4 << 20  # characters
BYTES_PER_CHARACTER = 175  # while a text is tokenised: 7.05 GiB for one of 40 MB


def prepare_text(recipe: ClmRecipe, config, source: Source, unit: str, block_size: int) -> TextData:
    """Cut the source's records into documents, tokenise and pack them.

    Args:
        unit: what a document is in the source: row, record, file, line, paragraph or mark.

    Raises:
        UserError: there is no column of text, a part is empty, or block_size leaves it no sample.
    """
    records = take_texts(recipe, source, unit)
    tokenizer_text = records.train if recipe.trains else records.validation
    texts = (text for batch in tokenizer_text.iter(100) for text in batch["text"])
    tokenizer = get_tokenizer(recipe, config, lambda: texts, tokenizer_text._fingerprint)
    append_eos = _append_eos(recipe, tokenizer)
    sets: dict[str, SampleSet | None] = {"train": None, "validation": None}
    for part in sets:
        dataset = getattr(records, part)
        if dataset is not None:
            anew = prepare_anew(recipe)
            cache, workers = cache_root(recipe.cache_dir), recipe.preprocessing_num_workers
            encoded = tokenize_texts(dataset, tokenizer, append_eos, cache, workers, overwrite=anew)
            sets[part] = _samples(recipe, Documents(encoded), block_size, tokenizer, part)
    hints = _hints(recipe, (sets["train"] or sets["validation"]).stats, unit, block_size)
    return TextData(sets["train"], sets["validation"], tokenizer, block_size, hints)


def _hints(recipe: ClmRecipe, stats: DatasetStats, unit: str, block_size: int) -> list[str]:
    """A hint about the unit of documents, if the numbers suggest that it is not the intended one.

    `unit` is that of a document in the source: row, record, file, line, paragraph or mark.
    """
    mean = stats.tokens / stats.documents
    if recipe.packing == "documents" and mean < block_size / 4:
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


def _append_eos(recipe: ClmRecipe, tokenizer) -> bool:
    if tokenizer.eos_token_id is None:
        if recipe.append_eos:
            raise UserError("append_eos = true: the tokenizer has no end-of-text token. Leave the option out")
        return False
    return recipe.packing != "concatenate" if recipe.append_eos is None else recipe.append_eos


def _samples(recipe: ClmRecipe, documents: Documents, block_size: int, tokenizer, part: str) -> SampleSet:
    limit = recipe.max_eval_samples if part == "validation" else None
    if recipe.packing == "none":
        return SeparateDocuments(documents, block_size, limit)
    filler = padding_token(tokenizer)
    blocks = PackedBlocks(documents, block_size, recipe.packing == "documents", filler, limit)
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


def tokenize_texts(
    dataset: Dataset, tokenizer, append_eos: bool, cache: Path, workers: int | None = None, overwrite: bool = False
) -> Dataset:
    """Token ids of each document (column `input_ids`, int32), without empty documents.

    Without `workers` the tokenizer uses its own threads; with it, that number of processes tokenizes.
    """

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
    return encode_table(dataset, encode, columns, (fingerprint(tokenizer), append_eos), cache, workers, overwrite)
