"""CSV and Excel files as people have them: encodings, separators, files without a header or without a record."""

import csv
import io

import pandas as pd
import pytest
from datasets import Dataset

from tests.helpers import read_data, refusal
from zerofit.data.chat.instructions import find_form
from zerofit.data.pairs import find_columns
from zerofit.data.records import BadRecord
from zerofit.data.tables import check_name, list_columns, looks_like_value, word_columns
from zerofit.data.text import text_column
from zerofit.recipe import ClmRecipe, ClsRecipe, Seq2SeqRecipe

HEADER = ("本文", "評価")
ROWS = [("とても良い、また来たい", "良い"), ("店員が残念", "悪い")] * 3


def write(path, delimiter=",", encoding="utf-8", header=HEADER, rows=ROWS) -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([*([header] if header else []), *rows])
    path.write_bytes(text.getvalue().encode(encoding))
    return str(path)


def read(path: str, cache, **options) -> Dataset:
    return read_data(ClsRecipe(train_file=[path], cache_dir=cache, **options)).parts["train"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_separators_are_found(tmp_path, cache, name, delimiter):
    table = read(write(tmp_path / name, delimiter, "utf-8-sig"), cache)
    assert [tuple(record.values()) for record in table] == ROWS
    assert tuple(table.column_names) == HEADER


def test_a_separator_can_be_named(tmp_path, cache):
    path = write(tmp_path / "a.csv", ":", rows=[("ab", "c")], header=("x;y", "z"))
    assert read(path, cache, delimiter=":").column_names == ["x;y", "z"]


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ""), ("a.tsv", ""), ("a.csv", "\ufeff")])
def test_files_that_were_joined_have_one_header(tmp_path, cache, name, mark):
    delimiter = {"a.csv": ",", "a.tsv": "\t"}[name]
    again = [(mark + HEADER[0], HEADER[1])]
    path = write(tmp_path / name, delimiter, rows=[*ROWS, *again, *ROWS, *again, (HEADER[0], "良い")])
    data = read_data(ClsRecipe(train_file=[path], cache_dir=cache))
    assert [tuple(record.values()) for record in data.parts["train"]] == [*ROWS, *ROWS, (HEADER[0], "良い")]
    assert f"{path}: the header once more, left out (line 8 and 1 more)" in "\n".join(data.notes)


def test_a_file_is_looked_through_once(tmp_path, cache, monkeypatch):
    path = write(tmp_path / "a.csv", rows=[*ROWS, ("short",)])
    notes = read_data(ClsRecipe(train_file=[path], cache_dir=cache)).notes
    monkeypatch.setattr("zerofit.data.sources.read_delimited", lambda *args: pytest.fail("again"))
    assert list(read_data(ClsRecipe(train_file=[path], cache_dir=cache)).notes) == list(notes) != []


def test_a_text_that_is_the_only_columns_name_stays(tmp_path, cache):
    path = write(tmp_path / "a.csv", header=("text",), rows=[("text",), ("more",)])
    assert [*read(path, cache)["text"]] == ["text", "more"]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";"), ("a.csv", ","), ("a.tsv", "\t"), ("a.csv", "|")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_line_in_which_excel_names_the_separator_is_no_header(tmp_path, cache, name, delimiter, encoding):
    path = write(tmp_path / name, delimiter)
    text = (tmp_path / name).read_text()
    (tmp_path / name).write_bytes(f"sep={delimiter}\r\n{text}".encode(encoding))
    table = read(path, cache)
    assert tuple(table.column_names) == HEADER
    assert [tuple(record.values()) for record in table] == ROWS


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["a,b", "c", "d,e", "f"], "fewer than 2 fields, the others are empty (line 3 and 1 more)"),
        (["a,b", '"c "d" e",f'], 'text after a closing quote; inside quotes write "" (line 3)'),
        (["a,b", "c,d"], None),
        (["a,b", ",", ",", "c,d"], "no value in any field, left out (line 3 and 1 more)"),
        (['"a ""b"", c",d', 'e "f" g,h', "i,"], None),
    ],
)
def test_lines_that_are_read_in_another_way_than_meant_are_counted(tmp_path, cache, lines, said):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text,label", *lines]))
    notes = read_data(ClsRecipe(train_file=[str(path)], cache_dir=cache)).notes
    assert list(notes) == ([f"note      {path}: {said}"] if said else [])


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (['"He said \\"hi\\"",x', '"a, b",y'], ['He said "hi"', "a, b"]),  # as Spark and MySQL write them
        (['"\\"a, b\\" and C:\\dir",x'], ['"a, b" and C:\\dir']),
        (['"ends in \\",x', '"a ""b""",y'], ["ends in \\", 'a "b"']),
        (['a \\"b\\" c,x'], ['a \\"b\\" c']),
    ],
)
def test_quotes_behind_a_backslash(tmp_path, cache, lines, texts):
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines]))
    data = read_data(ClsRecipe(train_file=[str(tmp_path / "a.csv")], cache_dir=cache))
    assert data.parts["train"]["text"][:] == texts
    assert len(data.notes) == (texts[0].count('"') > texts[0].count('\\"'))


