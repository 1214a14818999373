"""JSON files as people have them: records that differ, several files, tables of pandas."""

import gzip
import json

import pandas as pd
import pytest
from helpers import check_refusal, read_data, refusal

from zerofit.data.pairs import split_translation_columns
from zerofit.recipe import ClsRecipe, Seq2SeqRecipe


def read(cache, *files, **options):
    return read_data(ClsRecipe(train_file=[str(file) for file in files], cache_dir=cache, **options)).parts["train"]


def write(path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps({"text": "t", **record}) + "\n" for record in records))


def call(**arguments) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}


TALK = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
ONE, TWO = ({"a": number, "b": None} for number in (1, 2))
DIFFERENT = [
    ([{"label": None}], [{"label": "a"}], [None, "a"]),
    ([{"label": 1}], [{"label": "007"}], ["1", "007"]),
    ([{"label": 1}], [{"label": 0.5}], [1.0, 0.5]),
    ([{"label": 1}], [{"label": True}], ["1", "True"]),
    ([{"label": True}], [{"label": 5}], ["True", "5"]),
    ([{"label": "a"}], [{"label": 3.0}], ["a", "3"]),
    ([{"label": "a"}], [{"label": "2024-01-01"}], ["a", "2024-01-01"]),
    ([{"label": "2024-01-01"}], [{"label": "a"}], ["2024-01-01", "a"]),
    ([{"label": "a"}], [{"label": "b"}, {"label": 5}], ["a", "5"]),
    ([{"label": 1}], [{"label": 90000000000001300900}], ["1", "90000000000001300900"]),
    ([{"label": []}], [{"label": [{"a": 1}]}], [[], [{"a": 1}]]),
    ([{"label": [1]}], [{"label": ["a"]}], [["1"], ["a"]]),
    ([{"other": 1}], [{"label": "b", "more": {"c": 2}}], [None, "b"]),
    ([{"label": "a", "more": 1}], [{"label": "b"}], ["a", "b"]),
    ([{"label": {"a": 1}}], [{"label": {"a": 1, "b": {"c": "x"}}}], [{"a": 1}, {"a": 1, "b": {"c": "x"}}]),
    ([{"label": {"a": 1}}], [{"label": {"a": "x"}}], [{"a": "1"}, {"a": "x"}]),
    ([{"label": {"a": 1}}], [{"label": "x"}], [{"a": 1}, "x"]),
    ([{"label": TALK["messages"]}], [{"label": [call(x=1)]}], [TALK["messages"], [call(x=1)]]),
    ([{"label": [ONE, ONE]}], [{"label": [TWO]}], [[ONE, ONE], [TWO]]),
    ([{"label": [call(x=1)]}], [{"label": [call(y="z")]}], [[call(x=1)], [call(y="z")]]),
]


@pytest.mark.parametrize(("first", "later", "values"), DIFFERENT)
def test_later_records_and_files_may_differ(tmp_path, cache, first, later, values):
    write(tmp_path / "both.jsonl", [*first, *later])
    write(tmp_path / "a.jsonl", first)
    write(tmp_path / "b.jsonl", later)
    (tmp_path / "c.json").write_text(json.dumps([{"text": "t", **record} for record in later]))
    for names in (["both.jsonl"], ["a.jsonl", "b.jsonl"], ["a.jsonl", "c.json"]):
        found = read(cache, *(tmp_path / name for name in names))
        assert len(found) == len(first) + len(later)
        assert [found["label"][0], found["label"][-1]] == values


# -------------------------------------------------------------------------------------------------------------- pandas


@pytest.mark.parametrize("index", [None, "names", "filtered", "numbers"])
@pytest.mark.parametrize("orient", [None, "records", "split", "index", "columns", "table", "list"])
@pytest.mark.parametrize(("name", "options"), [("a.json", {"indent": 2}), ("a.jsonl", {}), ("a.json.gz", {})])
def test_what_pandas_writes_as_json_is_read(tmp_path, cache, orient, index, options, name):
    frame = pd.DataFrame({"text": [f"text {n}" for n in range(8)], "label": ["0", "01"] * 4, "n": [*range(8)]})
    if index == "names":
        frame.index = [f"record {n}" for n in range(8)]
    elif index == "numbers":
        frame = frame.set_index(pd.Index([f"00{n}" for n in range(8)]))
    frame = frame[frame["n"] > 2] if index == "filtered" else frame
    if orient == "list":
        content = json.dumps(frame.to_dict("list"), **options).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    else:
        frame.to_json(tmp_path / name, orient=orient, **options)
    assert read(cache, tmp_path / name).to_dict() == frame.to_dict("list")


