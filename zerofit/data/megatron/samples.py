"""Corpora in Megatron's format for the causal task: already tokenized, from files to samples, and a report."""

import os
from collections.abc import Callable

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerofit.data.megatron.blend import (
    HELD_OUT,
    TEST,
    TRAINING,
    Blend,
    CorpusSamples,
    beyond_the_vocabulary,
    build_samples,
)
from zerofit.data.megatron.corpus import INDICES, Corpus, open_corpus, tokenizer_fingerprint
from zerofit.data.order import FixedOrder, samples_of_run
from zerofit.data.pack import TextData
from zerofit.model.tokenizer import load_tokenizer, producible_tokens
from zerofit.recipe.causal_options import RESETS
from zerofit.recipe.errors import UserError
from zerofit.recipe.places import cache_root
from zerofit.recipe.tasks import ClmRecipe

LOOKED_AT = 2**27  # number of ids to check before training in a corpus without a card


def prepare_corpora(
    recipe: ClmRecipe, config: PretrainedConfig, block_size: int, consumed: Callable[[int], int]
) -> TextData:
    """Open the corpora that the recipe names, and make the samples of the run. Raises UserError: a corpus is missing
    or damaged, was made with another tokenizer, or a part of it is empty. `consumed`: (number of
    updates) -> their samples."""
    given, resets = recipe.blend, tuple(name for name in RESETS if getattr(recipe, name))
    corpora = [open_corpus("data_path", prefix) for _, prefix in given]
    prefixes: dict[str, str] = {}
    for corpus in corpora:
        before = prefixes.setdefault(os.path.realpath(corpus.prefix), corpus.prefix)
        if before is not corpus.prefix:  # named twice, perhaps in two ways
            raise UserError(f"data_path: {before} and {corpus.prefix} are one corpus. Name it once")
    weights = [weight for weight, _ in given if weight is not None] or None
    tokenizer = load_tokenizer(recipe, config)
    rows = producible_tokens(tokenizer)
    notes = check_tokenizer(corpora, tokenizer, rows)
    eod = end_of_document(resets, corpora, tokenizer)
    blend = Blend(corpora, weights, recipe.split, block_size, recipe.seed)
    blend.check()
    per_epoch = blend.samples_per_epoch(TRAINING)
    total = 0
    if recipe.trains:
        total = samples_of_run(recipe.num_train_epochs, recipe.max_train_steps, per_epoch, consumed)
    held_out = blend.max_samples_without_repeats(HELD_OUT) if blend.bounds[HELD_OUT] else 0
    if not (held_out or recipe.trains):
        raise UserError(f"split = {recipe.split!r} holds nothing out. 0,1 evaluates on all documents")
    root = cache_root(recipe.cache_dir) / INDICES
    held_out = min(held_out, recipe.max_eval_samples or held_out)
    train, validation = build_samples(blend, total, held_out, rows, eod, resets=resets, root=root)
    order, shown = FixedOrder(len(train)) if train is not None else None, ", ".join((recipe.split, *resets))
    return TextData(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        block_size=block_size,
        notes=notes,
        kind=f"Megatron's GPT samples of {block_size:,} + 1 tokens, split {shown}; samples of one pass:",
        order=order,
        samples_per_epoch=per_epoch,
        report=report(blend, total, validation),
    )


def check_tokenizer(corpora: list[Corpus], tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """Check that the corpora were made with the tokenizer of the run. Returns notes for the log. Raises UserError:
    they were made with another one, or hold ids that it does not have. `rows`: number of tokens of the tokenizer."""
    notes, problems, fingerprint = [], [], None
    for corpus in corpora:
        card = corpus.card
        if card is not None:
            fingerprint = fingerprint or tokenizer_fingerprint(tokenizer)
            if card.fingerprint != fingerprint:
                problems.append(f"data_path: {corpus.prefix} is of {card.tokenizer}. Set tokenizer_name to that")
            elif card.eod is None:
                notes.append(f"hint      {corpus.prefix} has no --append_eod: nothing marks where a document ends")
            continue
        one_of = max(1, corpus.tokens // LOOKED_AT)
        smallest, largest = corpus.id_range(one_of)
        if smallest < 0 or largest >= rows:
            problems.append(beyond_the_vocabulary(smallest if smallest < 0 else largest, rows, corpus.prefix))
        checked = "its ids are" if one_of == 1 else "those of its ids that were looked at are"
        notes.append(f"note      {corpus.prefix} has no .json; {checked} below {largest + 1:,}")
    if problems:
        raise UserError(problems)
    return notes


def end_of_document(resets: tuple[str, ...], corpora: list[Corpus], tokenizer: PreTrainedTokenizerBase) -> int:
    """The id at the end of each document: that of the corpora, else the tokenizer's end-of-text token; -1 if there is
    none. Raises UserError: there is none, and options need it; or there are several."""
    found = (corpus.card.eod if corpus.card else tokenizer.eos_token_id for corpus in corpora)
    eods = {eod for eod in found if eod is not None}
    if len(eods) > 1:
        ends = ", ".join(map(str, sorted(eods)))
        raise UserError(f"data_path: documents of these corpora end differently ({ends}). Prepare them alike")
    if eods:
        return eods.pop()
    if resets:
        raise UserError(f"{', '.join(resets)}: no token ends documents of {corpora[0].prefix}: use --append_eod")
    return -1


def report(blend: Blend, total: int, validation: CorpusSamples | None) -> list[tuple[str, ...]]:
    """The table before training: one row per corpus, its size and the number of epochs of the run."""
    head = ("corpus", "share", "documents", "tokens", "training", "evaluation", "test", "epochs")
    rows = []
    for corpus, proportion in zip(blend.corpora, blend.proportions):
        samples = [blend.samples(corpus, part) for part in (TRAINING, HELD_OUT, TEST)]
        times = total * proportion / samples[0] if samples[0] else 0.0
        counts = [f"{count:,}" for count in (corpus.documents, corpus.tokens, *samples)]
        rows.append((corpus.prefix, f"{proportion:.1%}", *counts, f"{times:.3g}"))
    used = f"{len(validation):,}" if validation is not None else "0"
    return [head, *rows, ("of the run", "", "", "", f"{total:,}", used, "0", "")]
