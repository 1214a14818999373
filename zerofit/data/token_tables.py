"""Tables of token ids: made once, in parallel, cached, and memory-mapped from then on."""

import functools
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from datasets import Dataset, Features, List, Value

from zerofit.recipe.cache import made_by_this_launch
from zerofit.recipe.errors import UserError, first_line

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
    encoded = partial(
        dataset.map,
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
