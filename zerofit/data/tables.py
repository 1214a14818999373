"""The columns of tables of records, their split into training and held-out parts, and the cache of encoded tables."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.utils import disable_progress_bars
from datasets.utils.logging import CRITICAL, set_verbosity
from filelock import FileLock

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file, digest_of_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT_SEED = 0  # the held-out part stays the same when the run's seed changes
NUMBER_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
NUM_CHECKED_RECORDS = 1000  # records that are read to decide whether a column holds numbers
SENTENCE_MARKS = "。、\uff01\uff1f"  # the last two are the full-width ! and ?
ROWS_PER_WRITE = 200
STRING_DTYPES = ("string", "large_string", "string_view")  # the types of texts in Arrow
TOKEN_IDS = List(Value("int32"))  # a column of token ids
Columns = dict[str, list[Any]]  # {name: values of some rows}
ColumnGroup = TypeVar("ColumnGroup", str, tuple[str, ...])
Records = TypeVar("Records", bound=Any)  # a Dataset, or what has its length and its selection of rows


def first_records(records: Records, limit: int | None) -> Records:
    """Return the first `limit` records; all without a limit."""
    return records if limit is None or limit >= len(records) else select(records, range(limit))


def random_split(records: Records, fraction: float) -> tuple[Records, Records]:
    """Return (training, held-out) records, drawn at random with a fixed seed; each part keeps the order of the
    records. Raises UserError: one part would be empty."""
    shuffled = np.random.default_rng(SPLIT_SEED).permutation(len(records))
    num_held_out = max(1, round(fraction * len(records)))
    if num_held_out >= len(records):
        raise empty_split(fraction, len(records))
    return select(records, np.sort(shuffled[num_held_out:])), select(records, np.sort(shuffled[:num_held_out]))


def empty_split(fraction: float, count: int) -> UserError:
    return UserError(
        f"validation_split_percentage = {100 * fraction:g} leaves no sample on one side ({count:,} records). "
        "Choose another, a validation_file, or 0"
    )


def text_columns(dataset: Dataset) -> list[str]:
    return [name for name, feature in dataset.features.items() if getattr(feature, "dtype", "") in STRING_DTYPES]


def word_columns(dataset: Dataset) -> list[str]:
    """Return the columns of text that hold words: in a .csv file numbers are texts, too. If no column holds words,
    return all columns of text."""
    texts = text_columns(dataset)
    worded = []
    for name in texts:
        written = [text.strip().lower() for text in dataset[name][:NUM_CHECKED_RECORDS] if text and text.strip()]
        if not written or not all(NUMBER_TEXT.fullmatch(text) or text in ("true", "false") for text in written):
            worded.append(name)
    return worded or texts


def match_columns(forms: Iterable[ColumnGroup], present: Iterable[str]) -> ColumnGroup | None:
    """Return the first of these column names, or groups of names, that is present."""
    names = set(present)
    return next((form for form in forms if names.issuperset([form] if isinstance(form, str) else form)), None)


def text_of(value: Any) -> str:
    """Return a value as text: a text unchanged, 3 and 3.0 as "3"."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


def holds_lists(feature: Any) -> bool:
    return isinstance(feature, list) or hasattr(feature, "feature")


def may_hold_turns(feature: Any) -> bool:
    """Return whether a column of this feature holds lists, or objects of lists, as which the datasets library stores
    lists of objects."""
    return holds_lists(feature) or (isinstance(feature, dict) and all(map(holds_lists, feature.values())))


def holds_values(dataset: Dataset, name: str) -> bool:
    """Return whether a column holds texts, numbers or true and false."""
    dtype = getattr(dataset.features[name], "dtype", "")
    return dtype == "bool" or dtype.endswith("string") or dtype.startswith(("int", "uint", "float"))


