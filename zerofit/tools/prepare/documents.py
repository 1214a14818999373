"""The input and output of `zerofit prepare`: files are read in chunks of about a megabyte, and corpora are written.

JSON lines and plain text are read block by block; tables, and files that are one JSON list, as training reads them
(zerofit/data/sources.py).

Corpora are written, or joined, completely or not at all, by megatron-core's IndexedDatasetBuilder. Names of unfinished
files end in .partial. PREFIX.idx, without which no program opens a corpus, gets its name last. The next job replaces
files that a killed one has left.
"""

import fcntl
import glob
import io
import os
from array import array
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from zerofit import __version__
from zerofit.data.delimited_files import as_utf8, bom_encoding
from zerofit.data.megatron import INDEX_FOLDER, Corpus, CorpusCard, import_megatron, open_corpus
from zerofit.data.options import DataOptions
from zerofit.data.records import records_of
from zerofit.data.sources import FORMATS, read_source
from zerofit.data.tables import one_process_at_a_time
from zerofit.model.tokenizer import END_OF_TEXT
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import COMPRESSED, READ_ERRORS, decompress, format_suffix, open_bytes, open_without_links
from zerofit.recipe.paths import find_files
from zerofit.record.terminal import log_lines
from zerofit.tools.prepare.encode import RecordChunk

CORPUS_SUFFIXES = (".bin", ".json", ".idx")  # in the order in which they get their names
PARTIAL_SUFFIX = ".partial"


def check_output_free(prefixes: list[str], overwrite: bool) -> None:
    """Check that corpora with these prefixes may be written. Raises UserError: one exists, `overwrite` is not set, and
    it was not left by a killed job."""
    for prefix in prefixes:
        existing = [prefix + ending for ending in reversed(CORPUS_SUFFIXES) if os.path.exists(prefix + ending)]
        is_unfinished = not os.path.exists(f"{prefix}.idx") and os.path.exists(f"{prefix}.idx{PARTIAL_SUFFIX}")
        if existing and not (overwrite or is_unfinished):
            raise UserError(f"output_prefix: {existing[0]} already exists. Name another prefix, or add --overwrite")


