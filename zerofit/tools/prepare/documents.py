"""Read the input of `zerofit prepare`: which files, in which order, and their records in parts of about a megabyte.

JSON lines and plain text are read a block at a time; tables, and files that are one JSON list, as training reads
them (zerofit/data/sources.py).

Corpora are written, or joined, completely or not at all, by megatron-core's IndexedDatasetBuilder. Names of unfinished
files end in .partial. PREFIX.idx, without which no program opens a corpus, gets its name last. The next job replaces
what a killed one has left.
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
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.paths = {ending: Path(f"{prefix}{ending}{PARTIAL}") for ending in ENDINGS}
        self.documents = 0
        self.tokens = 0
        self.empty = 0
        self.largest = -1
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
        # 12 bytes a document, where lists take 72
        self.builder.sequence_lengths = array("i")
        self.builder.document_indices = array("q", [0])
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

    def finish(self, card: CorpusCard | None) -> None:
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


PART = 1 << 20  # bytes or characters; a longer record is a part by itself
KINDS = {ending: kind for ending, kind in FORMATS.items() if kind != "conll"}
ROWS = 256  # of a table, read at a time
UNITS = {"line": b"\n", "paragraph": b"\n\n", "file": None}  # of plain text, and what stands between two


def find_input(inputs: list[str]) -> dict[Path, str]:
    """{file: its kind, a value of FORMATS} of these paths, folders and globs, in the order of `inputs` and sorted
    within a folder or a glob, where hidden files, empty files and corpora are skipped. Raises UserError: a name
    without a file, an empty file, a file of an unknown kind."""
    files: dict[Path, str] = {}
    for name in map(os.path.expanduser, inputs):
        for path in find_files("input", [f"{glob.escape(name)}/**/*" if os.path.isdir(name) else name]):
            # a corpus, or what a killed job has left of one, may lie among the texts
            unfinished = path.with_suffix(f".idx{PARTIAL}").exists()
            is_corpus = path.suffix in (".bin", ".idx", ".json") and (unfinished or path.with_suffix(".idx").exists())
            is_named = str(path) == os.path.abspath(name)
            is_skipped = is_corpus or path.suffix == PARTIAL or INDEX_FOLDER in path.parts
            if path in files or (is_skipped and not is_named):
                continue
            kind = KINDS.get(format_suffix(path))
            if kind is None:
                with open_bytes(path) as file:
                    kind = "json" if file.read(4096).removeprefix(BOM_UTF8).lstrip()[:1] == b"{" else None
            if kind is None or (kind == "parquet" and path.suffix.lower() in COMPRESSED):
                known = f"{', '.join(KINDS)}; also {', '.join(COMPRESSED)}"
                raise UserError(f"input = {str(path)!r}: unknown file extension. Known are {known}")
            files[path] = kind
    if not files:
        raise UserError(f"input = {' '.join(inputs)}: there is no file of text")
    return files


# --------------------------------------------------------------------------------------------------------------- parts


def parts_of(
    file: Path, kind: str, options: DataOptions, keys: tuple[str, ...], separator: str | None
) -> Iterator[RecordChunk]:
    """The parts of a file, in order.

    Args:
        options: how tables are read, and the encoding of the file.
        separator: of plain text: line, paragraph, file or a mark. None: at <|endoftext|> where the file has it, else
            the whole file is one document.

    Raises:
        UserError: the file cannot be read, is a broken .gz or .parquet, or has no such column.
    """
    try:
        records: Iterator[tuple[int, bytes | dict[str, Any]]]
        if kind == "text":
            records = _documents(file, separator, options.recipe.encoding)
        elif kind == "json" and next(_blocks(file, options.recipe.encoding), b"").lstrip()[:1] != b"[":
            records = _split(_blocks(file, options.recipe.encoding), b"\n")
        else:  # a table, or one list of objects
            kind = "table"
            records = _rows(file, options, keys)
        held = []
        size = 0
        for line, record in records:
            held.append((line, record))
            size += sum(len(str(value)) for value in record.values()) if isinstance(record, dict) else len(record)
            if size >= PART:
                yield RecordChunk(str(file), kind, held)
                held = []
                size = 0
        if held:
            yield RecordChunk(str(file), kind, held)
    except READ_ERRORS as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}. Is it cut off?") from None


def _blocks(path: Path, encoding: str | None) -> Iterator[bytes]:
    """The bytes of a file, unpacked and as UTF-8, in blocks."""
    encoding = encoding or bom_encoding(path)
    with path.open("rb") as raw:
        file = decompress(raw, path)
        yield from as_utf8(file, encoding, path) if encoding else iter(lambda: file.read(PART), b"")


def _split(blocks: Iterator[bytes], mark: bytes | None) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, piece) of what stands between marks."""
    held = bytearray()
    line = 1
    for block in blocks:
        begin = max(0, len(held) - len(mark or b""))
        held += block
        while mark and (stop := held.find(mark, begin)) >= 0:
            piece = bytes(held[:stop])
            yield line, piece
            line += piece.count(b"\n") + mark.count(b"\n")
            del held[: stop + len(mark)]
            begin = 0
    if held:
        yield line, bytes(held)


def _documents(path: Path, separator: str | None, encoding: str | None) -> Iterator[tuple[int, bytes]]:
    """The documents of a plain text; those between paragraphs and marks have no newlines around them."""
    mark = UNITS.get(separator, separator.encode()) if separator else END_OF_TEXT.encode()
    pieces = _split(_plain_newlines(_blocks(path, encoding)), mark)
    is_stripped = separator not in ("line", "file")
    if separator is None:
        begin = [*islice(pieces, 2)]
        is_stripped = len(begin) == 2
        pieces = chain(begin, pieces)
    for line, piece in pieces:
        yield line, piece.strip(b"\n") if is_stripped else piece


def _plain_newlines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Line breaks of any system become newlines, as in training; bytes that are not UTF-8 stay as they are."""
    decoder = io.IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("surrogateescape"), translate=True)
    for block in blocks:
        yield decoder.decode(block).encode("utf-8", "surrogateescape")
    yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")


def _rows(file: Path, options: DataOptions, keys: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, row) of a table or a JSON list."""
    with one_process_at_a_time(options.cache):
        own = replace(options, patterns={"train": [str(file)]}, lowercases=False)
        read = read_source(own).first
    if missing := [key for key in keys if key not in read.column_names]:
        has = ", ".join(read.column_names)
        raise UserError(f"{file} has no column {', '.join(missing)}; it has {has}. See --json_keys")
    yield from enumerate(chain.from_iterable(map(records_of, read.select_columns(list(keys)).iter(ROWS))), 1)