@pytest.mark.parametrize(
    ("lines", "rows", "noted"),
    [
        ('text, label\n"a, b", "x"\n"c ""d""", y\n', [("a, b", "x"), ('c "d"', "y")], True),
        ('"text", "label"\n"a", "x, y"\n"b", "z"\n', [("a", "x, y"), ("b", "z")], True),
        ("text, label\na, x\nb, y\n", [("a", " x"), ("b", " y")], False),
        ('text,label\n"he said, ""a""",x\n" ""b""",y\n', [('he said, "a"', "x"), (' "b"', "y")], False),
        ('text,label\na, "b" and c\n', [("a", ' "b" and c')], False),
    ],
)
def test_blanks_before_quotes_are_no_part_of_a_text(tmp_path, cache, lines, rows, noted):
    (tmp_path / "a.csv").write_text(lines)
    data = read_data(ClsRecipe(train_file=[str(tmp_path / "a.csv")], cache_dir=cache))
    assert [tuple(record.values()) for record in data.parts["train"]] == rows
    assert any("blanks before a field" in note for note in data.notes) == noted


@pytest.mark.parametrize(("header", "again"), [("label,label", ["label"]), ("a,a,b,b", ["a", "b"]), (",text,", [])])
def test_columns_of_one_name_are_told(tmp_path, cache, header, again):
    (tmp_path / "a.csv").write_text(f"{header}\n{header.replace('l', 'x').replace('t', 'y')}\n")
    notes = read_data(ClsRecipe(train_file=[str(tmp_path / "a.csv")], cache_dir=cache)).notes
    assert [note.split("of the columns ")[1].split()[0] for note in notes if "the first is read" in note] == again


def test_a_file_of_a_header_alone(tmp_path, cache):
    assert "(本文, 評価) and no record" in refusal(read, write(tmp_path / "a.csv", rows=[]), cache)


def test_a_quote_that_is_not_closed(tmp_path, cache):
    (tmp_path / "a.csv").write_text('text,label\n"x,2\n' + "y,3\n" * 9)
    assert "not closed" in refusal(read, str(tmp_path / "a.csv"), cache)


def test_a_first_line_that_is_a_record_is_not_taken_for_names(tmp_path, cache):
    path = write(tmp_path / "a.csv", header=None)
    assert "is the first line a record?" in list_columns(read(path, cache))
    assert "say --text_column" in refusal(check_name, ROWS[0][0], "text_column")
    check_name("満足度", "text_column")
    assert not any(map(looks_like_value, ("text", "Sentence 1", "本文", "No", "premise", "is spam")))
    assert all(map(looks_like_value, ("1", "0.5", "It is good.", "良い。")))


# ------------------------------------------------------------------------------------------------- values as written

VALUES = {
    "id": ["007", "8", "0009"],
    "label": ["0110", "1e3", "1_000"],
    "date": ["2024-01-01", "2024-01-02T00:00:00Z", "1999-12-31"],
    "flag": ["true", "False", "TRUE"],
    "word": ["N/A", "nan", "None"],
    "number": ["1.0", "1.50", "Infinity"],
    "big": ["900000000000013009", "90000000000001300900", "1"],
}


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet", "a.csv.gz"])
def test_texts_stay_as_they_are_written(tmp_path, cache, name):
    path, frame = tmp_path / name, pd.DataFrame(VALUES)
    if "csv" in name or "tsv" in name:
        frame.to_csv(path, index=False, sep="\t" if "tsv" in name else ",")
    elif name.endswith("parquet"):
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=name.endswith("l"))
    assert read(str(path), cache).to_dict() == VALUES


