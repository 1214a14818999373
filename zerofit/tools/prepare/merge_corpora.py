"""`zerofit prepare merge`: join corpora."""

from pathlib import Path
from typing import Any

import numpy as np

from zerofit import __version__
from zerofit.data.megatron.corpus import Corpus, open_corpus
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
    about = _in_common(corpora)
    with CorpusWriter(prefix, np.dtype(corpora[0].dtype).name) as writer:
        for corpus in corpora:
            writer.add_corpus(corpus)
        writer.finish(about)
        writer.publish()
    print(f"{prefix}: {writer.documents:,} documents, {writer.tokens:,} tokens of {len(corpora)} corpora", flush=True)
    if about is None:
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


def _in_common(corpora: list[Corpus]) -> dict[str, Any] | None:
    """Return what the card of the joined corpus says beside its numbers; None where no corpus has a card.

    Raises:
        UserError: they differ, or only some have a card.
    """
    cards, problems = [corpus.card for corpus in corpora if corpus.card], []
    if 0 < len(cards) < len(corpora):
        without = next(corpus.prefix for corpus in corpora if not corpus.card)
        problems.append(f"input: {without} has no card (.json). Prepare that one again")
    for what, values in (
        ("types of ids", {corpus.dtype.__name__: corpus.dtype.__name__ for corpus in corpora}),
        ("tokenizers", {card.fingerprint: card.tokenizer for card in cards}),
        ("ends of documents (--append_eod)", {card.eod: str(card.eod).lower() for card in cards}),
    ):
        if len(values) > 1:
            problems.append(
                f"input: the corpora have different {what}: {' and '.join(values.values())}. Prepare them alike"
            )
    if problems:
        raise UserError(problems)
    if not cards:
        return None
    same = {name: getattr(cards[0], name) for name in ("tokenizer", "fingerprint", "eod")}
    vocab_size = max(card.vocab_size for card in cards)
    sources = [corpus.prefix for corpus in corpora]
    return {**same, "vocab_size": vocab_size, "sources": sources, "made_by": f"zerofit {__version__}"}