class CorpusWriter:
    """The writer of one corpus, as a context manager: if `publish` is not called, its files are removed at the end."""

    def __init__(self, prefix: str, dtype: str):
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.paths = {ending: Path(f"{prefix}{ending}{PARTIAL_SUFFIX}") for ending in CORPUS_SUFFIXES}
        self.documents = 0
        self.tokens = 0
        self.empty = 0
        self.largest_id = -1
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
        self.builder = import_megatron().indexed.IndexedDatasetBuilder(str(content), dtype=self.dtype.type)
        # Arrays take 12 bytes per document, lists would take 72.
        self.builder.sequence_lengths = array("i")
        self.builder.document_indices = array("q", [0])
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # on a full disk the buffered bytes cannot be written
            self.builder.data_file.close()
        if not self.published:
            for path in self.paths.values():
                with suppress(OSError):
                    path.unlink(missing_ok=True)
        self.lock.close()

    def add(self, documents: list[bytes]) -> None:
        """Append documents, each given as the bytes of its ids in the corpus' dtype. An empty one has no sequence."""
        with self._writing():
            for document in documents:
                ids = np.frombuffer(document, self.dtype)
                self.builder.add_document(ids, [len(ids)] if len(ids) else [])
        ids = np.frombuffer(b"".join(documents), self.dtype)
        self.documents += len(documents)
        self.empty += documents.count(b"")
        self.tokens += len(ids)
        self.largest_id = max(self.largest_id, int(ids.max()) if len(ids) else -1)

    def add_corpus(self, corpus: Corpus) -> None:
        """Append all documents of a corpus with the same dtype."""
        with self._writing():
            self.builder.add_index(corpus.prefix)
        self.documents += corpus.documents
        self.tokens += corpus.tokens
        self.largest_id = max(self.largest_id, corpus.card.largest_id if corpus.card else -1)

    def finish(self, card: CorpusCard | None) -> None:
        """Flush all files to the disk, still under their .partial names. The card gets the corpus' counts."""
        with self._writing():
            if card is not None:
                card = replace(card, documents=self.documents, tokens=self.tokens, largest_id=self.largest_id)
                card.write(self.paths[".json"])
            self.builder.finalize(str(self.paths[".idx"]))
            for path in filter(Path.exists, self.paths.values()):
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise UserError if writing fails within the block."""
        try:
            yield
        except OSError as error:
            raise UserError(f"output_prefix: {self.prefix} cannot be written: {error.strerror or error}") from None

    def publish(self) -> None:
        """Rename the files to their final names. An older corpus with this prefix is removed first."""
        for ending in (".idx", ".json"):
            Path(self.prefix + ending).unlink(missing_ok=True)
        for ending in CORPUS_SUFFIXES:
            if self.paths[ending].exists():
                self.paths[ending].rename(self.prefix + ending)
        self.published = True


def join_corpora(options: Any) -> None:
    """Join several corpora to one. Raises UserError: one is broken, or they differ in tokenizer, dtype or end of
    documents; then no file is left."""
    prefix = str(Path(options.output_prefix).expanduser())
    check_output_free([prefix], options.overwrite)
    corpora = [open_corpus("input", name) for name in find_corpora(options.input, prefix)]
    if any(Path(f"{corpus.prefix}.bin").resolve() == Path(f"{prefix}.bin").resolve() for corpus in corpora):
        raise UserError(f"output_prefix = {prefix!r} is one of the corpora that are joined. Name another prefix")
    cards = [corpus.card for corpus in corpora]
    values: dict[str, dict[object, str]] = {
        "types of ids": {corpus.dtype.__name__: corpus.dtype.__name__ for corpus in corpora},
        "tokenizers": {card and card.fingerprint: card.tokenizer if card else "no card" for card in cards},
        "ends of documents (--append_eod)": {card and card.eod: str(card and card.eod).lower() for card in cards},
    }
    if problems := [
        f"input: the corpora have different {noun}: {' and '.join(texts.values())}. Prepare them alike"
        for noun, texts in values.items()
        if len(texts) > 1
    ]:
        raise UserError(problems)
    with CorpusWriter(prefix, np.dtype(corpora[0].dtype).name) as writer:
        for corpus in corpora:
            writer.add_corpus(corpus)
        max_vocab_size = max((card.vocab_size for card in cards if card), default=0)
        sources = [corpus.prefix for corpus in corpora]
        made_by = f"zerofit {__version__}"
        card = cards[0] and replace(cards[0], vocab_size=max_vocab_size, sources=sources, made_by=made_by)
        writer.finish(card)
        writer.publish()
    note = "" if card else ", without a card (.json), as none of them has one"
    log_lines(f"{prefix}: {writer.documents:,} documents, {writer.tokens:,} tokens of {len(corpora)} corpora{note}")


def find_corpora(inputs: list[str], omit: str) -> list[str]:
    """Return the prefixes of the corpora in `inputs`. A folder stands for all its corpora, sorted by name as in
    Megatron, except `omit`, the prefix of the new corpus. Raises UserError: a folder has none."""
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


CHUNK_SIZE = 1 << 20  # bytes or characters; a longer record is a chunk by itself
INPUT_KINDS = {suffix: kind for suffix, kind in FORMATS.items() if kind != "conll"}
TABLE_BATCH_ROWS = 256  # rows of a table that are read at a time
SEPARATORS = {"line": b"\n", "paragraph": b"\n\n", "file": None}  # {unit of plain text: the mark between two}


def find_input_files(inputs: list[str]) -> dict[Path, str]:
    """Return {file: its kind, a value of FORMATS} of paths, folders and globs, in the order of `inputs`. Files in a
    folder or glob are sorted; hidden files, empty files and corpora are skipped there. Raises UserError: a name has
    no file, or a file is empty or of an unknown kind."""
    files: dict[Path, str] = {}
    for name in map(os.path.expanduser, inputs):
        for path in find_files("input", [f"{glob.escape(name)}/**/*" if os.path.isdir(name) else name]):
            # A corpus, or files of one that a killed job has left, may be among the texts.
            unfinished = path.with_suffix(f".idx{PARTIAL_SUFFIX}").exists()
            is_corpus = path.suffix in (".bin", ".idx", ".json") and (unfinished or path.with_suffix(".idx").exists())
            is_named = str(path) == os.path.abspath(name)
            is_skipped = is_corpus or path.suffix == PARTIAL_SUFFIX or INDEX_FOLDER in path.parts
            if path in files or (is_skipped and not is_named):
                continue
            kind = INPUT_KINDS.get(format_suffix(path))
            if kind is None:
                with open_bytes(path) as file:
                    kind = "json" if file.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"{" else None
            if kind is None or (kind == "parquet" and path.suffix.lower() in COMPRESSED):
                known = f"{', '.join(INPUT_KINDS)}; also {', '.join(COMPRESSED)}"
                raise UserError(f"input = {str(path)!r}: unknown file extension. Known are {known}")
            files[path] = kind
    if not files:
        raise UserError(f"input = {' '.join(inputs)}: there is no file of text")
    return files


def read_chunks(
    file: Path, kind: str, options: DataOptions, keys: tuple[str, ...], separator: str | None
) -> Iterator[RecordChunk]:
    """Yield the records of a file in chunks, in order.

    Args:
        kind: a value of FORMATS.
        options: how tables are read, and the encoding of the file.
        keys: the columns of a table.
        separator: separates documents of plain text: line, paragraph, file or a mark. None: <|endoftext|> if the file
            has it, else the file is one document.

    Raises:
        UserError: the file cannot be read, is a broken .gz or .parquet, or lacks a column.
    """
    try:
        records: Iterator[tuple[int, bytes | dict[str, Any]]]
        if kind == "text":
            records = _read_documents(file, separator, options.recipe.encoding)
        elif kind == "json" and next(_read_blocks(file, options.recipe.encoding), b"").lstrip()[:1] != b"[":
            records = _split(_read_blocks(file, options.recipe.encoding), b"\n")
        else:  # a table, or one list of objects
            kind = "table"
            records = _read_rows(file, options, keys)
        chunk = []
        size = 0
        for line, record in records:
            chunk.append((line, record))
            size += sum(len(str(value)) for value in record.values()) if isinstance(record, dict) else len(record)
            if size >= CHUNK_SIZE:
                yield RecordChunk(str(file), kind, chunk)
                chunk = []
                size = 0
        if chunk:
            yield RecordChunk(str(file), kind, chunk)
    except READ_ERRORS as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}. Is it cut off?") from None


def _read_blocks(path: Path, encoding: str | None) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks, decompressed and converted to UTF-8."""
    encoding = encoding or bom_encoding(path)
    with path.open("rb") as raw:
        file = decompress(raw, path)
        yield from as_utf8(file, encoding, path) if encoding else iter(lambda: file.read(CHUNK_SIZE), b"")


