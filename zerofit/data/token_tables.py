"""Tables of token ids: made once, in parallel, cached, and memory-mapped from then on."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset, Features, List, Value
from datasets.utils import disable_progress_bars
from datasets.utils.logging import CRITICAL, set_verbosity
from filelock import FileLock

from zerofit.recipe.places import digest_of_code

IDS = List(Value("int32"))  # a column of token ids


@dataclass(frozen=True)
class TableCache:
    """Where prepared tables are stored, and how they are made.

    Args:
        workers: processes that tokenize; None: the tokenizer's own threads.
    """

    folder: Path
    workers: int | None = None


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a file lock: the first process does the work; the others wait, and then find the result in the cache.

    A file lock and no collective: no process group exists yet, so none can time out, however long tokenizing takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    set_verbosity(CRITICAL)  # what its errors log comes with the exception, which has our own message
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        disable_progress_bars()
    with FileLock(folder / "prepare.lock"):
        yield


def encode_table(
    dataset: Dataset,
    encode: Callable[[dict], dict],
    features: Features,
    key: tuple,
    cache: TableCache,
    with_indices: bool = False,
) -> Dataset:
    """A new table, made by `encode` from batches of the old one's rows.

    It is stored in a file of the cache, named after everything that it depends on, and memory-mapped.

    Args:
        key: what the result depends on beside the table, such as options and the tokenizer's fingerprint.
        with_indices: `encode` takes the indices of the rows as a second argument.
    """
    code = digest_of_code(Path(__file__).parent)  # tables of another version are not used
    text = " ".join(map(str, (dataset._fingerprint, features, code, *key)))
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return dataset.map(
        encode,
        with_indices=with_indices,
        batched=True,
        batch_size=200,
        num_proc=cache.workers,
        remove_columns=dataset.column_names,
        features=features,
        cache_file_name=str(cache.folder / f"tokens-{name}.arrow"),
        new_fingerprint=name,
        desc="Tokenising",
    )


def fingerprint(tokenizer) -> str:
    """A hash of everything that decides the token ids of a text; the same in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {rules}".encode()).hexdigest()
