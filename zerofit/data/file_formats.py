"""The formats of data files, by their endings, and the tables that are made of them."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from glob import escape
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_dataset

from zerofit.data.delimited_files import read_delimited, repeats_note, unique_names
from zerofit.data.encodings import open_text
from zerofit.data.json_files import read_json
from zerofit.data.options import DataOptions
from zerofit.data.tables import stored_table, texts_of, with_class_names, write_table
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import PACKED, ending_of
from zerofit.recipe.parsing import counted

TEXTS = (
    ".txt .text .md .rst .tokens .tex .html .htm .py .c .h .cc .cpp .hpp .cs .go .java .js .ts .kt .php .r .rb "
    ".rs .scala .sh .sql .swift"
).split()
FORMATS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".xlsx": "xlsx",
    ".parquet": "parquet", ".conll": "conll", **dict.fromkeys(TEXTS, "text"),
}  # fmt: skip
OPTIONS = {  # that some formats have
    "encoding": ("json", "csv", "tsv", "text", "conll"),
    "delimiter": ("csv", "tsv"),
    "field": ("json",),
}
COMMENT = re.compile(r"#\s*(id\s|(newdoc|newpar)\b|[\w.:]+\s*=)")  # of CoNLL-U, MultiCoNER; "# O" is a word
ENTITY = re.compile("O|[BIESLU]-.+")
DOCUMENT = "-DOCSTART-"  # the first word of a line between documents of a .conll file
BLANKS = " \t\r"  # no others: a tweet has U+00A0 and U+2028 as words


def format_of(files: list[Path]) -> str:
    """The format of files, by their endings. Raises UserError for an unknown ending, or several formats."""
    kinds: dict[str, Path] = {}
    for path in files:
        if (ending := ending_of(path)) not in FORMATS:
            raise UserError(
                f"{path}: unknown file extension; known are {', '.join(FORMATS)}, each also {', '.join(PACKED)}"
            )
        kinds.setdefault(FORMATS[ending], path)
    if len(kinds) > 1:
        raise UserError(f"files of several formats in one option: {', '.join(sorted(kinds))}; use one")
    return next(iter(kinds))


def read_table(
    paths: list[Path], kind: str, data: DataOptions, unit: str, header: tuple[str, ...]
) -> tuple[Dataset, list[str]]:
    """Return (the records of files of one format, notes on how they were read), from the cache where they are in it.
    Raises UserError: a file is not UTF-8, not in the encoding that is named, or not of its format. `unit`: of text
    files, which is a record: line, paragraph, file, or what stands between two marks of this text. `header`: names of
    the columns of .csv and .tsv files without a header."""
    recipe = data.recipe
    for option, kinds in OPTIONS.items():
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
        "json": partial(read_json, paths, data),
        "xlsx": partial(_read_excel, paths),
        "conll": partial(_read_conll, paths, recipe.encoding),
        "text": partial(_read_texts, paths, recipe.encoding, unit),
    }
    make = makers.get(kind) or partial(read_delimited, paths, data, header)
    words = (recipe.encoding, recipe.separator, recipe.field, data.skip_bad_records, recipe.allow_data_loss)
    return stored_table(paths, data.cache, make, kind, *words, unit, header)


def _read_parquet(paths: list[Path], cache: str | None) -> Dataset:
    """The records of parquet files. Files with other columns, types of columns or names of classes are read one after
    another; a value that a file has not is null."""
    about = {path: pq.read_metadata(path) for path in paths}
    if empty := [path for path in paths if not about[path].num_rows]:
        raise UserError(f"{empty[0]} has no record")
    groups = groupby(paths, lambda path: Features.from_arrow_schema(about[path].schema.to_arrow_schema()))
    files = ([escape(str(path)) for path in group] for _, group in groups)
    tables = [load_dataset("parquet", data_files=names, split="train", cache_dir=cache) for names in files]
    if len(tables) == 1:
        return tables[0]
    tables = [with_class_names(table, [other.features for other in tables]) for table in tables]
    kinds: dict[str, Any] = {}
    for name, feature in chain.from_iterable(table.features.items() for table in tables):
        kinds[name] = _common(kinds.get(name, feature), feature)
    return concatenate_datasets(
        [table.cast(Features({name: kinds[name] for name in table.features})) for table in tables]
    )


def _common(one: Any, other: Any) -> Any:
    """The feature of a column that holds the values of both: texts, if one has texts and the other numbers."""
    schemas = [Features({"": each}).arrow_schema.remove_metadata() for each in (one, other)]
    try:
        both = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowTypeError:
        return Value("string")
    return next(
        (each for each, own in zip((one, other), schemas) if own == both), Features.from_arrow_schema(both)[""]
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
    others = " or the other files" if len(paths) > 1 else ""
    return [f"note      {unit!r} is not in {paths[0]}{others}: a file is one document"]


def _read_excel(paths: list[Path], place: Path) -> list[str]:
    """Write the first sheets of Excel files as one table, all values as texts, without empty rows. Returns notes on
    the other sheets, on columns of one name and on cells that hold an error."""
    columns, records, notes = dict[str, None](), list[dict[str, str]](), list[str]()
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
    records = list[dict[str, Any]]()
    for path in paths:
        with open_text(path, encoding) as file:
            records += sentences(file, path)
    names = dict.fromkeys(chain.from_iterable(records))
    write_table(iter(records), Features({name: List(Value("string")) for name in names}), place)
    return []


def sentences(lines: Iterable[str], path: Path) -> Iterator[dict[str, list[str]]]:
    """The sentences of tagged words as records: `tokens`, the first column, and `tags`, the last; no tags if there
    is only one.

    As in CoNLL-2003 there is a word a line, and an empty line between sentences. A tab separates columns where a line
    has one, else blanks do. Comments before a sentence, such as `# sent_id = 1`, are left out. Raises UserError: a
    word or a tag is empty; a line has another number of columns than the first one; there is no sentence.
    """
    num_columns, words, tags = 0, list[str](), list[str]()
    for number, line in enumerate(chain(lines, [""]), 1):
        line = line.removesuffix("\n")
        if not words and COMMENT.match(line):
            continue
        plain = [field for field in line.strip(BLANKS).split(" ") if field]
        columns = [field.strip(BLANKS) for field in line.split("\t")] if "\t" in line else plain
        if not any(columns) or columns[0] == DOCUMENT:
            if num_columns > 4 and words == [*map(str, range(1, len(words) + 1))] and len(words) > 1:
                what = "the first column has the numbers of words, as in CoNLL-U"
                raise UserError(f"{path}, line {number}: {what}. Keep the columns of words and of tags")
            are_tags = [all(map(ENTITY.fullmatch, column)) for column in (words, tags)]
            if are_tags == [True, False] and any("-" in word for word in words):  # as in the MIT corpora of films
                what = f"the first column has the tags ({words[-1]} of {tags[-1]})"
                raise UserError(f"{path}, line {number}: {what}. Write the word first, and its tag last")
            if words:
                yield {"tokens": words, "tags": tags} if tags else {"tokens": words}
            words, tags = [], []
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
