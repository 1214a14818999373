"""Tables of token ids: made once, in parallel, cached, and memory-mapped from then on."""

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from datasets import Dataset, Features, List, Value
from datasets.utils import disable_progress_bars
from datasets.utils.logging import CRITICAL, set_verbosity
from filelock import FileLock

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import is_shared

IDS = List(Value("int32"))  # a column of token ids


@dataclass(frozen=True)
class TableCache:
    """Where prepared tables are stored, and how they are made.

    Args:
        workers: processes that tokenize; None: the tokenizer's own threads.
        overwrite: whether this process may replace stored tables.
    """

    folder: Path
    workers: int | None = None
    overwrite: bool = False

    @classmethod
    def of(cls, folder: Path, workers: int | None, overwrite: bool) -> "TableCache":
        """The same, where of several processes only one may overwrite.

        On a local disk the first process of each machine replaces tables (see `made_by_this_launch`). On a shared file
        system only rank 0 does, since other machines may have mapped a file that a second process would replace.
        """
        return cls(folder, workers, overwrite and (_rank() == 0 or not is_shared(folder)))


def made_by_this_launch(files: Iterable[Path]) -> bool:
    """Whether one of these files is newer than the launcher of this machine's processes, made by one of them."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    launch_time = psutil.Process(os.getppid()).create_time()
    return any(file.stat().st_mtime >= launch_time for file in files)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a file lock: the first process does the work; the others wait, and then find the result in the cache.

    A file lock and no collective: no process group exists yet, so none can time out, however long tokenizing takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    set_verbosity(CRITICAL)  # what its errors log comes with the exception, which has our own message
    if _rank() != 0 or not sys.stderr.isatty():
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
    text = " ".join(map(str, (dataset._fingerprint, features, code_hash(), *key)))
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    encoded = partial(
        dataset.map,
        encode,
        with_indices=with_indices,
        batched=True,
        batch_size=200,
        num_proc=cache.workers,
        remove_columns=dataset.column_names,
        features=features,
        load_from_cache_file=not cache.overwrite or made_by_this_launch(cache.folder.glob(f"tokens-{name}*.arrow")),
        cache_file_name=str(cache.folder / f"tokens-{name}.arrow"),
        new_fingerprint=name,
        desc="Tokenising",
    )
    try:
        return encoded()
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the tokenizers library, which is no Exception
            raise
        raise UserError(
            f"the tokenizer fails on a text of the data: {first_line(error)}. Name another one with tokenizer_name"
        ) from None


@functools.cache
def code_hash() -> str:
    """A hash of the code of zerofit/data, so that tables of another version are not used."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def fingerprint(tokenizer) -> str:
    """A hash of everything that decides the token ids of a text; the same in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {rules}".encode()).hexdigest()