def class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of class numbers, if a column or its lists have class numbers."""
    return tuple(getattr(getattr(feature, "feature", feature), "names", None) or ()) or None


def with_class_names(table: Dataset, others: Iterable[Features]) -> Dataset:
    """Return the table with class names instead of numbers, in columns in which another table has texts or other
    names."""
    named = {
        name: dict(enumerate(names))
        for name, feature in chain.from_iterable(each.items() for each in others)
        if (names := class_names(table.features.get(name))) not in (None, class_names(feature))
        and (class_names(feature) or getattr(getattr(feature, "feature", feature), "dtype", "").endswith("string"))
    }
    if not named:
        return table
    features = table.features.copy()
    features |= {name: List(Value("string")) if holds_lists(features[name]) else Value("string") for name in named}

    def name_of(value: Any, names: dict[int, str]) -> Any:
        return [name_of(item, names) for item in value] if isinstance(value, list) else names.get(value)

    new = table.map(
        lambda *values: dict(zip(named, map(name_of, values, named.values()))),
        input_columns=[*named],
        features=features,
        desc="Naming classes",
    )
    return derive_table_key(new, table, named)


def looks_like_value(name: str) -> bool:
    """Return whether the name of a column looks like a value: a sentence or a number."""
    text = name.strip()
    is_sentence = (
        len(text) > 60
        or text.count(" ") > 4
        or text.endswith((".", "!", "?"))
        or any(mark in text for mark in SENTENCE_MARKS)
    )
    return is_sentence or text.replace(".", "", 1).isdigit()


def list_columns(dataset: Dataset) -> str:
    names = dataset.column_names
    inside = [
        name for name, kind in dataset.features.items() if isinstance(kind, List) and isinstance(kind.feature, dict)
    ]
    hint = ""
    if any(map(looks_like_value, names)):
        hint = " (is the first line a record? A line of names must be before it)"
    elif len(names) == 1 and ("  " in names[0] or ":" in names[0]):
        hint = f" (what separates the fields of {names[0]!r}? Name it with --delimiter)"
    elif len(dataset) == 1 and inside:
        hint = f" (are the records under a key of the .json? Say --field {inside[0]})"
    return f"the columns are {', '.join(names)}{hint}"


def input_columns(dataset: Dataset, *reserved: str) -> Dataset:
    """Return the table for predictions.jsonl: columns with one of the names `reserved` become input_NAME."""
    names = set(dataset.column_names)
    renamed = {}
    for name in names.intersection(reserved):
        new_name = f"input_{name}"
        while new_name in names:  # predictions of predictions
            new_name = f"input_{new_name}"
        renamed[name] = new_name
        names.add(new_name)
    return dataset.rename_columns(renamed)


def check_column(dataset: Dataset, option: str, name: str | None, holds: str = "") -> None:
    """Check the column that an option names; None passes. Raises UserError: there is no such column, or it holds
    something else. `holds`: "text", "text or number" or "list of turns", if the column must hold it."""
    if name is None:
        return
    if name not in dataset.column_names:
        raise UserError(f"{option} = {name!r}: there is no such column; {list_columns(dataset)}")
    is_right = {
        "": True,
        "text": name in text_columns(dataset),
        "text or number": holds_values(dataset, name),
        "list of turns": may_hold_turns(dataset.features[name]),
    }
    if not is_right[holds]:
        raise UserError(f"{option} = {name!r} holds no {holds}; {list_columns(dataset)}")


def check_name(name: str, option: str) -> None:
    """Check a column that was chosen because it is the only one: in a .csv file without a header it is a record.
    Raises UserError: its name is a text."""
    if looks_like_value(name):
        raise UserError(f"the first line is not a name of a column: {name[:60]!r}. Add one, or say --{option}")


_TABLE_KEYS: WeakKeyDictionary[Dataset, str] = WeakKeyDictionary()  # cache keys of the tables in use


def set_table_key(dataset: Dataset, *words: object) -> Dataset:
    """Note the cache key of a table: a hash of everything that determines its rows (files, options, other tables).
    Returns the table. Without it `table_key` reads all rows."""
    _TABLE_KEYS[dataset] = sha256(" ".join(map(str, (dataset.column_names, *words))).encode()).hexdigest()[:32]
    return dataset


def derive_table_key(dataset: Dataset, origin: Dataset, *words: object) -> Dataset:
    """Note the cache key of a table that was made from `origin` in a way that `words` describe. Returns the table."""
    return set_table_key(dataset, table_key(origin), *words)


def select(records: Records, places: Sequence[int] | np.ndarray) -> Records:
    """Return the records at these places. The cache key of a selected table is noted."""
    chosen = records.select(places)
    if isinstance(records, Dataset):
        rows = np.asarray(places, dtype=np.int64)
        derive_table_key(chosen, records, "rows", sha256(rows.tobytes()).hexdigest())
    return chosen


def table_key(dataset: Dataset) -> str:
    """Return the cache key of a table, the same in every process and in every run on the same data: what was noted
    (see `set_table_key`), or a hash of the library's files on the disk, or of all rows of a table in memory."""
    if dataset not in _TABLE_KEYS:
        files = [Path(file["filename"]) for file in dataset.cache_files]
        if files and len(dataset) == len(dataset.data):  # all rows of the files, in their order
            stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
            set_table_key(dataset, dataset.split, len(dataset), stats)
        else:
            digest = sha256(repr(dataset.features).encode())
            for batch in dataset.iter(NUM_CHECKED_RECORDS):
                digest.update(repr(batch).encode())
            set_table_key(dataset, digest.hexdigest())
    return _TABLE_KEYS[dataset]


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a file lock: the first process does the work; the others wait, and then find the result in the cache.

    A file lock and no collective: no process group exists yet, so none can time out, however long tokenizing takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    set_verbosity(CRITICAL)  # its log repeats the exception, which has our own message
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        disable_progress_bars()
    with FileLock(folder / "prepare.lock"):
        yield


