"""Megatron's corpora: PREFIX.bin and PREFIX.idx, and PREFIX.json, which says how they were made.

megatron-core makes the samples; the files are checked here without it, since its import takes seconds.

The format has no checksum and no end mark, and megatron-core does not check it: a truncated .bin causes an error only
in the middle of training. So the sizes of the files are compared before a corpus is opened.
"""

import dataclasses
import functools
import hashlib
import json
import os
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from zerofit.compat import UNTIL_THE_RUN_ENDS
from zerofit.compat.megatron import load_without_pickles
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.parsing import parse_json
from zerofit.recipe.paths import missing_corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1  # megatron-core's indexed_dataset.py
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, ends of documents
DTYPES: dict[int, type[np.number]] = dict(
    enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16), 1)
)
INDICES = "GPTDataset_indices"  # Megatron's name of a folder of indices; its own lie beside a corpus
PORTION = 1 << 22  # number of ids to read at a time
# Their token ids distinguish tokenizers that have the same vocabulary.
PROBES = (
    "The quick brown fox's 3.14 jumps\n\n\tover  the lazy dog.",
    "def f(x):\n    return x[0] != 1_000",
    "吾輩は猫である。名前はまだ無い。",
    "naïve café — “Ünïcödé” 🙂",
    " leading and trailing ",
)


@functools.cache
def megatron() -> SimpleNamespace:
    """megatron-core's modules for data, imported late, since it takes seconds. Raises UserError: it is not
    installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Transformer Engine and Apex, which only models need, are not installed
        try:
            from megatron.core.datasets import (
                blended_dataset,
                blended_megatron_dataset_builder,
                blended_megatron_dataset_config,
                gpt_dataset,
                indexed_dataset,
            )
        except ImportError as error:
            raise UserError(f"pip install '.[megatron]' for megatron-core ({first_line(error)})") from None
    load_without_pickles((blended_dataset, gpt_dataset), _NumpyWithoutPickles())
    UNTIL_THE_RUN_ENDS.callback(megatron.cache_clear)
    return SimpleNamespace(
        builder=blended_megatron_dataset_builder,
        config=blended_megatron_dataset_config,
        gpt=gpt_dataset,
        indexed=indexed_dataset,
    )


class _NumpyWithoutPickles:
    """numpy for megatron-core's datasets."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def load(path: str, **_: Any) -> np.ndarray:
        """A mapped array. Raises UserError: the file is not an array."""
        try:
            return np.lib.format.open_memmap(path, mode="r")
        except ValueError as error:
            problem = f"{path} is not an index: {first_line(error)}"
            raise UserError(f"{problem}. Remove its folder: it is made again") from None


@dataclass(frozen=True)
class Card:
    """PREFIX.json, which `zerofit prepare` writes. A corpus from another program has none. `documents, tokens`: their
    numbers; documents without a token count as well."""

    tokenizer: str  # its name
    fingerprint: str  # of the tokenizer, see `tokenizer_fingerprint`
    vocab_size: int  # ids are below it
    eod: int | None  # the id after each document; None where there is none
    documents: int
    tokens: int
    largest_id: int  # the largest id in the corpus
    sources: list[str]  # the files or corpora that it was made from
    made_by: str  # the program and its version

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass
class Corpus:
    """A corpus with consistent files, mapped into memory. `lengths`: (sequences,) tokens of each sequence, int32.
    Megatron's own tool makes one sequence of a document."""

    prefix: str  # the path without .bin
    dtype: type[np.number]  # of the ids
    lengths: np.ndarray
    pointers: np.ndarray  # (sequences,) the start of each in the .bin, in bytes, int64
    ends: np.ndarray  # (documents + 1,) the first sequence of each document, and the end of the last, int64
    card: Card | None  # None without PREFIX.json

    @property
    def documents(self) -> int:
        return len(self.ends) - 1

    @property
    def tokens(self) -> int:
        return os.path.getsize(f"{self.prefix}.bin") // self.dtype().itemsize

    def ids(self) -> np.ndarray:
        """Return (tokens,) all ids, mapped."""
        return np.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r")

    def id_range(self, one_of: int = 1) -> tuple[int, int]:
        """Return (smallest, largest) id in one of every `one_of` portions of the corpus."""
        ids = self.ids()
        portions = (ids[start : start + PORTION] for start in range(0, len(ids), one_of * PORTION))
        ranges = [(int(portion.min()), int(portion.max())) for portion in portions]
        return min(smallest for smallest, _ in ranges), max(largest for _, largest in ranges)


