"""Data of the causal task: text, chats, a tokenised corpus or prompts, whichever the recipe names, as samples."""

from collections.abc import Callable

from zerofit.data.chat.instructions import KINDS, Form, FormOptions, find_form
from zerofit.data.chat.preferences import find_preferences, prepare_preferences
from zerofit.data.chat.prepare import prepare_chat
from zerofit.data.lengths import DEFAULT_BLOCK_SIZE, choose_length
from zerofit.data.megatron.prepare import prepare_corpora
from zerofit.data.options import DataOptions
from zerofit.data.pack import TextData
from zerofit.data.prompts import read_causal_prompts
from zerofit.data.sources import Source, not_utf8
from zerofit.data.tables import columns_present
from zerofit.data.text import prepare_text, read_records, take_texts
from zerofit.data.token_tables import one_process_at_a_time
from zerofit.model.tokenizer import get_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClmRecipe


def prepare_causal_data(recipe: ClmRecipe, config, consumed: Callable[[int], int] = int) -> TextData:
    """Read, tokenise and pack. The first process of a machine does the work; the others find the result in the cache.

    No process group exists yet, so that none can time out meanwhile.

    Args:
        config: the model's.
        consumed: (updates) -> samples of so many updates; corpora are laid out for the whole run.
    """
    source = recipe.source("block_size")
    block_size = choose_length("block_size", recipe.block_size or DEFAULT_BLOCK_SIZE, source, config)
    if recipe.data_path:
        return prepare_corpora(recipe, config, block_size, consumed)
    options = DataOptions.of(recipe)
    form = FormOptions(
        recipe.data_format,
        recipe.messages_column,
        recipe.text_column,
        recipe.system_prompt,
        answered=not recipe.predict_file,
    )
    if recipe.predict_file:
        return read_causal_prompts(recipe, options, form, config, block_size)
    try:
        with one_process_at_a_time(options.cache.folder):
            data = _prepare_text_or_chat(recipe, options, form, config, block_size)
    except UnicodeDecodeError as error:
        raise not_utf8(options, error) from None
    data.kind = f"{block_size} tokens a sample, packing: {recipe.packing}"
    if recipe.preference_loss:
        data.kind = f"pairs of answers, up to {block_size} tokens each"
    return data


def _prepare_text_or_chat(
    recipe: ClmRecipe, options: DataOptions, form: FormOptions, config, block_size: int
) -> TextData:
    source, unit = read_records(options, recipe.document_separator, recipe.packing)
    if recipe.preference_loss:
        pairs = {part: find_preferences(form, table) for part, table in source.parts.items()}
        return prepare_preferences(options, config, source, pairs, block_size, recipe.chat_template)
    forms = {part: find_form(form, table) for part, table in source.parts.items()}
    _check_options(recipe, next(iter(forms.values())), source)
    if all(forms.values()):
        more = recipe.packing, recipe.chat_template, recipe.train_on_prompt
        return prepare_chat(options, config, source, forms, block_size, *more)
    if any(forms.values()):
        kinds = "; ".join(
            f"{source.where(part)}: {KINDS[form.kind] if form else 'text'}, {columns_present(source.parts[part])}"
            for part, form in forms.items()
        )
        raise UserError(f"training and held-out data have different forms. {kinds}. Name one with --data_format")
    parts = take_texts(source, unit, recipe.text_column, recipe.document_separator, options)
    texts = next(iter(parts.values()))
    every = (text for batch in texts.iter(100) for text in batch["text"])
    tokenizer = get_tokenizer(options.tokenizer, config, lambda: every, texts._fingerprint)
    return prepare_text(
        parts, tokenizer, block_size, recipe.packing, recipe.append_eos, recipe.max_eval_samples, options.cache
    )


def is_packed(recipe: ClmRecipe) -> bool:
    """Whether documents are kept apart by positions that restart, which transformers' attention must respect."""
    if recipe.predict_file or recipe.preference_loss:
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
        raise UserError("packing = concatenate: no loss on the answers alone. Use --packing documents or none")
