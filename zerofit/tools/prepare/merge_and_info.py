"""`zerofit prepare merge` and `zerofit prepare info`: join corpora, describe them, and check them completely."""

import dataclasses
from contextlib import suppress
from pathlib import Path

import numpy as np

from zerofit import __version__
from zerofit.data.megatron.corpus import Card, Corpus, open_corpus, tokenizer_fingerprint
from zerofit.model.pretrained_io import silence_libraries
from zerofit.recipe.errors import EXIT_USER_ERROR, UserError
from zerofit.recipe.words import counted
from zerofit.record.terminal import say, size
from zerofit.tools.prepare.corpus_writer import CorpusWriter, check_free
from zerofit.tools.prepare.named_tokenizer import named_tokenizer
from zerofit.tools.prepare.prepare_options import CorporaOptions, JoinOptions

SHOWN_IDS = 200  # of the first document


# --------------------------------------------------------------------------------------------------------------- merge


def join(options: JoinOptions) -> int:
    """Write one corpus of several. Returns the exit code.

    Raises:
        UserError: one is broken, or they differ in tokenizer, type or end of documents. Then no file is left.
    """
    prefix = str(Path(options.output_prefix).expanduser())
    check_free([prefix], options.overwrite)
    corpora = [open_corpus("input", name) for name in corpora_of(options.input, prefix)]
    if any(Path(f"{corpus.prefix}.bin").resolve() == Path(f"{prefix}.bin").resolve() for corpus in corpora):
        raise UserError(f"output_prefix = {prefix!r} is one of the corpora that are joined. Name another prefix")
    card = _joined_card(corpora)
    with CorpusWriter(prefix, np.dtype(corpora[0].dtype).name) as writer:
        for corpus in corpora:
            writer.add_corpus(corpus.prefix)
        writer.finish(card)
        writer.publish()
    documents, tokens = sum(corpus.documents for corpus in corpora), sum(corpus.tokens for corpus in corpora)
    print(f"{prefix}: {documents:,} documents, {tokens:,} tokens of {len(corpora)} corpora", flush=True)
    if card is None:
        print(f"note: none of them has a card, so there is no {prefix}.json", flush=True)
    return 0


def corpora_of(inputs: list[str], omit: str | None = None) -> list[str]:
    """The prefixes of the corpora in `inputs`. A folder stands for all its corpora, sorted by name as in Megatron.

    Args:
        omit: a corpus in a folder that is not input, as it is about to be written.

    Raises:
        UserError: a folder has no corpus.
    """
    prefixes = []
    for name in inputs:
        folder = Path(name).expanduser()
        if not folder.is_dir() or folder.with_name(f"{folder.name}.bin").is_file():
            prefixes.append(name)
            continue
        files = {file.with_suffix("") for ending in (".bin", ".idx") for file in folder.glob(f"*{ending}")}
        in_folder = [str(file) for file in sorted(files) if not omit or file.resolve() != Path(omit).resolve()]
        if not in_folder:
            raise UserError(f"input = {name!r}: the folder has no corpus, no .bin with its .idx")
        prefixes += in_folder
    return prefixes


def _joined_card(corpora: list[Corpus]) -> Card | None:
    """The card of all; None where none has one.

    Raises:
        UserError: they differ, or only some have a card.
    """
    cards = [corpus.card for corpus in corpora if corpus.card]
    problems = []
    if 0 < len(cards) < len(corpora):
        without = next(corpus.prefix for corpus in corpora if not corpus.card)
        problems.append(f"input: {without} has no card (.json). Prepare that one again")
    for what, values in (
        ("types of ids", [corpus.dtype.__name__ for corpus in corpora]),
        ("tokenizers", [(card.fingerprint, card.tokenizer) for card in cards]),
        ("ends of documents (--append_eod)", ["none" if card.eod is None else str(card.eod) for card in cards]),
    ):
        different = list(dict.fromkeys(values))
        if len(different) > 1:
            shown = " and ".join(value[1] if isinstance(value, tuple) else value for value in different)
            problems.append(f"input: the corpora have different {what}: {shown}. Prepare them alike")
    if problems:
        raise UserError(problems)
    if not cards:
        return None
    return dataclasses.replace(
        cards[0],
        vocab_size=max(card.vocab_size for card in cards),
        documents=sum(card.documents for card in cards),
        tokens=sum(card.tokens for card in cards),
        largest_id=max(card.largest_id for card in cards),
        sources=[corpus.prefix for corpus in corpora],
        made_by=f"zerofit {__version__}",
    )


