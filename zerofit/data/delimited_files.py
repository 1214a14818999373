"""Text files: their encoding, and the columns of .csv and .tsv."""

import codecs
import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import IO, Any

from zerofit.data.options import DataOptions
from zerofit.data.tables import texts_of, write_table
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import format_suffix, marked_encoding, open_bytes

CANDIDATE_ENCODINGS = (
    "cp932 euc_jp gb18030 cp950 cp949 cp1252 cp1250 iso8859_2 cp1254 cp1251 koi8_r cp1253 cp1255 cp1256 cp874"
).split()
SAMPLED_BYTES = 20_000  # number of bytes to guess from
CHAOS_TOLERANCE = 0.1  # in charset-normalizer's measure of chaos: other encodings may be this much worse
CHARACTERS_PER_READ = 1 << 20  # number of characters to convert at a time
MIN_UTF8_CHARACTERS = 20  # number of characters beyond ASCII that cannot be valid UTF-8 by chance
DELIMITERS = {".csv": ",", ".tsv": "\t"}  # file suffix: delimiter
OTHER_DELIMITERS = (",", ";", "\t", "|")  # delimiters that such files may also have
SEPARATOR_LINE = re.compile('"?sep=.?"?\r?\n')  # Excel's first line of a .csv file, which is not a header
NUM_HEAD_LINES = 1000  # lines of a file, read to find its delimiter
QUOTED_FIELD = r'(?<![^{0}\n])"(?:[^"]++|"")*+"(?![^{0}\n])'  # a quoted field; {0} is the delimiter
FIELD_MARK = "\0"  # replaces a quoted field
CsvOptions = dict[str, Any]  # the arguments of _csv_reader