def test_columns_of_numbers_are_not_taken_for_the_text(tmp_path, cache):
    rows = [(f"{n:03}", "2024", "a text", str(n / 2)) for n in range(5)]
    table = read(write(tmp_path / "a.csv", header=("number", "text", "body", "grade"), rows=rows), cache)
    assert word_columns(table) == ["body"]
    assert columns_of_pairs(table.select_columns(["number", "body"]).add_column("more", ["b"] * 5)) == ("body", "more")


def columns_of_pairs(table: Dataset) -> tuple[str, str]:
    found = find_columns(Seq2SeqRecipe(), table)
    return found.source, found.target


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_answers_and_texts_of_digits_in_every_reader(tmp_path, cache, ending):
    rows, sep = [(f"{n} + 1?", f"0{n + 1}") for n in range(5)], "\t" if ending == ".tsv" else ","
    table = read(write(tmp_path / f"a{ending}", sep, header=("question", "answer"), rows=rows), cache)
    assert columns_of_pairs(table) == ("question", "answer")
    assert find_columns(Seq2SeqRecipe(), table).read(table[0])[0].target == "01"
    form = find_form(ClmRecipe(), table)
    assert form.read(table[0])[-1]["content"] == "01"
    assert text_column(table, "answer") == "answer"


@pytest.mark.parametrize("words", [("True", "False"), ("true", "false")])
def test_answers_that_a_csv_file_marks_as_bad_are_refused(tmp_path, cache, words):
    rows = [("a question", "an answer", words[n % 2]) for n in range(4)]
    table = read(write(tmp_path / "a.csv", header=("prompt", "completion", "label"), rows=rows), cache)
    columns = find_columns(Seq2SeqRecipe(), table)
    assert columns.read(table[0])
    with pytest.raises(BadRecord, match="rejected"):
        columns.read(table[1])


# -------------------------------------------------------------------------------------------------------- quoted .tsv

TEXTS = ["two\nlines", "a\ttab", 'he said "no"', '"all of it"', "plain", "", '"', "ends\r\n", "comma, here"]


@pytest.mark.parametrize(
    ("columns", "quoting"),
    [
        (("text", "label"), csv.QUOTE_MINIMAL),
        (("id", "text", "label"), csv.QUOTE_ALL),
        (("label", "text"), csv.QUOTE_NONNUMERIC),
    ],
)
@pytest.mark.parametrize("texts", [TEXTS, *([text, "plain"] for text in TEXTS if text.strip('" '))])
def test_what_pandas_writes_as_tsv_is_read(tmp_path, cache, texts, columns, quoting):
    values = {"id": [f"{n}" for n in range(len(texts))], "text": texts, "label": ["0", "1"] * 4 + ["0"]}
    frame = pd.DataFrame({name: values[name][: len(texts)] for name in columns})
    frame.to_csv(tmp_path / "a.tsv", sep="\t", index=False, quoting=quoting, lineterminator="\n")
    source = read_data(ClsRecipe(train_file=[str(tmp_path / "a.tsv")], cache_dir=cache))
    found = source.parts["train"]
    assert found.to_dict() == frame.to_dict("list")
    has_quotes = '"' in (tmp_path / "a.tsv").read_text()
    assert [("enclose fields" in note) for note in source.notes] == [True] * has_quotes


@pytest.mark.parametrize(
    "texts",
    [
        ['"a lone quote', "none"],
        ['"it begins here', 'and ends here"'],
        ['"a lone quote', '"all of it"', 'he said "no"'],
        ['"all of it"', "none"],
        ['"one" and "two"', "none"],
        ['"half ""doubled', "none"],
        ['5" and 6"', '"'],
    ],
)
def test_quotes_in_texts_of_an_unquoted_tsv_stay(tmp_path, cache, texts):
    (tmp_path / "a.tsv").write_text("sentence\tlabel\n" + "".join(f"{text}\t1\n" for text in texts))
    source = read_data(ClsRecipe(train_file=[str(tmp_path / "a.tsv")], cache_dir=cache))
    assert source.parts["train"]["sentence"][:] == texts
    (note,) = source.notes
    assert str(tmp_path / "a.tsv") in note
    assert "parts of the texts" in note


