"""Read files, a dataset of the hub or one made from Python's standard library into tables of records.

`stdlib-docstrings` (text, label): the package of a docstring, one of the NUM_PACKAGES with the most docstrings.
`stdlib-functions` (source, target): from a function's parameters and body, in words, to the words of its name.

About HELD_OUT_PERCENT of the top-level classes and functions are held out, with all they contain, chosen by a hash of
their names. Held-out records with the same words as a training record are skipped.
"""

import ast
import platform
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from glob import escape
from hashlib import sha256
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets, load_dataset, load_from_disk

from zerofit.data.delimited_files import (
    open_text,
    read_delimited,
    repeats_note,
    unique_names,
)
from zerofit.data.json_files import read_json_files
from zerofit.data.options import PREDICT, DataOptions
from zerofit.data.streaming import find_shards
from zerofit.data.tables import derive_table_key, stored_table, texts_of, with_class_names, write_table
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import COMPRESSED, counted, format_suffix
from zerofit.recipe.paths import FILE_OPTIONS, find_files
from zerofit.recipe.tasks import TaskRecipe

TEXT_EXTENSIONS = (
    ".txt .text .md .rst .tokens .tex .html .htm .py .c .h .cc .cpp .hpp .cs .go .java .js .ts .kt .php .r .rb "
    ".rs .scala .sh .sql .swift"
).split()
FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".xlsx": "xlsx",
    ".parquet": "parquet",
    ".conll": "conll",
    **dict.fromkeys(TEXT_EXTENSIONS, "text"),
}
FORMATS_OF_OPTION = {  # option: the formats that have it
    "encoding": ("json", "csv", "tsv", "text", "conll"),
    "delimiter": ("csv", "tsv"),
    "field": ("json",),
}
CONLL_COMMENT = re.compile(r"#\s*(id\s|(newdoc|newpar)\b|[\w.:]+\s*=)")  # in CoNLL-U, MultiCoNER; "# O" is a word
ENTITY_TAG = re.compile("O|[BIESLU]-.+")
CONLL_DOCUMENT = "-DOCSTART-"  # the first word of a line between documents of a .conll file
CONLL_BLANKS = " \t\r"  # no others: a tweet has U+00A0 and U+2028 as words
STDLIB_DATASETS = ("stdlib-docstrings", "stdlib-functions")  # the data sets made from Python's standard library
NUM_PACKAGES = 12  # the packages of Python's library with the most docstrings
HELD_OUT_PERCENT = 12  # percent of Python's library
MIN_WORDS = 3  # shorter docstrings are not informative: "Constructor.", "See above."
MIN_WORDS_OF_CODE = 6  # shorter functions say nothing: "def this self pass"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
PACKAGE_MASK = "..."  # replaces the names of packages in docstrings
FUNCTION_MASK = "this"  # replaces the name of a function in its code
DEFINITION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STDLIB_FEATURES = Features({name: Value("string") for name in ("package", "top", "name", "text", "code")})
SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")  # in a folder that save_to_disk has written
HELD_OUT_SPLITS = ("validation", "valid", "val", "dev")  # names of the held-out part in data sets of the hub


def read_table(
    paths: list[Path], kind: str, data: DataOptions, unit: str, header: tuple[str, ...]
) -> tuple[Dataset, list[str]]:
    """Return (the records of files of one format, notes on how they were read), from the cache if possible. Raises
    UserError: a file is not UTF-8, not in the encoding that is named, or not of its format. `unit`: of text files,
    which is a record: line, paragraph, file, or what stands between two marks of this text. `header`: names of the
    columns of .csv and .tsv files without a header."""
    recipe = data.recipe
    for option, kinds in FORMATS_OF_OPTION.items():
        if (value := getattr(recipe, option)) and kind not in kinds:
            raise UserError(f"{option} = {value!r}: no effect on {paths[0]}, a .{kind} file. Remove it")
    if kind == "parquet":
        try:
            return _read_parquet(paths, data.hub_cache), []
        except UserError:
            raise
        except Exception as error:  # the library raises a dozen types
            cause = " ".join(str(error.__cause__ or error).split())[:400]
            raise UserError(f"{paths[0]} cannot be read as parquet: {cause}") from None
    makers: dict[str, Callable[[Path], list[str]]] = {
        "json": partial(read_json_files, paths, data),
        "xlsx": partial(_read_excel, paths),
        "conll": partial(_read_conll, paths, recipe.encoding),
        "text": partial(_read_texts, paths, recipe.encoding, unit),
    }
    make = makers.get(kind) or partial(read_delimited, paths, data, header)
    key = (recipe.encoding, recipe.separator, recipe.field, data.skip_bad_records, recipe.allow_data_loss)
    return stored_table(paths, data.cache, make, kind, *key, unit, header)