@contextmanager
def open_text(path: Path, encoding: str | None = None, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a file, which may be compressed, to read text from its start; a byte-order mark is not part of it. Raises
    UserError: the file is in another encoding, or damaged. `encoding`: None: UTF-8, or what a byte-order mark stands
    for. `newline`: as in `open`."""
    encoding = encoding or bom_encoding(path)
    try:
        with open_bytes(path) as file:
            data = io.BytesIO(b"".join(as_utf8(file, encoding, path))) if encoding else file
            yield io.TextIOWrapper(data, encoding="utf-8-sig", newline=newline)
    except UnicodeDecodeError:
        with open_bytes(path) as file:
            content = file.read()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as decode_error:
            line = content.count(b"\n", 0, decode_error.start) + 1
            where = f"byte 0x{content[decode_error.start]:02x} at offset {decode_error.start} (line {line})"
            raise UserError(f"{path} is not UTF-8: {where}. {propose_encodings(content)}") from None
        raise


def propose_encodings(data: bytes) -> str:
    """Return a sentence for a message that names the likely encodings of a text that is not UTF-8."""
    if names := likely_encodings(data):
        return f"Name its encoding, the most likely first: --encoding {' or '.join(names)}"
    return "No known encoding decodes it as text. If you know the encoding, name it with --encoding"


def bom_encoding(path: Path) -> str | None:
    """Return the encoding that the byte-order mark of a file, which may be compressed, stands for; or None. Raises
    UserError: the file has no mark and begins as UTF-16 does."""
    with open_bytes(path) as file:
        start = file.read(SAMPLED_BYTES)
    marked = marked_encoding(start)
    if not marked and b"\0" in start[:2]:
        raise UserError(f"{path} is not UTF-8: its first character has a zero byte. {propose_encodings(start)}")
    return marked


def likely_encodings(data: bytes) -> list[str]:
    """Return up to three possible encodings of a text, the most likely first; empty if none decodes it as text."""
    from charset_normalizer import from_bytes

    marked = marked_encoding(data)
    if marked or b"\0" in data:
        big_endian = data[:SAMPLED_BYTES:2].count(0) > data[1:SAMPLED_BYTES:2].count(0)  # ASCII's zero bytes lead
        name = marked or ("utf-16-be" if big_endian else "utf-16-le")
        return [name] if _decoded(data, name) else []
    lines = b"\n".join(line for line in data.splitlines() if not line.isascii())[:SAMPLED_BYTES]
    matches = list(from_bytes(lines, cp_isolation=list(CANDIDATE_ENCODINGS), threshold=0.4))
    best = min((match.chaos for match in matches), default=0.0)
    names = [
        name for match in matches if match.chaos <= best + CHAOS_TOLERANCE for name in match.could_be_from_charset
    ]
    texts: dict[str, str] = {}
    for name in sorted(set(names) & set(CANDIDATE_ENCODINGS), key=CANDIDATE_ENCODINGS.index):
        if text := _decoded(data, name):
            texts.setdefault(text, name)
    return list(texts.values())[:3]


def _decoded(data: bytes, name: str) -> str | None:
    """Return the decoded text; None if it is not in that encoding. With UTF-16 and -32, data may end anywhere."""
    try:
        return codecs.getincrementaldecoder(name)().decode(data, final=not name.startswith("utf"))
    except UnicodeDecodeError:
        return None


def as_utf8(file: IO[bytes], encoding: str, path: Path) -> Iterator[bytes]:
    """Convert a file in another encoding to UTF-8, portion by portion. Raises UserError: the file is not in that
    encoding; or it is UTF-8, which that encoding would decode wrongly."""
    reader = io.TextIOWrapper(file, encoding=encoding, newline="")
    lines = 1
    try:
        while text := reader.read(CHARACTERS_PER_READ):
            utf8_text = text
            with suppress(UnicodeError):
                utf8_text = text.encode(encoding).decode("utf-8")
            if utf8_text != text and sum(not character.isascii() for character in utf8_text) >= MIN_UTF8_CHARACTERS:
                raise UserError(f"encoding = {encoding!r}: {path} is UTF-8 (line {lines}). Say --encoding utf-8")
            yield (text.lstrip("\ufeff") if lines == 1 else text).encode("utf-8", "replace")
            lines += text.count("\n")
    except UnicodeError:
        raise UserError(f"encoding = {encoding!r}: {path} is not in it (line {lines}). Name another") from None


def read_delimited(paths: list[Path], data: DataOptions, header: tuple[str, ...], place: Path) -> list[str]:
    """Write the records of .csv and .tsv files as one table to `place`. Returns notes. Raises UserError: a file has no
    record, or a record has more fields than the header. `header`: the names of the columns of files without a
    header."""
    notes: list[str] = []
    columns: dict[str, None] = {}
    records: list[Iterator[dict[str, str]]] = []
    for path in paths:
        options = _options(path, data, bool(header), notes)
        with _open_lines(path, data.recipe.encoding) as lines:
            names = list(header) or next(nonempty_rows(_csv_reader(lines, options)), [])
        columns |= dict.fromkeys(unique_names(names))
        records.append(_records(path, data.recipe.encoding, options, names, bool(header), notes=notes))
    write_table(chain.from_iterable(records), texts_of(columns), place)
    return notes


@contextmanager
def _open_lines(path: Path, encoding: str | None, newline: str | None = "") -> Iterator[Iterator[str]]:
    """Open a file, and yield an iterator over its lines, without the line in which Excel names the delimiter."""
    with open_text(path, encoding, newline) as file:
        first = file.readline()
        yield chain([] if SEPARATOR_LINE.match(first) else [first], file)


def _csv_reader(lines: Iterable[str], options: CsvOptions) -> Any:
    """Return a csv.reader of the lines. With the option `escaped` \\" in a field is read as \"\"."""
    options = {**options}
    if options.pop("escaped", False):
        lines = (line.replace('\\"', '""') for line in lines)
    return csv.reader(lines, **options)


def unique_names(names: list[str]) -> list[str]:
    """Return the names of the columns, made unique as pandas does."""
    numbers = [names[:place].count(name) for place, name in enumerate(names)]
    unique = [f"{name}.{number}" if number else name for name, number in zip(names, numbers)]
    return [unique[place] if name else f"Unnamed: {place}" for place, name in enumerate(names)]


def _records(
    path: Path, encoding: str | None, options: CsvOptions, names: list[str], is_headless: bool, *, notes: list[str]
) -> Iterator[dict[str, str]]:
    """Yield the records of a file. Adds notes on lines that are probably meant in another way, and their number. Lines
    that repeat the header, as `cat a.csv b.csv` makes them, are left out; in a table of one column such a line may be
    a text."""
    short_lines: list[int] = []
    header_lines: list[int] = []
    blank_lines: list[int] = []
    count = 0
    columns = unique_names(names)
    with _open_lines(path, encoding) as lines:
        rows = _csv_reader(lines, options)
        for number, fields in enumerate(nonempty_rows(rows, blank_lines), int(is_headless)):
            if number and len(fields) > len(names):
                raise UserError(
                    f"{path}, line {rows.line_num}: {len(fields)} fields, {len(names)} columns ({', '.join(names)}). "
                    "Quote texts, or set delimiter"
                )
            count += number > 0
            if number and len(names) > 1 and [fields[0].lstrip("\ufeff"), *fields[1:]] == names:
                header_lines.append(rows.line_num)
            elif number:
                short_lines += [rows.line_num] if len(fields) < len(names) else []
                yield dict(zip_longest(columns, fields, fillvalue=""))
    if not count:
        raise UserError(f"{path} has a header ({', '.join(names)}) and no record")
    lines_of_problem = {
        f"fewer than {len(names)} fields, the others are empty": short_lines,
        'text after a closing quote; inside quotes write ""': _lines_after_quotes(path, encoding, options),
        "the header once more, left out": header_lines,
        "no value in any field, left out": blank_lines,
    }
    for problem, line_numbers in lines_of_problem.items():
        if line_numbers:
            other_lines = f" and {len(line_numbers) - 1:,} more" if len(line_numbers) > 1 else ""
            notes.append(f"note      {path}: {problem} (line {line_numbers[0]:,}{other_lines})")
    notes += repeats_note(path, names)


def repeats_note(path: Path, names: list[str]) -> list[str]:
    """Return a note on each name that several columns have."""
    repeated = dict.fromkeys(name for place, name in enumerate(names) if name and name in names[:place])
    return [f"note      {path}: of the columns {name} the first is read" for name in repeated]


def nonempty_rows(rows: Iterable[list[str]], blank: list[int] | None = None) -> Iterator[list[str]]:
    """Yield the rows that hold a value; in a table of one column it may be empty. `blank`: the line numbers of empty
    rows are added to it; spreadsheets leave some after the last record."""
    for row in rows:
        if any(row) or len(row) == 1:
            yield row
        elif row and blank is not None:
            blank.append(getattr(rows, "line_num", 0))


def _lines_after_quotes(path: Path, encoding: str | None, options: CsvOptions) -> list[int]:
    """Return the numbers of the lines in which text follows a closing quote."""
    line_numbers = []
    with _open_lines(path, encoding) as lines:
        rows = _csv_reader(lines, {**options, "strict": True})
        while True:
            try:
                next(rows)
            except csv.Error as error:
                if "end of data" in str(error):
                    raise UserError(f"{path}: a quote that is opened is not closed. Correct the file") from None
                line_numbers.append(rows.line_num)
            except StopIteration:
                return line_numbers


def _options(path: Path, data: DataOptions, is_headless: bool, notes: list[str]) -> CsvOptions:
    """Return the arguments of `_csv_reader` for a file. The delimiter is the usual one of the extension; another
    one if the usual one leaves a header of one column, and the other gives header and first record as many columns."""
    csv.field_size_limit(sys.maxsize)  # a text may be longer than csv's limit
    with _open_lines(path, data.recipe.encoding) as lines:
        head = list(islice(lines, NUM_HEAD_LINES))
    default = DELIMITERS[format_suffix(path)]
    delimiter = data.recipe.separator or default
    for candidate in () if data.recipe.separator or is_headless else (default, *OTHER_DELIMITERS):
        header, *record = islice(chain(nonempty_rows(csv.reader(head, delimiter=candidate)), [[]]), 2)
        if len(header) > 1 and (candidate == default or len(record[0]) in (0, len(header))):
            delimiter = candidate
            break
    options = {"delimiter": delimiter}
    if default == ",":
        escaped = {**options, "escaped": True}
        quoted_fields: list[str] = []
        if re.search(rf'{re.escape(delimiter)} +"(?!")', "".join(head)):
            rows = csv.reader(head, delimiter=delimiter)
            quoted_fields = [field.strip() for row in rows for field in row if re.match(' +"', field)]
        # As in `a, "b"`, where the quotes enclose the field: no program writes a text so that begins with a blank and
        # a quote, and none continues after the quote that ends it.
        if quoted_fields and all(field[1:].endswith('"') or '"' not in field[1:] for field in quoted_fields):
            notes.append(f'note      {path}: blanks before a field are left out: a, "b"')
            return {**options, "skipinitialspace": True}
        if any('\\"' in line for line in head) and not _is_valid(head, options) and _is_valid(head, escaped):
            notes.append(f'note      {path}: \\" within a field is read as a quote')
            return escaped
        return options
    is_quoted = has_quoted_fields(path, data.recipe.encoding, delimiter, is_headless)
    if is_quoted is not None:
        role = "enclose fields, as pandas writes them" if is_quoted else "are parts of the texts, and enclose no field"
        notes.append(f"note      {path}: double quotes {role}")
    return {**options, "quoting": csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE}


def _is_valid(head: list[str], options: CsvOptions) -> bool:
    """Return whether each quote of the first lines of a file opens or closes a field, or is escaped."""
    try:
        return all(row is not None for row in _csv_reader(head, {**options, "strict": True}))
    except csv.Error as error:
        return "end of data" in str(error) and len(head) == NUM_HEAD_LINES


def has_quoted_fields(path: Path, encoding: str | None, delimiter: str, is_headless: bool) -> bool | None:
    """Return whether the fields of a .tsv file are quoted as pandas and Excel quote them; False: they are texts with
    quotes in them, as GLUE's. None: there is no quote.

    All quotes must pair up: a field that begins with one ends with one, has those inside doubled, and no other field
    has any. There must also be a reason for them: a doubled quote, a line break, or what separates fields; a quoted
    header; a column of which all fields are quoted; or commas, which Excel quotes too, in all of these fields and in
    no other. Where every line has as many fields as the first, line breaks are not part of fields.
    """
    with _open_lines(path, encoding, newline=None) as lines:
        text = "".join(lines)
    if '"' not in text:
        return None
    field = re.compile(QUOTED_FIELD.format(re.escape(delimiter)))
    quoted = field.findall(text)
    unquoted = field.sub(FIELD_MARK, text)
    records = [record.split(delimiter) for record in unquoted.split("\n") if record]
    if '"' in unquoted or any(FIELD_MARK in record and len(record) != len(records[0]) for record in records):
        return False
    widths = {line.count(delimiter) for line in text.split("\n") if line}
    is_broken = any(delimiter in each or "\n" in each for each in quoted)
    if is_broken and len(widths) == 1 and widths != {0}:
        return False
    if is_broken or any('""' in each[1:-1] for each in quoted) or (FIELD_MARK in records[0] and not is_headless):
        return True
    records = records if is_headless else records[1:]
    places = range(len(records[0]) if records else 0)
    is_column = any(all(record[place : place + 1] == [FIELD_MARK] for record in records) for place in places)
    return is_column or (all("," in each for each in quoted) and "," not in unquoted)