@pytest.mark.parametrize(
    "record",
    [
        {"text": "a", "label": 1},
        {"translation": {"de": "a", "en": "b"}},
        {"chosen": {"role": "a", "content": "b"}, "rejected": {"role": "a", "content": "c"}},
        {"tokens": ["a", "b"], "tags": [0, 1]},
        {"tokens": list("abcdefgh"), "tags": [0]},
        {"data": [{"text": "a"}] * 8},
        {"messages": [{"role": "user", "content": "a"}]},
        {"columns": ["a"], "data": "b"},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_of_one_record_is_no_table(tmp_path, cache, record, indent):
    (tmp_path / "a.json").write_text(json.dumps(record, indent=indent))
    found = read(cache, tmp_path / "a.json")
    assert len(found) == 1
    assert found[0] == record


def test_keys_have_the_order_of_the_first_record(tmp_path, cache):
    """The first language of a translation is its source."""
    first, second = '{"translation": {"en": "a", "de": "b"}}', '{"translation": {"de": "d", "en": "c"}}'
    (tmp_path / "a.jsonl").write_text(f"{first}\n{second}")
    (table,) = read_data(Seq2SeqRecipe(train_file=[str(tmp_path / "a.jsonl")], cache_dir=cache)).parts.values()
    assert split_translation_columns(table).to_dict() == {"en": ["a", "c"], "de": ["b", "d"]}
    assert list(table.features["translation"]) == ["en", "de"]


def test_a_table_without_names_of_columns_is_refused(tmp_path, cache):
    pd.DataFrame({"text": ["a", "b"]}).to_json(tmp_path / "a.json", orient="values")
    check_refusal([f"{tmp_path / 'a.json'} is a list of lists", "orient='records'"], read, cache, tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00 at first", r"in the \udc80 middle", r"\ud83d\ud83d\ude00"])
def test_half_of_a_surrogate_pair_is_named_and_can_be_skipped(tmp_path, cache, half, name):
    rows = [f'{{"text": "{half if number == 2 else number}", "label": "a"}}' for number in range(4)]
    path = tmp_path / name
    path.write_text("\n".join(rows) if name.endswith("l") else f"[{', '.join(rows)}]")
    assert f"{path}, record 3: a text has half of a surrogate pair" in refusal(read, cache, path)
    source = read_data(ClsRecipe(train_file=[str(path)], cache_dir=cache, skip_bad_records=True))
    assert source.parts["train"]["text"][:] == ["0", "1", "3"]
    assert any("record 3" in note for note in source.notes)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(
    "values", [["猫である。", "いい"], ["猫である。", 3], [["猫である。"], ["いい"]], [{"a": "猫である。"}, {"b": 1}]]
)
def test_other_encodings_are_refused_whatever_a_record_holds(tmp_path, cache, values, name):
    rows = [json.dumps({"text": "x", "label": value}, ensure_ascii=False) for value in values]
    text = "\n".join(rows) if name.endswith("l") else f"[{', '.join(rows)}]"
    (tmp_path / name).write_bytes(text.encode("euc_jp"))
    for options in ({}, {"skip_bad_records": True}):
        assert f"{tmp_path / name} is not UTF-8" in refusal(read, cache, tmp_path / name, **options)


@pytest.mark.parametrize("values", [["007", 7], ["2024-01-01", "2024-01-02"], ["a", 3, "b"], [1, 2]])
@pytest.mark.parametrize("form", [("\r", None), ("\r\n", None), ("", None), (" ", None), ("\n", 1), ("", 1),
                                  (",\n", None), (",\r\n", 1), ("\n\ufeff", None)])  # fmt: skip
def test_records_that_are_not_one_a_line(tmp_path, cache, form, values):
    between, indent = form
    texts = [json.dumps({"text": "\u2028", "label": value}, indent=indent) for value in values]
    (tmp_path / "a.json").write_text(between.join(texts))
    as_texts = [value if values == [1, 2] else str(value) for value in values]
    assert read(cache, tmp_path / "a.json")["label"][:] == as_texts


@pytest.mark.parametrize("values", [[None, "a"], ["a", None], [1, None], [["a"], None], [None, 0.5]])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_missing_values_as_python_writes_those_of_pandas(tmp_path, cache, name, values):
    rows = [json.dumps({"text": float("nan"), "label": float("nan") if value is None else value}) for value in values]
    rows.append('{"text": "b"}')
    (tmp_path / name).write_text("\n".join(rows) if name.endswith("l") else f"[{', '.join(rows)}]")
    found = read(cache, tmp_path / name).to_pandas()
    assert found["text"][2] == "b"
    assert found["text"].isna().tolist() == [True, True, False]
    assert found["label"].isna().tolist() == [*(value is None for value in values), True]


def test_where_a_list_of_records_is_no_json(tmp_path, cache):
    (tmp_path / "a.json").write_text('[{"text": "a"},\n {"text": "b"},\n]')
    assert "not valid JSON: " in (said := refusal(read, cache, tmp_path / "a.json"))
    assert "line 3" in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_key_that_stands_twice_is_refused(tmp_path, cache, name):
    rows = ['{"text": "a"}', '{"text": "b", "text": "c"}']
    (tmp_path / name).write_text("\n".join(rows) if name.endswith("l") else f"[{', '.join(rows)}]")
    assert "is there twice" in refusal(read, cache, tmp_path / name)