def _read_parquet(paths: list[Path], cache: str | None) -> Dataset:
    """Read the records of parquet files. Files with different columns, types or class names are read one by one; a
    value that a file does not have is null."""
    metadata = {path: pq.read_metadata(path) for path in paths}
    if empty := [path for path in paths if not metadata[path].num_rows]:
        raise UserError(f"{empty[0]} has no record")
    groups = groupby(paths, lambda path: Features.from_arrow_schema(metadata[path].schema.to_arrow_schema()))
    files = ([escape(str(path)) for path in group] for _, group in groups)
    tables = [load_dataset("parquet", data_files=names, split="train", cache_dir=cache) for names in files]
    if len(tables) == 1:
        return tables[0]
    tables = [with_class_names(table, [other.features for other in tables]) for table in tables]
    kinds: dict[str, Any] = {}
    for name, feature in chain.from_iterable(table.features.items() for table in tables):
        features = (kinds.get(name, feature), feature)
        schemas = [Features({"": each}).arrow_schema.remove_metadata() for each in features]
        try:
            unified = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowTypeError:  # one has texts and the other numbers
            kinds[name] = Value("string")
        else:
            equal = (each for each, schema in zip(features, schemas) if schema == unified)
            kinds[name] = next(equal, Features.from_arrow_schema(unified)[""])
    return concatenate_datasets(
        [table.cast(Features({name: kinds[name] for name in table.features})) for table in tables]
    )


def _read_texts(paths: list[Path], encoding: str | None, unit: str, place: Path) -> list[str]:
    """Write the lines, paragraphs, whole texts, or texts between marks of files as a table. Returns a note if there is
    no mark."""
    num_marks = 0

    def texts() -> Iterator[str]:
        nonlocal num_marks
        for path in paths:
            with open_text(path, encoding) as file:
                if unit == "line":
                    yield from (line.removesuffix("\n") for line in file)
                elif unit == "paragraph":
                    yield from filter(None, file.read().split("\n\n"))
                elif unit == "file":
                    yield file.read()
                else:
                    pieces = file.read().split(unit)
                    num_marks += len(pieces) - 1
                    yield from (piece.strip("\n") for piece in pieces if piece.strip())

    write_table(({"text": text} for text in texts()), texts_of(["text"]), place)
    if num_marks or unit in ("line", "paragraph", "file"):
        return []
    other_files = " or the other files" if len(paths) > 1 else ""
    return [f"note      {unit!r} is not in {paths[0]}{other_files}: a file is one document"]


