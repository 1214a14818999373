"""Corpora are written completely or not at all, by megatron-core's IndexedDatasetBuilder.

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

import numpy as np

from zerofit.data.megatron.corpus import Card, Corpus, megatron
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import open_without_links

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
