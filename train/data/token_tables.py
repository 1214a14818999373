"""Tables of token ids: made once, in parallel, cached, and memory-mapped from then on."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value

from train.recipe.cache import made_by_this_launch
from train.recipe.errors import UserError

NO_TEXT = "the data holds no text: nothing to train on. Look at train_file and text_column"
IDS = List(Value("int32"))  # a column of token ids


def encode_table(
    dataset: Dataset,
    encode: Callable[[dict], dict],
    features: Features,
    key: tuple,
    cache: Path,
    workers: int | None = None,
    overwrite: bool = False,
    with_indices: bool = False,
) -> Dataset:
    """A new table, made by `encode` from batches of the old one's rows.

    It is stored in a file under `cache`, named after everything that it depends on, and memory-mapped.

    Args:
        key: what the result depends on beside the table, such as options and the tokenizer's fingerprint.
        with_indices: `encode` takes the indices of the rows as a second argument.
    """
    text = " ".join(map(str, (dataset._fingerprint, features, code_hash(), *key)))
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return dataset.map(
        encode,
        with_indices=with_indices,
        batched=True,
        batch_size=200,
        num_proc=workers,
        remove_columns=dataset.column_names,
        features=features,
        load_from_cache_file=not overwrite or made_by_this_launch(cache.glob(f"tokens-{name}*.arrow")),
        cache_file_name=str(cache / f"tokens-{name}.arrow"),
        new_fingerprint=name,
        desc="Tokenising",
    )


@functools.cache
def code_hash() -> str:
    """A hash of the code of train/data, so that tables of another version are not used."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def fingerprint(tokenizer) -> str:
    """A hash of everything that decides the token ids of a text; the same in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {rules}".encode()).hexdigest()


class Documents:
    """The token ids of all documents as one long row, read from the memory-mapped Arrow file.

    `offsets` (int64, documents + 1) is the start of each document. `column` is the column of ids to read.
    """

    def __init__(self, dataset: Dataset, column: str = "input_ids"):
        assert dataset._indices is None, "tokenized data is read in its stored order"
        self._chunks: list[np.ndarray] = []
        lengths = []
        for chunk in dataset.data.column(column).chunks:
            offsets = chunk.offsets.to_numpy()
            self._chunks.append(chunk.values.to_numpy(zero_copy_only=True)[offsets[0] : offsets[-1]])
            lengths.append(np.diff(offsets))
        lengths = np.concatenate([*lengths, np.zeros(0, np.int64)]).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._starts = np.concatenate([[0], np.cumsum([len(chunk) for chunk in self._chunks])]).astype(np.int64)
        if self.num_tokens == 0:
            raise UserError(NO_TEXT)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def row(self, index: int) -> np.ndarray:
        """The ids of one document, a copy (int64)."""
        return self.tokens(int(self.offsets[index]), int(self.offsets[index + 1]))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) of the long row, a copy (int64)."""
        out = np.empty(stop - start, dtype=np.int64)
        chunk = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begin = self._starts[chunk]
            end = min(stop, self._starts[chunk + 1])
            out[len(out) - (stop - start) :][: end - start] = self._chunks[chunk][start - begin : end - begin]
            start, chunk = end, chunk + 1
        return out
