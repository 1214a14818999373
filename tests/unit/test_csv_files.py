"""CSV and Excel files as people have them: encodings, separators, files without a header or without a record."""

import csv
import importlib.util
import io

import pandas as pd
import pytest
from datasets import Dataset

from tests.helpers import read_data, refusal
from zerofit.data.file_formats import BUILDERS
from zerofit.data.tables import check_name, columns_present
from zerofit.recipe import ClsRecipe
from zerofit.recipe.columns import is_value

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
    assert any("delimiter = 'ab'" in problem for problem in ClsRecipe(train_file=[path], delimiter="ab").problems())


def test_another_encoding_is_said_and_can_be_named(tmp_path, cache):
    path = write(tmp_path / "a.csv", encoding="cp932")
    assert "--encoding cp932" in refusal(read, path, cache)
    assert read(path, cache, encoding="cp932")[0]["評価"] == "良い"


def test_a_file_of_a_header_alone(tmp_path, cache):
    assert "(本文, 評価) and no record" in refusal(read, write(tmp_path / "a.csv", rows=[]), cache)


def test_a_first_line_that_is_a_record_is_not_taken_for_names(tmp_path, cache):
    path = write(tmp_path / "a.csv", header=None)
    assert "is the first line a record?" in columns_present(read(path, cache))
    assert "say --text_column" in refusal(check_name, ROWS[0][0], "text_column")
    check_name("満足度", "text_column")
    assert not any(map(is_value, ("text", "Sentence 1", "本文", "No", "premise", "is spam")))
    assert all(map(is_value, ("1", "0.5", "It is good.", "良い。")))


def test_excel_files_go_through_pandas_and_its_engine(tmp_path, cache, monkeypatch):
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    recipe = ClsRecipe(train_file=[str(tmp_path / "a.xlsx")], cache_dir=cache)
    if importlib.util.find_spec("openpyxl") is None:
        assert "pip install openpyxl" in refusal(read, str(tmp_path / "a.xlsx"), cache)
    sheet = pd.DataFrame(ROWS, columns=HEADER)
    monkeypatch.setattr(pd, "read_excel", lambda *args, **kwargs: sheet)
    assert BUILDERS["xlsx"][0] == "csv"
    assert [tuple(record.values()) for record in read(*recipe.train_file, cache)] == ROWS