def _split(blocks: Iterator[bytes], mark: bytes | None) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, piece) for each piece between two marks."""
    buffer = bytearray()
    line = 1
    for block in blocks:
        begin = max(0, len(buffer) - len(mark or b""))
        buffer += block
        while mark and (stop := buffer.find(mark, begin)) >= 0:
            piece = bytes(buffer[:stop])
            yield line, piece
            line += piece.count(b"\n") + mark.count(b"\n")
            del buffer[: stop + len(mark)]
            begin = 0
    if buffer:
        yield line, bytes(buffer)


def _read_documents(path: Path, separator: str | None, encoding: str | None) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, document) of a plain text. Newlines around paragraphs, and around documents
    between marks, are removed."""
    mark = SEPARATORS.get(separator, separator.encode()) if separator else END_OF_TEXT.encode()
    pieces = _split(_convert_newlines(_read_blocks(path, encoding)), mark)
    is_stripped = separator not in ("line", "file")
    if separator is None:
        first_pieces = [*islice(pieces, 2)]
        is_stripped = len(first_pieces) == 2
        pieces = chain(first_pieces, pieces)
    for line, piece in pieces:
        yield line, piece.strip(b"\n") if is_stripped else piece


def _convert_newlines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Convert line breaks of all systems to newlines, as in training; bytes that are not UTF-8 are unchanged."""
    decoder = io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("surrogateescape"), translate=True)
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def _read_rows(file: Path, options: DataOptions, keys: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of a table or a JSON list."""
    with one_process_at_a_time(options.cache):
        table = read_source(replace(options, patterns={"train": [str(file)]}, lowercases=False)).first
    if missing := [key for key in keys if key not in table.column_names]:
        names = ", ".join(table.column_names)
        raise UserError(f"{file} has no column {', '.join(missing)}; it has {names}. See --json_keys")
    batches = table.select_columns(list(keys)).iter(TABLE_BATCH_ROWS)
    yield from enumerate(chain.from_iterable(map(records_of, batches)), 1)
