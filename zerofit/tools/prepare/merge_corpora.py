"""`zerofit prepare merge`: join corpora."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zerofit import __version__
from zerofit.data.megatron.corpus import open_corpus
from zerofit.recipe.errors import UserError
from zerofit.record.terminal import log_lines
from zerofit.tools.prepare.corpus_writer import CorpusWriter, check_free


def join(options: Any) -> int:
    """Write one corpus of several. Returns the exit code.

    Raises:
        UserError: one is broken, or they differ in tokenizer, type or end of documents. Then no file is left.
    """
    prefix = str(Path(options.output_prefix).expanduser())
    check_free([prefix], options.overwrite)
    corpora = [open_corpus("input", name) for name in corpora_of(options.input, prefix)]
    if any(Path(f"{corpus.prefix}.bin").resolve() == Path(f"{prefix}.bin").resolve() for corpus in corpora):
        raise UserError(f"output_prefix = {prefix!r} is one of the corpora that are joined. Name another prefix")
    cards = [corpus.card for corpus in corpora]
    values: dict[str, dict[object, str]] = {
        "types of ids": {corpus.dtype.__name__: corpus.dtype.__name__ for corpus in corpora},
        "tokenizers": {card and card.fingerprint: card.tokenizer if card else "no card" for card in cards},
        "ends of documents (--append_eod)": {card and card.eod: str(card and card.eod).lower() for card in cards},
    }
    if problems := [
        f"input: the corpora have different {what}: {' and '.join(several.values())}. Prepare them alike"
        for what, several in values.items()
        if len(several) > 1
    ]:
        raise UserError(problems)
    with CorpusWriter(prefix, np.dtype(corpora[0].dtype).name) as writer:
        for corpus in corpora:
            writer.add_corpus(corpus)
        largest = max((card.vocab_size for card in cards if card), default=0)
        sources = [corpus.prefix for corpus in corpora]
        made_by = f"zerofit {__version__}"
        card = cards[0] and replace(cards[0], vocab_size=largest, sources=sources, made_by=made_by)
        writer.finish(card)
        writer.publish()
    note = "" if card else ", without a card (.json), as none of them has one"
    log_lines(f"{prefix}: {writer.documents:,} documents, {writer.tokens:,} tokens of {len(corpora)} corpora{note}")
    return 0


def corpora_of(inputs: list[str], omit: str) -> list[str]:
    """The prefixes of the corpora in `inputs`. A folder stands for all its corpora, sorted by name as in Megatron, but
    for `omit`, which is about to be written. Raises UserError: a folder has none."""
    prefixes = []
    for name in inputs:
        folder = Path(name).expanduser()
        if not folder.is_dir() or folder.with_name(f"{folder.name}.bin").is_file():
            prefixes.append(name)
            continue
        files = {file.with_suffix("") for ending in (".bin", ".idx") for file in folder.glob(f"*{ending}")}
        in_folder = [str(file) for file in sorted(files) if file.resolve() != Path(omit).resolve()]
        if not in_folder:
            raise UserError(f"input = {name!r}: the folder has no corpus, no .bin with its .idx")
        prefixes += in_folder
    return prefixes
