"""Corpora are written, or joined, completely or not at all, by megatron-core's IndexedDatasetBuilder.

Names of unfinished files end in .partial. PREFIX.idx, without which no program opens a corpus, gets its name last. The
next job replaces what a killed one has left.
"""

import fcntl
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zerofit import __version__
from zerofit.data.megatron import Card, Corpus, megatron, open_corpus
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import open_without_links
from zerofit.record.terminal import log_lines

ENDINGS = (".bin", ".json", ".idx")  # in the order in which they get their names
PARTIAL = ".partial"


def check_free(prefixes: list[str], overwrite: bool) -> None:
    """Raises UserError unless corpora of these names may be written: what a killed job has left may be replaced."""
    for prefix in prefixes:
        existing = [prefix + ending for ending in reversed(ENDINGS) if os.path.exists(prefix + ending)]
        is_left = not os.path.exists(f"{prefix}.idx") and os.path.exists(f"{prefix}.idx{PARTIAL}")
        if existing and not (overwrite or is_left):
            raise UserError(f"output_prefix: {existing[0]} already exists. Name another prefix, or add --overwrite")


class CorpusWriter:
    """An unfinished corpus, as a context: without `publish` its files are removed."""

    def __init__(self, prefix: str, dtype: str):
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.paths = {ending: Path(f"{prefix}{ending}{PARTIAL}") for ending in ENDINGS}
        self.documents, self.tokens, self.empty, self.largest = 0, 0, 0, -1
        self.published = False

    def __enter__(self) -> "CorpusWriter":
        content = self.paths[".bin"]
        try:
            content.parent.mkdir(parents=True, exist_ok=True)
            self.lock = open(content, "ab", opener=open_without_links)
        except OSError as error:
            raise UserError(f"output_prefix: {content} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.close()
            raise UserError(f"output_prefix: another job is writing {self.prefix}.bin. Name another prefix") from None
        except OSError:  # a file system without locks
            pass
        for ending in (".json", ".idx"):
            self.paths[ending].unlink(missing_ok=True)
        self.builder = megatron().indexed.IndexedDatasetBuilder(str(content), dtype=self.dtype.type)
        # 12 bytes a document, where lists take 72
        self.builder.sequence_lengths, self.builder.document_indices = array("i"), array("q", [0])
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk: the rest cannot be written
            self.builder.data_file.close()
        if not self.published:
            for path in self.paths.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        self.lock.close()

    def add(self, documents: list[bytes]) -> None:
        """Append documents, each the bytes of its ids in the corpus' dtype; an empty one has no sequence."""
        with self._writing():
            for document in documents:
                ids = np.frombuffer(document, self.dtype)
                self.builder.add_document(ids, [len(ids)] if len(ids) else [])
        ids = np.frombuffer(b"".join(documents), self.dtype)
        self.documents += len(documents)
        self.empty += documents.count(b"")
        self.tokens += len(ids)
        self.largest = max(self.largest, int(ids.max()) if len(ids) else -1)

    def add_corpus(self, corpus: Corpus) -> None:
        """Append all of a corpus of the same dtype."""
        with self._writing():
            self.builder.add_index(corpus.prefix)
        self.documents += corpus.documents
        self.tokens += corpus.tokens
        self.largest = max(self.largest, corpus.card.largest_id if corpus.card else -1)

    def finish(self, card: Card | None) -> None:
        """Write everything to the disk, still under the .partial names; the card with the corpus' numbers."""
        with self._writing():
            if card is not None:
                numbered = replace(card, documents=self.documents, tokens=self.tokens, largest_id=self.largest)
                numbered.write(self.paths[".json"])
            self.builder.finalize(str(self.paths[".idx"]))
            for path in filter(Path.exists, self.paths.values()):
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises UserError where the disk fails."""
        try:
            yield
        except OSError as error:
            raise UserError(f"output_prefix: {self.prefix} cannot be written: {error.strerror or error}") from None

    def publish(self) -> None:
        """Give the files their names. An older corpus of that name is removed first."""
        for ending in (".idx", ".json"):
            Path(self.prefix + ending).unlink(missing_ok=True)
        for ending in ENDINGS:
            if self.paths[ending].exists():
                self.paths[ending].rename(self.prefix + ending)
        self.published = True


def join(options: Any) -> None:
    """Write one corpus of several. Raises UserError: one is broken, or they differ in tokenizer, type or end of
    documents; then no file is left."""
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
