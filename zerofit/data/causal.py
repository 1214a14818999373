"""Data of the causal task: text, chats, a tokenised corpus or prompts, whichever the recipe names, as samples."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from datasets import Dataset
from transformers import PretrainedConfig

from zerofit.data.chat.instructions import RECORD_KINDS, find_form
from zerofit.data.chat.samples import find_preferences, prepare_chat
from zerofit.data.lengths import DEFAULT_BLOCK_SIZE, choose_length
from zerofit.data.megatron import prepare_blend
from zerofit.data.mixture import merge_notes, mix_sources, options_of_sources
from zerofit.data.options import DataOptions
from zerofit.data.pack import SampleSet, TextData
from zerofit.data.prompts import CHAT_ONLY, TEXT_ONLY, check_options, read_causal_prompts
from zerofit.data.sources import Source, lower_column_names
from zerofit.data.streaming import LAG_UPDATES, StreamedSamples, find_shards
from zerofit.data.tables import list_columns, one_process_at_a_time, table_key
from zerofit.data.text import prepare_text, read_records, take_texts
from zerofit.model.tokenizer import get_tokenizer
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import counted, parse_bytes
from zerofit.recipe.paths import output_folder
from zerofit.recipe.tasks import ClmRecipe


def prepare_causal_data(recipe: ClmRecipe, config: PretrainedConfig, consumed: Callable[[int], int] = int) -> TextData:
    """Read, tokenise and pack. The first process of a machine does the work; the others find the result in the cache.

    No process group exists yet, so that none can time out during it. `config`: the model's. `consumed`: (number of
    updates) -> their samples; corpora are laid out for the whole run.
    """
    source = recipe.source("block_size")
    block_size = choose_length("block_size", recipe.block_size or DEFAULT_BLOCK_SIZE, source, config)
    if recipe.data_path:
        return prepare_blend(recipe, config, block_size, consumed)
    options = DataOptions.of(recipe)
    if recipe.predict_file:
        return read_causal_prompts(recipe, options, config, block_size)
    sources: dict[str, TextData] = {}
    with one_process_at_a_time(options.cache):
        if recipe.streaming:
            sources[""] = _prepare_stream(recipe, options, config, block_size, consumed)
        else:
            for name, source_options in options_of_sources(options, recipe).items():
                sources[name] = _prepare_text_or_chat(recipe, source_options, config, block_size)
    data = next(iter(sources.values()))
    if recipe.mixture:
        are_chats = [each.is_chat for each in sources.values()]
        for is_chat, names in ((False, CHAT_ONLY), (True, TEXT_ONLY)):
            flags = [name for name in names if getattr(recipe, name)]
            if flags and all(each is is_chat for each in are_chats):
                raise UserError(f"{', '.join(flags)}: no effect, every source is {'chats' if is_chat else 'text'}")
        first = next((each for each in sources.values() if each.is_chat), data)  # whose tokenizer has a template
        shown = merge_notes({name: each.shown for name, each in sources.items()})
        data = mix_sources(sources, recipe, first, shown=shown, is_chat=any(are_chats))
    data.kind = f"{block_size} tokens a sample, packing: {recipe.packing}"
    if recipe.preference_loss:
        data.kind = f"pairs of answers, up to {block_size} tokens each"
    return data


def _prepare_text_or_chat(
    recipe: ClmRecipe, options: DataOptions, config: PretrainedConfig, block_size: int, source: Source | None = None
) -> TextData:
    """Prepare the samples of text, chats or pairs of answers. `source`: their records; None: read them."""
    source = source or read_records(recipe, options)
    recipe = recipe.columns_in(source.first.column_names)
    if recipe.preference_loss:
        pairs = {part: find_preferences(recipe, table) for part, table in source.parts.items()}
        return prepare_chat(recipe, options, config, source, pairs, block_size=block_size)
    forms = {part: find_form(recipe, table) for part, table in source.parts.items()}
    check_options(recipe, next(iter(forms.values())), source)
    chats = {part: form for part, form in forms.items() if form is not None}
    if len(chats) == len(forms):
        return prepare_chat(recipe, options, config, source, chats, block_size=block_size)
    if chats:
        kinds = "; ".join(
            f"{source.where(part)}: {RECORD_KINDS[form.kind] if form else 'text'}, {list_columns(source.parts[part])}"
            for part, form in forms.items()
        )
        raise UserError(f"training and held-out data have different forms. {kinds}. Let both have the same columns")
    parts = take_texts(source, recipe, options)
    texts = next(iter(parts.values()))
    every = (text for batch in texts.iter(100) for text in batch["text"])
    tokenizer = get_tokenizer(recipe, config, lambda: every, table_key(texts))
    data = prepare_text(parts, tokenizer, recipe, options, block_size)
    data.notes[:0] = source.notes
    return data


def _prepare_stream(
    recipe: ClmRecipe, options: DataOptions, config: PretrainedConfig, block_size: int, consumed: Callable[[int], int]
) -> TextData:
    """Prepare samples of shards that are read during training, a window at a time; held-out data is read before it."""
    held_out = None
    if recipe.validation_file:
        stream_options = replace(options, patterns={"validation": recipe.validation_file}, trains=False)
        held_out = _prepare_text_or_chat(recipe, stream_options, config, block_size)
        if not recipe.trains:
            return held_out
    shards = find_shards(tuple(recipe.train_file or ()))
    size = parse_bytes(recipe.streaming or "")
    table = output_folder(recipe.task, recipe).absolute() / "stream.jsonl"
    digest = sha256(repr((str(table), shards.key, size, recipe.seed)).encode()).hexdigest()[:16]
    prepared: list[TextData] = []  # the latest window

    def prepare(records: Dataset, name: str, folder: Path) -> SampleSet:
        stream_options = replace(options, held_out_fraction=0.0, cache=folder)
        source = lower_column_names(Source({"train": records}, {}, name), stream_options)
        prepared[:] = [_prepare_text_or_chat(recipe, stream_options, config, block_size, source)]
        return prepared[0].trained

    folder = options.cache / f"stream-{digest}"
    resumes = recipe.resume != "never"
    checkpoint = None if recipe.resume in ("auto", "never") else Path(recipe.resume).expanduser().resolve()
    earlier = checkpoint and checkpoint.parents[1] / table.name
    total = consumed(recipe.max_train_steps or 0)  # StreamOptions asks for it
    lag = LAG_UPDATES + 4 * (recipe.dataloader_num_workers or 0)
    train = StreamedSamples(
        shards, folder, size, recipe.seed, prepare, total=total, lag=lag, table=table, resumes=resumes, earlier=earlier
    )
    data = prepared[0]
    stored = sum(shards.sizes) / 2**30
    stream = (
        f"stream    {counted(len(shards.names), 'shard')}, {stored:,.3g} GiB, in windows of {recipe.streaming}; "
        "`training` is one window here, and an epoch the whole run"
    )
    validation = held_out.validation if held_out else None
    notes = [*data.notes, stream]
    return replace(data, train=train, validation=validation, notes=notes, order=train, samples_per_epoch=total)