def _read_excel(paths: list[Path], place: Path) -> list[str]:
    """Write the first sheets of Excel files as one table, all values as texts, without empty rows. Returns notes on
    the other sheets, on columns of one name and on cells that hold an error."""
    columns: dict[str, None] = {}
    records: list[dict[str, str]] = []
    notes: list[str] = []
    for path in paths:
        try:
            with pd.ExcelFile(path, engine="openpyxl") as book:
                sheet = book.parse(header=None, dtype=str, keep_default_na=False)
                first, *others = book.sheet_names
        except ImportError:
            raise UserError(f"{path}: pip install openpyxl, or save it as .csv (UTF-8)") from None
        except (ValueError, KeyError, OSError, BadZipFile) as error:
            raise UserError(f"{path} cannot be read as .xlsx: {first_line(error)}") from None
        header, *rows = [row for row in sheet.fillna("").to_numpy().tolist() if any(row)] or [[]]
        if not rows:
            raise UserError(f"{path} has a header ({', '.join(header)}) and no record")
        records += [dict(zip(unique_names(header), row)) for row in rows]
        columns |= dict.fromkeys(unique_names(header))
        names = ", ".join(map(repr, others))
        notes += [f"note      {path}: sheet {first!r} is read; to read {names}, save it as .csv"] if others else []
        notes += repeats_note(path, header)
        if errors := int(sheet.isna().to_numpy().sum()):
            notes.append(f"note      {path}: {counted(errors, 'cell')} with an error (such as #N/A) read as empty")
    write_table(records, texts_of(columns), place)
    return notes


def _read_conll(paths: list[Path], encoding: str | None, place: Path) -> list[str]:
    """Write the sentences of .conll files as a table. Returns no notes."""
    records: list[dict[str, Any]] = []
    for path in paths:
        with open_text(path, encoding) as file:
            records += read_sentences(file, path)
    names = dict.fromkeys(chain.from_iterable(records))
    write_table(iter(records), Features({name: List(Value("string")) for name in names}), place)
    return []


def read_sentences(lines: Iterable[str], path: Path) -> Iterator[dict[str, list[str]]]:
    """Yield sentences of tagged words as records: `tokens` is the first column, `tags` the last; no tags if there is
    only one column.

    As in CoNLL-2003 there is a word a line, and an empty line between sentences. A tab separates columns where a line
    has one, else blanks do. Comments before a sentence, such as `# sent_id = 1`, are left out. Raises UserError: a
    word or a tag is empty; a line has another number of columns than the first one; there is no sentence.
    """
    num_columns = 0
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate(chain(lines, [""]), 1):
        line = line.removesuffix("\n")
        if not words and CONLL_COMMENT.match(line):
            continue
        plain = [field for field in line.strip(CONLL_BLANKS).split(" ") if field]
        columns = [field.strip(CONLL_BLANKS) for field in line.split("\t")] if "\t" in line else plain
        if not any(columns) or columns[0] == CONLL_DOCUMENT:
            if num_columns > 4 and words == [*map(str, range(1, len(words) + 1))] and len(words) > 1:
                problem = "the first column has the numbers of words, as in CoNLL-U"
                raise UserError(f"{path}, line {number}: {problem}. Keep the columns of words and of tags")
            are_tags = [all(map(ENTITY_TAG.fullmatch, column)) for column in (words, tags)]
            if are_tags == [True, False] and any("-" in word for word in words):  # the MIT corpora of films
                problem = f"the first column has the tags ({words[-1]} of {tags[-1]})"
                raise UserError(f"{path}, line {number}: {problem}. Write the word first, and its tag last")
            if words:
                yield {"tokens": words, "tags": tags} if tags else {"tokens": words}
            words = []
            tags = []
            continue
        num_columns = num_columns or len(columns)
        if not (columns[0] and columns[-1]):
            raise UserError(f"{path}, line {number}: {line.strip()!r} is not a word and, in the last column, its tag")
        if len(columns) != num_columns:
            raise UserError(f"{path}, line {number}: {len(columns)} columns, and {num_columns} in the lines before it")
        words.append(columns[0])
        if num_columns > 1:
            tags.append(columns[-1])
    if not num_columns:
        raise UserError(f"{path} has no sentence")