# ---------------------------------------------------------------------------------------------------------------- info


def info(options: CorporaOptions) -> int:
    """Describe corpora and check them. Returns the exit code: 2 if something is wrong with one of them."""
    code = 0
    for name in corpora_of(options.input):
        corpus = open_corpus("input", name)
        wrong = check(corpus)
        say(*_describe(corpus))
        if wrong:
            say(*(f"error: {line}" for line in wrong))
            code = EXIT_USER_ERROR
        else:
            print("complete: the index fits the file, and every id was checked", flush=True)
    return code


def check(corpus: Corpus) -> list[str]:
    """Problems of a corpus with a complete file: pointers, and ids against the card."""
    wrong = []
    index, card = f"{corpus.prefix}.idx", corpus.card
    lengths, width = corpus.lengths, np.dtype(corpus.dtype).itemsize
    if (lengths < 1).any():
        wrong.append(f"{index}: sequence {int(np.argmax(lengths < 1)):,} has the length {int(lengths.min())}")
    differ = (np.cumsum(lengths, dtype=np.int64) - lengths) * width != corpus.pointers
    if differ.any():
        wrong.append(f"{index}: sequence {int(np.argmax(differ)):,} does not begin where the one before it ends")
    smallest, largest = corpus.id_range()
    if smallest < 0:
        wrong.append(f"{corpus.prefix}.bin has the id {smallest}: no token has a number below 0")
    if card is None:
        return wrong
    if largest >= card.vocab_size:
        wrong.append(f"{corpus.prefix}.bin has the id {largest:,}, and by its card ids are below {card.vocab_size:,}")
    for name, number in {"documents": corpus.documents, "tokens": corpus.tokens, "largest_id": largest}.items():
        if getattr(card, name) != number:
            wrong.append(f"{corpus.prefix}.json says {name} = {getattr(card, name):,}, and it is {number:,}")
    return wrong


def _describe(corpus: Corpus) -> list[str]:
    lengths, width = corpus.lengths, np.dtype(corpus.dtype).itemsize
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    per_document = np.diff(ends[corpus.ends])
    lines = [
        corpus.prefix,
        f"  documents    {corpus.documents:,} ({int((per_document == 0).sum()):,} empty), {len(lengths):,} sequences",
        f"  tokens       {corpus.tokens:,} as {corpus.dtype.__name__}, {size(corpus.tokens * width)}",
        f"  lengths      mean {per_document.mean():,.1f} tokens, longest {int(per_document.max()):,}",
    ]
    card = corpus.card
    if card:
        end = "none" if card.eod is None else f"id {card.eod}"
        lines += [
            f"  tokenizer    {card.tokenizer} ({card.vocab_size:,} ids, fingerprint {card.fingerprint[:16]})",
            f"  end          {end}",
            f"  made by      {card.made_by}, of {counted(len(card.sources), 'source')}",
        ]
    else:
        lines.append("  no card      nothing says which tokenizer made it")
    return [*lines, _first_document(corpus, per_document)]


def _first_document(corpus: Corpus, per_document: np.ndarray) -> str:
    """The beginning of the first document that is not empty: as text if its tokenizer can be loaded, else as ids."""
    number, tokenizer = int(np.argmax(per_document > 0)), None
    ids = np.fromfile(f"{corpus.prefix}.bin", corpus.dtype, min(SHOWN_IDS, int(per_document[number]))).tolist()
    if corpus.card:
        silence_libraries()
        with suppress(UserError):
            tokenizer = named_tokenizer("tokenizer", corpus.card.tokenizer)
    known = tokenizer is not None and tokenizer_fingerprint(tokenizer) == corpus.card.fingerprint
    shown = repr(tokenizer.decode(ids)) if known else " ".join(map(str, ids))
    return f"  document {number}   {shown}{' ...' if per_document[number] > len(ids) else ''}"