def test_each_tsv_of_several_has_its_own_quoting(tmp_path, cache):
    (tmp_path / "a.tsv").write_text('text\tlabel\n"say ""yes"""\t1\n')
    (tmp_path / "b.tsv").write_text('text\tlabel\n"lone\t1\n')
    first = [str(tmp_path / "a.tsv")]
    parts = read_data(ClsRecipe(train_file=[str(tmp_path / "*.tsv")], validation_file=first, cache_dir=cache)).parts
    assert parts["train"]["text"][:] == ['say "yes"', '"lone']
    assert parts["validation"]["text"][:] == ['say "yes"']
    answered = ClsRecipe(model_name_or_path="m", predict_file=first, cache_dir=cache)
    assert read_data(answered).parts["predict"]["text"][:] == ['say "yes"']


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_files_with_other_columns_are_read_together(tmp_path, cache, ending):
    sep = "\t" if ending == ".tsv" else ","
    write(tmp_path / f"a{ending}", sep, header=("text", "label"), rows=[("one", "0")])
    write(tmp_path / f"b{ending}", sep, header=("label", "id", "text"), rows=[("1", "07", "two")])
    table = read(str(tmp_path / f"*{ending}"), cache)
    assert table.to_dict() == {"text": ["one", "two"], "label": ["0", "1"], "id": [None, "07"]}


@pytest.mark.parametrize("header", [("Source", "TARGET"), ("Question", "Answer ")])
def test_names_of_columns_in_upper_case(tmp_path, cache, header):
    table = read(write(tmp_path / "a.csv", header=header), cache)
    assert columns_of_pairs(table) == tuple(name.strip().lower() for name in header)


@pytest.mark.parametrize("header", [("Text", "label"), (" text", "label")])
def test_columns_that_differ_in_case_between_files_are_named(tmp_path, cache, header):
    write(tmp_path / "a.csv", header=("text", "label"), rows=[("one", "0")])
    write(tmp_path / "b.csv", header=header, rows=[("two", "1")])
    assert f"the columns text, {header[0]} differ" in refusal(read, str(tmp_path / "*.csv"), cache)


def test_of_an_excel_file_the_first_sheet_is_read_and_the_others_are_named(tmp_path, cache):
    pytest.importorskip("openpyxl", reason="pandas reads .xlsx with it")
    table = pd.DataFrame(ROWS, columns=HEADER)
    for others in ([], ["dev", "old"]):
        path = tmp_path / f"{len(others)}.xlsx"
        with pd.ExcelWriter(path) as book:
            for name in ["train", *others]:
                table.to_excel(book, sheet_name=name, index=False)
        data = read_data(ClsRecipe(train_file=[str(path)], cache_dir=cache))
        assert [tuple(record.values()) for record in data.parts["train"]] == ROWS
        assert ["'dev', 'old'" in note for note in data.notes] == [True] * bool(others)


def test_an_excel_file_as_people_have_it(tmp_path, cache):
    """Empty rows, two columns of one name, and a cell in which a formula has failed."""
    openpyxl = pytest.importorskip("openpyxl", reason="pandas reads .xlsx with it")
    book = openpyxl.Workbook()
    for row in ([], ["text", "label", "text"], ["one", 1, "a"], [], ["two", 2.5, "b"], ["#N/A", "NA", "c"]):
        book.active.append(row or [None])
    book.save(tmp_path / "a.xlsx")
    data = read_data(ClsRecipe(train_file=[str(tmp_path / "a.xlsx")], cache_dir=cache))
    table = {"text": ["one", "two", ""], "label": ["1", "2.5", "NA"], "text.1": ["a", "b", "c"]}
    assert data.parts["train"].to_dict() == table
    assert [words in note for note, words in zip(data.notes, ("columns text the first", "1 cell"))] == [True, True]