def stored_table(
    paths: Sequence[Path], folder: Path, make: Callable[[Path], list[str]], *words: object
) -> tuple[Dataset, list[str]]:
    """Return (the table of some files, notes about it), mapped from the disk. The first process makes it; other
    processes and later launches read it from the cache. `make`: writes the table to a path (see write_table), and
    returns the notes. `words`: what the table depends on besides the files."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = sha256(repr((stats, digest_of_code(Path(__file__).parent), *words)).encode()).hexdigest()[:32]
    place = folder / f"table-{name}.arrow"
    notes = folder / f"table-{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not (place.exists() and notes.exists()):
        lines = make(place)
        with atomic_file(notes) as file:
            json.dump(lines, file)
    return set_table_key(Dataset.from_file(str(place)), name), json.loads(notes.read_text(encoding="utf-8"))


def texts_of(columns: Iterable[str]) -> Features:
    return Features(dict.fromkeys(columns, Value("string")))


def write_table(
    records: Iterable[dict[str, Any]], stored: Features, place: Path, shown: Features | None = None
) -> None:
    """Write records to an Arrow file. `stored`: the columns as they are in the records. `shown`: the columns of the
    table, if it has texts of JSON as values; by default the same."""
    schema = (shown or stored).arrow_schema
    records = iter(records)
    with atomic_file(place, "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        while rows := list(islice(records, ROWS_PER_WRITE)):
            columns = {
                field.name: pa.array((row.get(field.name) for row in rows), field.type)
                for field in stored.arrow_schema
            }
            stream.write_table(pa.table(columns).cast(schema))


def encode_table(
    dataset: Dataset,
    encode: Callable[[Columns, list[int]], Columns],
    features: Features,
    key: tuple[object, ...],
    cache: Path,
) -> Dataset:
    """Return a new table, made by `encode` from batches of rows and their indices. It is stored in a file of the
    cache, named after everything that it depends on, and memory-mapped. `key`: what it depends on besides the table,
    such as options and the tokenizer's fingerprint."""
    code = digest_of_code(Path(__file__).parent)  # tables of another version are not used
    text = " ".join(map(str, (table_key(dataset), features, code, *key)))
    name = sha256(text.encode()).hexdigest()[:32]
    encoded = dataset.map(
        encode,
        with_indices=True,
        batched=True,
        batch_size=200,
        remove_columns=dataset.column_names,
        features=features,
        cache_file_name=str(cache / f"tokens-{name}.arrow"),
        new_fingerprint=name,
        desc="Tokenising",
    )
    return set_table_key(encoded, name)


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hash of everything that decides the token ids of a text; the same in every process."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return sha256(f"{type(tokenizer).__name__} {rules}".encode()).hexdigest()
