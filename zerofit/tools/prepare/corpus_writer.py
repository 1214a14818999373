"""Corpora are written completely or not at all, by megatron-core's IndexedDatasetBuilder.

The files of an unfinished corpus have names that end in .partial. At the end PREFIX.bin gets its name, then
PREFIX.json, and last PREFIX.idx, without which no program opens a corpus. The next job replaces the files that a
killed job has left.
"""

import fcntl
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from zerofit.data.megatron.corpus import Card, megatron
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import open_without_links

ENDINGS = (".bin", ".json", ".idx")  # in the order in which they get their names
PARTIAL = ".partial"


def check_free(prefixes: list[str], overwrite: bool) -> None:
    """Raises UserError unless corpora of these names may be written."""
    problems = []
    for prefix in prefixes:
        folder = Path(prefix).parent
        if folder.exists() and not folder.is_dir():
            problems.append(f"output_prefix: {str(folder)!r} is not a folder. Name another place")
        existing = [prefix + ending for ending in reversed(ENDINGS) if os.path.exists(prefix + ending)]
        if existing and not overwrite and not _left_by_a_killed_job(prefix):
            problems.append(f"output_prefix: {existing[0]} already exists. Name another prefix, or add --overwrite")
    if problems:
        raise UserError(problems)


def _left_by_a_killed_job(prefix: str) -> bool:
    """Whether a job was killed while it gave the files their names."""
    return not os.path.exists(f"{prefix}.idx") and os.path.exists(f"{prefix}.idx{PARTIAL}")


class CorpusWriter:
    """An unfinished corpus, as a context: without `publish` its files are removed."""

    def __init__(self, prefix: str, dtype: str):
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.paths = {ending: Path(f"{prefix}{ending}{PARTIAL}") for ending in ENDINGS}
        self.documents, self.tokens, self.empty, self.largest = 0, 0, 0, -1
        self.published = False
        self.lock = None

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
        for path in self.paths.values():
            if path != content:
                path.unlink(missing_ok=True)
        self.builder = compact_builder(str(content), self.dtype.type)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a full disk: the rest cannot be written
            self.builder.data_file.close()
        if not self.published:
            for path in self.paths.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        self.lock.close()

    def add(self, ids: bytes, lengths: bytes, largest: int = -1) -> None:
        """Append documents.

        Args:
            ids: of all of them, in the corpus' dtype.
            lengths: (documents,) int32; a document of 0 has no sequence.
        """
        counts = np.frombuffer(lengths, np.int32)
        if not len(counts):
            return
        with self._writing():
            self._add(ids, counts)
        self.documents += len(counts)
        self.empty += int((counts == 0).sum())
        self.tokens += len(ids) // self.dtype.itemsize
        self.largest = max(self.largest, largest)

    def _add(self, ids: bytes, counts: np.ndarray) -> None:
        before, ends = len(self.builder.sequence_lengths), self.builder.document_indices
        self.builder.add_document(np.frombuffer(ids, self.dtype), array("i", counts[counts > 0].tobytes()))
        ends.pop()  # as if all were one document
        ends.frombytes((before + np.cumsum(counts > 0)).astype(np.int64).tobytes())

    def add_corpus(self, prefix: str) -> None:
        """Append all of a corpus of the same dtype."""
        with self._writing():
            self.builder.add_index(prefix)

    def finish(self, card: Card | None) -> None:
        """Write everything to the disk, still under the .partial names."""
        with self._writing():
            if card is not None:
                card.write(self.paths[".json"])
            self.builder.finalize(str(self.paths[".idx"]))
            for path in self.paths.values():
                if path.exists():
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
        for ending in reversed(ENDINGS):
            if ending != ".bin":
                Path(self.prefix + ending).unlink(missing_ok=True)
        for ending in ENDINGS:
            if self.paths[ending].exists():
                self.paths[ending].rename(self.prefix + ending)
        self.published = True


def compact_builder(path: str, dtype: type[np.number]):
    """An IndexedDatasetBuilder whose lists take 4 bytes a sequence and 8 a document, and not 40 and more."""
    indexed = megatron().indexed

    class Writer(indexed._IndexWriter):
        def _sequence_pointers(self, sequence_lengths):
            sizes = np.array(sequence_lengths, dtype=np.int64) * np.dtype(self.dtype).itemsize
            return np.cumsum(sizes) - sizes

    class Builder(indexed.IndexedDatasetBuilder):
        def __init__(self):
            super().__init__(path, dtype=dtype)
            self.sequence_lengths, self.document_indices = array("i"), array("q", [0])

        def finalize(self, idx_path: str) -> None:
            self.data_file.close()
            with Writer(idx_path, self.dtype) as writer:
                writer.write(self.sequence_lengths, self.sequence_modes, self.document_indices)

    return Builder()