def read_stdlib(name: str, cache: Path) -> dict[str, Dataset]:
    """Return the training and the held-out part of one of STDLIB_DATASETS, read in seconds, or from the cache."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]

    def parse(place: Path) -> list[str]:
        entries = (entry for path in files for entry in read_definitions(path, path.relative_to(root)))
        write_table(entries, STDLIB_FEATURES, place)
        return []

    table, _ = stored_table(files, cache, parse, platform.python_version())
    entries = table.to_list()
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for record in _docstrings(entries) if name == "stdlib-docstrings" else _functions(entries):
        if len(record["says"]) >= MIN_WORDS:
            (held_out if _hash_number(record["top"]) % 100 < HELD_OUT_PERCENT else train).append(record)
    trained = {record["says"] for record in train}
    held_out = [record for record in held_out if record["says"] not in trained]
    # Shuffled, so that the first ones (max_eval_samples) are like the others.
    held_out.sort(key=lambda record: _hash_number(" ".join(record["says"])))
    parts = {"train": train, "validation": held_out}
    return {part: Dataset.from_list(rows).remove_columns(["top", "says"]) for part, rows in parts.items()}


def read_definitions(path: Path, file: Path) -> Iterator[dict[str, str]]:
    """Yield the definitions in a file: functions and methods; classes and the module itself if they have a docstring.

    Each is {package: empty for a module outside of any, top: the file and the top-level definition that contains it,
    name, text: the docstring, code: of a function, without docstring, comments and decorators; else empty}. Files that
    this Python cannot parse give none: some of the library are templates, or have deliberate errors.
    """
    try:
        with tokenize.open(path) as source:
            module = ast.parse(source.read())
    except (SyntaxError, UnicodeDecodeError):
        return
    package = file.parts[0] if len(file.parts) > 1 else ""
    for top in [module, *module.body]:
        for node in [module] if top is module else ast.walk(top):
            if not isinstance(node, (ast.Module, *DEFINITION_NODES)):
                continue
            # it may stand in an `if` or a `try`
            named = getattr(top, "name", "")
            name = getattr(node, "name", "")
            text = ast.get_docstring(node) or ""
            code = _code(node)
            if text or code:
                yield {"package": package, "top": f"{file}:{named}", "name": name, "text": text, "code": code}


def _code(node: ast.AST) -> str:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    name = node.name
    node.name = FUNCTION_MASK
    node.decorator_list = []
    return re.sub(rf"\b{re.escape(name)}\b", FUNCTION_MASK, ast.unparse(node))


def _docstrings(entries: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the records of stdlib-docstrings: none that two packages share, and with masked names of packages."""
    entries = [entry for entry in entries if entry["package"] and entry["text"]]
    counts = Counter(entry["package"] for entry in entries)
    packages = sorted(counts, key=lambda package: (-counts[package], package))[:NUM_PACKAGES]
    package_name = re.compile("|".join(sorted(map(re.escape, packages), key=len, reverse=True)), re.IGNORECASE)
    records: list[dict[str, Any]] = []
    packages_of_words: dict[tuple[str, ...], set[str]] = {}
    for entry in entries:
        if entry["package"] in packages:
            text = package_name.sub(PACKAGE_MASK, entry["text"])
            packages_of_words.setdefault(_letters_only(text), set()).add(entry["package"])
            records.append({"text": text, "label": entry["package"], "top": entry["top"], "says": _letters_only(text)})
    return [record for record in records if len(packages_of_words[record["says"]]) == 1]


def _functions(entries: list[dict[str, str]]) -> list[dict[str, Any]]:
    records = []
    for entry in entries:
        source = split_code(entry["code"]) if entry["code"] else ""
        if len(source.split()) >= MIN_WORDS_OF_CODE:
            target = split_code(entry["name"])
            records.append({"source": source, "target": target, "top": entry["top"], "says": _letters_only(source)})
    return records


