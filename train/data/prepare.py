"""Everything from the recipe's data options to samples, done before any process waits in a collective."""

import os
from dataclasses import dataclass
from pathlib import Path

from train.data.cache import cache_root, one_process_at_a_time
from train.data.pack import Contents, PackedBlocks, SampleSet, SeparateDocuments
from train.data.sources import Records, load_records, not_utf8
from train.data.tokenise import Documents, tokenise
from train.model.tokenizer import load_tokenizer, train_tokenizer
from train.recipe.errors import UserError
from train.recipe.options import ClmRecipe

DEFAULT_BLOCK_SIZE = 1024


@dataclass
class TextData:
    """Samples of both parts, and the tokenizer that made them."""

    train: SampleSet
    validation: SampleSet | None
    tokenizer: object
    unit: str  # what a document was in the source: row, record, file, line, paragraph or mark
    block_size: int

    @property
    def hints(self) -> list[str]:
        """Advice on how the documents were cut, where the figures suggest that it was not meant so."""
        contents = self.train.contents
        mean = contents.tokens / contents.documents
        if isinstance(self.train, PackedBlocks) and self.train.boundaries and mean < self.block_size / 4:
            return [
                f"hint      a document ({self.unit}) has {mean:.0f} tokens on average and attention stays inside it: "
                "if these are lines of longer texts, --packing concatenate or another --document_separator gives "
                "longer contexts"
            ]
        if contents.truncated > 0.1 * contents.tokens:
            return [
                f"hint      {contents.truncated / contents.tokens:.0%} of all tokens are cut away: "
                "a larger --block_size, or packing, keeps them"
            ]
        return []


def prepare_text(recipe: ClmRecipe, config) -> TextData:
    """Read, tokenise and pack; the first process of the machine works, the others find it done."""
    block_size = choose_block_size(recipe, config)
    try:
        with one_process_at_a_time(recipe.cache_dir):
            return _prepare(recipe, config, block_size)
    except UnicodeDecodeError as error:
        raise not_utf8(recipe, error) from None


def _prepare(recipe: ClmRecipe, config, block_size: int) -> TextData:
    records = load_records(recipe)
    tokenizer = _tokenizer(recipe, config, records)
    append_eos = _append_eos(recipe, tokenizer)
    sets: dict[str, SampleSet | None] = {"train": None, "validation": None}
    for part in sets:
        dataset = getattr(records, part)
        if dataset is not None:
            anew = recipe.overwrite_cache and int(os.environ.get("RANK", "0")) == 0
            cache, workers = cache_root(recipe.cache_dir), recipe.preprocessing_num_workers
            encoded = tokenise(dataset, tokenizer, append_eos, cache, workers, overwrite=anew)
            sets[part] = _samples(recipe, Documents(encoded), block_size, tokenizer, part)
    return TextData(sets["train"], sets["validation"], tokenizer, records.unit, block_size)


def _append_eos(recipe: ClmRecipe, tokenizer) -> bool:
    if tokenizer.eos_token_id is None:
        if recipe.append_eos:
            raise UserError("append_eos = true: the tokenizer has no end-of-text token. Leave the option out")
        return False
    return recipe.packing != "concatenate" if recipe.append_eos is None else recipe.append_eos


def choose_block_size(recipe: ClmRecipe, config) -> int:
    """The recipe's block size, else the model's positions up to 1024. Raises UserError if the model has fewer."""
    positions = getattr(config, "max_position_embeddings", None)
    if recipe.block_size and positions and recipe.block_size > positions:
        raise UserError(
            f"block_size = {recipe.block_size} ({recipe.source('block_size')}): the model has {positions} positions. "
            f"Choose {positions} or less"
        )
    return recipe.block_size or min(positions or DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE)


def _tokenizer(recipe: ClmRecipe, config, records: Records):
    if not recipe.train_tokenizer_vocab_size:
        return load_tokenizer(recipe, config)
    texts = (text for batch in records.train.iter(100) for text in batch["text"])
    cache = cache_root(recipe.cache_dir)
    return train_tokenizer(texts, recipe.train_tokenizer_vocab_size, records.train._fingerprint, Path(cache))


def _samples(recipe: ClmRecipe, documents: Documents, block_size: int, tokenizer, part: str) -> SampleSet:
    if recipe.packing == "none":
        return SeparateDocuments(documents, block_size)
    filler = padding_token(tokenizer)
    blocks = PackedBlocks(documents, block_size, recipe.packing == "documents", filler)
    if not len(blocks):
        raise UserError(
            f"block_size = {block_size} leaves no {part} sample: there are {documents.num_tokens} tokens. "
            "Choose a smaller one, or --packing documents, which fills the last block up"
        )
    return blocks


def padding_token(tokenizer) -> int:
    """An id to fill rows with; it is never trained on and never attended to, so any will do."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0):
        if token is not None:
            return token
    raise AssertionError("0 is an id")


def contents_rows(train: Contents, validation: Contents | None) -> list[tuple[str, ...]]:
    """The table of what was read, shown before training: one row a figure, one column a part."""
    columns = [("training", train)] + ([("held out", validation)] if validation else [])
    rows = [("", *(name for name, _ in columns))]
    for label, show in (
        ("documents", lambda c: f"{c.documents:,}"),
        ("tokens", lambda c: f"{c.tokens:,}"),
        ("samples", lambda c: f"{c.samples:,}"),
        ("tokens trained on", lambda c: f"{c.trained:,}"),
        ("truncated", lambda c: f"{c.truncated:,} ({c.truncated / c.tokens:.1%})"),
        ("padding", lambda c: f"{c.padding:.1%}"),
    ):
        rows.append((label, *(show(contents) for _, contents in columns)))
    return rows
