"""Data for the causal task: from the recipe's data options to samples, before any process waits in a collective."""

from train.data.chat.instructions import KINDS, Form, find_form
from train.data.chat.prepare import prepare_chat
from train.data.lengths import choose_length
from train.data.pack import DatasetStats, PackedBlocks, SampleSet, SeparateDocuments, TextData
from train.data.sources import Source, columns_present, not_utf8
from train.data.text.documents import read_records, take_texts
from train.data.text.tokenize import Documents, tokenise
from train.model.tokenizer import get_tokenizer, padding_token
from train.recipe.cache import cache_root, one_process_at_a_time, prepare_anew
from train.recipe.errors import UserError
from train.recipe.tasks import ClmRecipe

DEFAULT_BLOCK_SIZE = 1024


def prepare_text(recipe: ClmRecipe, config, global_batch: int = 1) -> TextData:
    """Read, tokenise and pack; the first process of the machine works, the others find it done.

    Args:
        global_batch: samples of an update; corpora are laid out for the whole run.
    """
    if recipe.data_path:
        from train.data.megatron.prepare import prepare_corpora

        return prepare_corpora(recipe, config, global_batch)
    block_size = choose_length(recipe, "block_size", config, DEFAULT_BLOCK_SIZE)
    if recipe.predict_file:
        from train.data.prompts import read_prompts

        return read_prompts(recipe, config, block_size)
    try:
        with one_process_at_a_time(recipe.cache_dir):
            data = _prepare(recipe, config, block_size)
    except UnicodeDecodeError as error:
        raise not_utf8(recipe, error) from None
    data.kind = f"{block_size} tokens a sample, packing: {recipe.packing}"
    return data


def _prepare(recipe: ClmRecipe, config, block_size: int) -> TextData:
    source, unit = read_records(recipe)
    forms = {part: find_form(recipe, table) for part, table in source.parts.items()}
    _check_options(recipe, next(iter(forms.values())), source)
    if all(forms.values()):
        return prepare_chat(recipe, config, source, forms, block_size)
    if any(forms.values()):
        kinds = "; ".join(
            f"{source.where(part)}: {KINDS[form.kind] if form else 'running text'} a record, "
            f"{columns_present(source.parts[part])}" for part, form in forms.items()
        )  # fmt: skip
        raise UserError(
            f"training and held-out data are not of one kind. {kinds}. Say what both are with --data_format"
        )
    records = take_texts(recipe, source, unit)
    read = records.train if recipe.trains else records.validation
    texts = (text for batch in read.iter(100) for text in batch["text"])
    tokenizer = get_tokenizer(recipe, config, lambda: texts, read._fingerprint)
    append_eos = _append_eos(recipe, tokenizer)
    sets: dict[str, SampleSet | None] = {"train": None, "validation": None}
    for part in sets:
        dataset = getattr(records, part)
        if dataset is not None:
            anew = prepare_anew(recipe)
            cache, workers = cache_root(recipe.cache_dir), recipe.preprocessing_num_workers
            encoded = tokenise(dataset, tokenizer, append_eos, cache, workers, overwrite=anew)
            sets[part] = _samples(recipe, Documents(encoded), block_size, tokenizer, part)
    hints = _hints(recipe, (sets["train"] or sets["validation"]).contents, unit, block_size)
    return TextData(sets["train"], sets["validation"], tokenizer, block_size, hints)


def is_packed(recipe: ClmRecipe) -> bool:
    """Whether documents are kept apart by positions that begin anew, which transformers' attention must heed."""
    if recipe.predict_file:
        return False
    if recipe.data_path:
        return recipe.reset_position_ids and recipe.reset_attention_mask
    return recipe.packing == "documents"


def _check_options(recipe: ClmRecipe, form: Form | None, source: Source) -> None:
    """Raises UserError for options that have no effect on what the data was taken for."""
    if form is None:
        given = [name for name in ("chat_template", "system_prompt", "train_on_prompt") if getattr(recipe, name)]
        what = f"text; {columns_present(source.first)}. Name the form with --data_format"
    else:
        given = [name for name in ("document_separator", "append_eos") if getattr(recipe, name) is not None]
        what = f"{KINDS[form.kind]} a record (column {form.question}). For running text say --data_format text"
    if given:
        named = ", ".join(f"{name} = {getattr(recipe, name)!r}" for name in given)
        raise UserError(f"{named}: no effect, the data is taken for {what}, or leave the option out")
    if form is not None and recipe.packing == "concatenate":
        raise UserError(
            f"packing = concatenate: the data is {KINDS[form.kind]} a record (column {form.question}), and without "
            "boundaries there is no loss on the answers alone. Use --packing documents or none"
        )


def _hints(recipe: ClmRecipe, contents: DatasetStats, unit: str, block_size: int) -> list[str]:
    """Advice on how the documents were cut, where the figures suggest that it was not meant so.

    `unit` is what a document was in the source: row, record, file, line, paragraph or mark.
    """
    mean = contents.tokens / contents.documents
    if recipe.packing == "documents" and mean < block_size / 4:
        return [
            f"hint      a document ({unit}) has {mean:.0f} tokens on average and attention stays inside it: "
            "if these are lines of longer texts, --packing concatenate or another --document_separator gives "
            "longer contexts"
        ]
    if contents.truncated > 0.1 * contents.tokens:
        return [
            f"hint      {contents.truncated / contents.tokens:.0%} of all tokens are cut away: "
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