def split_code(code: str) -> str:
    """Return the words of code, with names split: `def getSize(self, depth=3)` is "def get size self depth 3"."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", code.replace("_", " "))
    return " ".join(re.findall(r"[A-Za-z]+|[0-9]+", apart)).lower() or code


def _hash_number(text: str) -> int:
    """Return a pseudo-random number for a text, the same on every machine."""
    return int(sha256(text.encode()).hexdigest(), 16)


def _letters_only(text: str) -> tuple[str, ...]:
    """Return the words of a text, to compare two texts: letters only, in lower case."""
    return tuple(re.findall(r"[a-z]+", text.lower()))


@dataclass
class Source:
    """The data that was read: `train` and the held-out parts.

    Without training there is `train` only if the held-out part must still be split off from it. For predict_file there
    is only PREDICT.
    """

    parts: dict[str, Dataset]
    files: dict[str, list[Path]]  # part: its files; empty if no option names files
    name: str = ""  # the data's name in messages, if they have no file
    notes: list[str] = field(default_factory=list)  # how files were read
    written: dict[str, str] = field(default_factory=dict)  # {column in lower case: as the file has it}

    @property
    def first(self) -> Dataset:
        """Return the table of the first part, whose columns are examined."""
        return next(iter(self.parts.values()))

    def names(self, columns: Iterable[str]) -> list[str]:
        """Return the names of columns as they are in the file, for the log."""
        return [self.written.get(column, column) for column in columns]

    def describe(self, reader: Any) -> str:
        """Describe the columns of a reader by their names in the file."""
        lists = {key: tuple(self.names(value)) for key, value in vars(reader).items() if isinstance(value, tuple)}
        single = {key: self.written[value] for key, value in vars(reader).items() if value in self.written}
        return replace(reader, **lists, **single).describe

    def where(self, part: str) -> str:
        """Return the name of a part for messages. Records are numbered through all of its files."""
        files = self.files.get(part)
        if not files:
            return self.name or f"the {part} split"
        return str(files[0]) + (
            f" and {counted(len(files) - 1, 'more file')}, counted as one" if len(files) > 1 else ""
        )


def read_source(
    data: DataOptions,
    held_out: dict[str, tuple[str, ...]] | None = None,  # the held-out parts, each with its possible names on the hub
    unit_of: Callable[[list[Path]], str] | None = None,
    header: tuple[str, ...] = (),  # names of the columns of .csv and .tsv files without a header
) -> Source:
    """Read files, or a data set of the hub. Raises UserError: a file is missing, empty, not UTF-8 or not of its
    format; the hub cannot be reached. `unit_of`: for text files: returns which part of them is a record, see
    `read_table`. Without it text files are refused."""
    held_out = {PREDICT: ()} if PREDICT in data.patterns else held_out or {"validation": HELD_OUT_SPLITS}
    files = {
        part: find_files(f"{part}_file", data.patterns[part]) for part in ("train", *held_out) if part in data.patterns
    }
    if not files:
        parts, notes = _from_hub(data, held_out)
        if not data.trains and len(parts) > 1:
            parts.pop("train", None)
        return lower_column_names(Source(parts, {}, notes=notes), data)
    all_files = list(chain.from_iterable(files.values()))
    kinds: dict[str, Path] = {}
    unit = ""
    for path in all_files:
        if (ending := format_suffix(path)) not in FORMATS:
            known_formats = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSED)}"
            raise UserError(f"{path}: unknown file extension; known are {known_formats}")
        kinds.setdefault(FORMATS[ending], path)
    if len(kinds) > 1:
        formats = ", ".join(f"{path} is {kind}" for kind, path in sorted(kinds.items()))
        raise UserError(f"files of several formats: {formats}. Use one format for all")
    kind = next(iter(kinds))
    if kind == "text":
        if unit_of is None:
            expected = f"this task reads records: {', '.join(name for name in FORMATS if FORMATS[name] != 'text')}"
            raise UserError(f"{next(iter(files))}_file = {all_files[0]}: {expected}")
        unit = unit_of(all_files)
    parts = {}
    notes = []
    for part, paths in files.items():
        parts[part], part_notes = read_table(paths, kind, data, unit, header)
        notes += part_notes
    return lower_column_names(Source(parts, files, notes=notes), data)


def lower_column_names(source: Source, data: DataOptions) -> Source:
    """Return the source with lower-case column names, so that `Text` is found as `text`. Columns that an option names
    keep their names (as do those of GLUE's original files)."""
    if not data.lowercases:
        return source
    parts = source.parts
    option_values = [value for name, value in data.recipe.to_dict().items() if name.endswith(("_column", "_columns"))]
    fixed = {name for value in option_values if value for name in ([value] if isinstance(value, str) else value)}
    for part, table in parts.items():
        lower = {name: name.strip().lower() for name in table.column_names if name not in fixed}
        new_names = [*lower.values(), *(name for name in table.column_names if name in fixed)]
        changed = {
            name: lowered for name, lowered in lower.items() if name != lowered and new_names.count(lowered) == 1
        }
        ambiguous = [name for name, lowered in lower.items() if new_names.count(lowered) > 1]
        if ambiguous and all(table.data.column(name).null_count for name in ambiguous):
            raise UserError(
                f"{source.where(part)}: the columns {', '.join(ambiguous)} differ in upper and lower case alone, and "
                "some records have one and some the other. Give them one name"
            )
        if changed:
            source.written |= {lowered: name for name, lowered in changed.items()}
            parts[part] = derive_table_key(table.rename_columns(changed), table)
    return source


def _from_hub(data: DataOptions, held_out: dict[str, tuple[str, ...]]) -> tuple[dict[str, Dataset], list[str]]:
    """Return (the splits that are used, a note about the others)."""
    name = data.recipe.dataset_name or ""
    config = data.recipe.dataset_config_name
    folder = Path(name).expanduser()
    if name in STDLIB_DATASETS:
        return read_stdlib(name, data.cache), []
    try:
        if any((folder / file).is_file() for file in SAVED_DATASET_FILES):
            saved = load_from_disk(str(folder))
            dataset = saved if isinstance(saved, DatasetDict) else DatasetDict({"train": saved})
        else:
            dataset = load_dataset(name, config, cache_dir=data.hub_cache)
            first = next(iter(dataset.values()))
            if first.info.builder_name == "csv" and all(isinstance(kind, Value) for kind in first.features.values()):
                texts = texts_of(first.column_names)  # texts as written: 0110 is not a number
                dataset = load_dataset(name, config, cache_dir=data.hub_cache, features=texts, keep_default_na=False)
    except Exception as error:  # the library raises a dozen types, from ConnectionError to DatasetNotFoundError
        raise UserError(
            f"dataset_name = {name!r}: {first_line(error.__cause__ or error)}. Or name files with train_file"
        ) from None
    assert isinstance(dataset, DatasetDict)
    known_splits = {"train", *(name for names in held_out.values() if not data.trains for name in names)}
    if not known_splits & set(dataset):
        available = f"it has {', '.join(dataset)}. Name the files of one with train_file"
        raise UserError(f"dataset_name = {name!r} has no split `train`; {available}")
    names = {"train": ("train",), **held_out}
    splits = {part: split for part, known_splits in names.items() for split in known_splits[::-1] if split in dataset}
    notes = []
    if unused_splits := ", ".join(split for split in dataset if split not in splits.values()):
        notes = [f"note      splits of {name} that are read: {', '.join(splits.values())}; not read: {unused_splits}"]
    return {part: dataset[split] for part, split in splits.items()}, notes


def files_and_sizes(recipe: TaskRecipe) -> dict[str, str]:
    """Return {option that names data: the number of its files, their bytes, and a hash of their names and sizes}."""
    files_of_option = {option: getattr(recipe, option, None) for option in FILE_OPTIONS}
    summaries = {}
    if recipe.trains and getattr(recipe, "streaming", None):
        shards = find_shards(tuple(files_of_option.pop("train_file") or ()))
        summaries["train_file"] = f"{len(shards.names):,} shards of {sum(shards.sizes):,} bytes ({shards.key})"
    files = {option: find_files(option, patterns) for option, patterns in files_of_option.items() if patterns}
    corpora = [Path(prefix + ending) for _, prefix in getattr(recipe, "blend", []) for ending in (".bin", ".idx")]
    for option, paths in {**files, **({"data_path": corpora} if corpora else {})}.items():
        sizes = [(path.name, path.stat().st_size) for path in paths]
        digest = sha256(repr(sizes).encode()).hexdigest()[:8]
        summaries[option] = f"{len(sizes):,} of {sum(size for _, size in sizes):,} bytes (names and sizes: {digest})"
    return summaries