def open_corpus(option: str, prefix: str) -> Corpus:
    """Open PREFIX.bin and PREFIX.idx after a check of their sizes. `prefix` may have one of the two suffixes. Raises
    UserError: a file is missing, of another format or version, truncated, or not of the same corpus. `option`: the
    option that names the prefix, for messages."""
    prefix = str(Path(prefix.removesuffix(".bin").removesuffix(".idx")).expanduser())
    try:
        corpus = _mapped(prefix)
    except ValueError as problem:
        raise UserError(f"{option} = {prefix!r}: {problem}") from None
    return dataclasses.replace(corpus, card=read_card(prefix))


def _mapped(prefix: str) -> Corpus:
    """The corpus without its card. Raises ValueError."""
    index, content = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    if missing := missing_corpus(prefix):
        raise ValueError(missing)
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise ValueError(f"{index} is not an index of Megatron's (it does not begin with MMIDIDX)")
    if len(head) < HEADER.size:
        raise ValueError(f"{index} is truncated: {size} bytes")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(f"{index} has version {version} of the format; only {VERSION} can be read")
    if not np.issubdtype(DTYPES.get(code, np.float32), np.integer):
        raise ValueError(f"{index} has ids of type {code}, which is not a type of integers")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size not in (expected, expected + sequences):  # the second has a mode of each sequence
        raise ValueError(f"{index} has {size:,} bytes, and by its header {expected:,}: it is truncated")
    if not sequences or documents < 2:
        raise ValueError("it holds no document")
    columns, place = [], HEADER.size
    for kind, count in ((np.int32, sequences), (np.int64, sequences), (np.int64, documents)):
        columns.append(np.memmap(index, kind, "r", place, (count,)))
        place += columns[-1].nbytes
    lengths, pointers, ends = columns
    corpus = Corpus(prefix, DTYPES[code], lengths, pointers, ends, None)
    if lengths.min() < 0:
        raise ValueError(f"{index} has a sequence of {lengths.min()} tokens: it is damaged. Copy it again")
    width, num_bytes = corpus.dtype().itemsize, content.stat().st_size
    tokens = int(lengths.sum(dtype=np.int64))
    if num_bytes != tokens * width:
        raise ValueError(f"{content} has {num_bytes:,} bytes, and {index} {tokens:,} tokens of {width} bytes")
    portions = (ends[place : place + PORTION + 1] for place in range(0, len(ends), PORTION))
    rises = ends[0] == 0 and ends[-1] == len(lengths) and all((part[1:] >= part[:-1]).all() for part in portions)
    if int(pointers[-1]) + int(lengths[-1]) * width != num_bytes or not rises:
        raise ValueError(f"{index} contradicts itself. Prepare the corpus again, or copy it again")
    return corpus


def read_card(prefix: str) -> Card | None:
    """PREFIX.json; None if it does not exist. Raises UserError: `zerofit prepare` did not write it."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        card = parse_json(path.read_text(encoding="utf-8"))
        return Card(**{field.name: card[field.name] for field in dataclasses.fields(Card)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of `zerofit prepare` ({type(error).__name__}). Rename it") from None


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of the vocabulary and of the token ids of a few texts: the same for a tokenizer however it is stored, and
    with or without added tokens, such as one for padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = set(getattr(tokenizer, "added_tokens_decoder", {}))
    vocabulary = backend.get_vocab(with_added_tokens=False) if backend is not None else tokenizer.get_vocab()
    digest = hashlib.sha256()
    for token, number in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        if number not in added:
            digest.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
    for text in PROBES:
        digest.update(repr(list(tokenizer(text)["input_ids"])).encode())
    return digest.hexdigest()
