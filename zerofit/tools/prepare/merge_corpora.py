"""`zerofit prepare merge`: join corpora."""

import dataclasses
from pathlib import Path

import numpy as np

from zerofit import __version__
from zerofit.data.megatron.corpus import Card, Corpus, open_corpus
from zerofit.recipe.errors import UserError
from zerofit.tools.prepare.corpus_writer import CorpusWriter, check_free
from zerofit.tools.prepare.prepare_options import JoinOptions


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
