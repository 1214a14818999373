"""Records with labels become rows: columns, formats, bad records, splits, truncation. And the data sets made
from Python's own library: nothing is told twice."""

import csv
import re

import numpy as np
import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, Value
from helpers import check_refusal, refusal

from tests.helpers import read_data
from zerofit.data.labelled.examples import prepare_examples
from zerofit.data.labelled.labels import ExampleData
from zerofit.data.sources import MIN_WORDS, NUM_PACKAGES
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClsRecipe, parse_recipe

WORDS = ("good", "bad", "long", "short", "story", "film", "play", "song")
TEXTS = [f"A {WORDS[n % 8]} {WORDS[n * 3 % 7]}, number {n}" for n in range(40)]
LABELS = ["yes" if n % 3 else "no" for n in range(40)]
SIZES = "hidden_size=16,num_hidden_layers=1,num_attention_heads=1,intermediate_size=16,max_position_embeddings=64"


@pytest.fixture
def prepare(cache):
    """Files and flags -> samples, through the recipe's own parser."""

    def run(train, *flags: str) -> ExampleData:
        model = ["--model_type", "bert", "--config_overrides", SIZES]
        data = ["--train_file", str(train), "--train_tokenizer_vocab_size", "270", "--cache_dir", cache]
        recipe = parse_recipe(ClsRecipe, [*model, *data, *map(str, flags)])
        return prepare_examples(recipe, load_configuration(recipe))

    return run


def write(path, columns: dict[str, list]):
    """A .csv (all texts in quotes), .tsv or .jsonl file of these columns."""
    frame = pd.DataFrame(columns)
    if path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        quoting = csv.QUOTE_ALL if path.suffix == ".csv" else csv.QUOTE_NONE
        frame.to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t", quoting=quoting)
    return path


def words(data: ExampleData, samples=None) -> list[str]:
    """The texts that the rows hold, special tokens left out."""
    samples = data.train if samples is None else samples
    ids = [samples[index]["input_ids"] for index in range(len(samples))]
    return [data.tokenizer.decode(row, skip_special_tokens=True).strip() for row in ids]


def names(data: ExampleData, samples=None) -> list[str]:
    samples = data.train if samples is None else samples
    return [data.labels.names[samples[index]["label"]] for index in range(len(samples))]


def typed(path, kind, values):
    Dataset.from_dict({"label": values, "text": TEXTS[: len(values)]}).cast_column("label", kind).to_parquet(path)
    return str(path)


A, B = ClassLabel(names=["no", "yes", "-"]), ClassLabel(names=["yes", "no"])


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ((A, [0, 1]), (B, [0, 1]), ["no", "yes", "yes", "no"]),
        ((A, [0, 1]), (Value("string"), ["yes", "no"]), ["no", "yes", "yes", "no"]),
        ((Value("string"), ["no", "yes"]), (B, [0, 1]), ["no", "yes", "yes", "no"]),
        ((A, [0, 1]), (Value("int8"), [1, 0]), ["no", "yes", "yes", "no"]),
        ((Value("int64"), [3, 4]), (Value("float64"), [4.0, 3.0]), ["3", "4", "4", "3"]),
    ],
)
def test_files_with_other_types_of_labels(tmp_path, prepare, first, other, expected, joined):
    files = [typed(tmp_path / f"{name}.parquet", *of) for name, of in (("a", first), ("b", other))]
    flags = ["--validation_split_percentage", 0] if joined else ["--validation_file", files[1]]
    data = prepare(tmp_path / ("*" if joined else "a.parquet"), *flags)
    held_out = [names(data, part.samples) for part in data.held_out]
    assert [*names(data), *(held_out[0] if held_out else ())] == expected


def test_a_column_that_some_parquet_files_have(tmp_path, prepare):
    typed(tmp_path / "a.parquet", A, [0, 1])
    Dataset.from_dict({"text": ["one"], "more": [1], "label": ["no"]}).to_parquet(tmp_path / "b.parquet")
    assert names(prepare(tmp_path / "*", "--validation_split_percentage", 0)) == ["no", "yes", "no"]
    typed(tmp_path / "c.parquet", A, [])
    assert f"{tmp_path / 'c.parquet'} has no record" in refusal(prepare, tmp_path / "*")


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("column", ["text", "body", "Text"])
def test_formats_and_columns_that_are_found(tmp_path, prepare, ending, column):
    path = write(tmp_path / f"a.{ending}", {"id": list(range(40)), column: TEXTS, "label": LABELS})
    data = prepare(path, "--validation_split_percentage", "0")
    assert data.held_out == []
    assert words(data) == TEXTS
    assert names(data) == LABELS
    first = data.train[0]["input_ids"].tolist()
    assert (first[0], first[-1]) == (data.tokenizer.cls_token_id, data.tokenizer.sep_token_id)


def test_columns_that_are_not_found(tmp_path, prepare):
    path = write(tmp_path / "a.csv", {"one": TEXTS, "two": TEXTS, "three": LABELS})
    message = refusal(prepare, path)
    assert "--text_columns" in message
    assert "--label_column" in message
    assert message.count("the columns are one, two, three") == 2


def test_mrpc_as_released(tmp_path, prepare):
    """It begins with a byte order mark, and its quotation marks are not balanced."""
    rows = [f'{n % 2}\t1\t2\tHe said " {TEXTS[n]}\t" {TEXTS[n]} is what he said .' for n in range(40)]
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows]
    (tmp_path / "train.tsv").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8-sig", newline="")
    data = prepare(tmp_path / "train.tsv", "--task_name", "mrpc", "--validation_split_percentage", "0")
    assert len(data.train) == 40
    assert names(data)[:2] == ["not_equivalent", "equivalent"]
    assert words(data)[1] == f'He said " {TEXTS[1]} " {TEXTS[1]} is what he said .'


def test_cola_as_released_has_no_header(tmp_path, prepare):
    rows = [f"gj04\t{n % 2}\t{'' if n % 2 else '*'}\t{TEXTS[n]}" for n in range(40)]
    for name, part in (("train", rows), ("dev", rows[:6])):
        (tmp_path / f"{name}.tsv").write_text("\n".join(part) + "\n")
    data = prepare(tmp_path / "train.tsv", "--validation_file", tmp_path / "dev.tsv", "--task_name", "cola")
    assert words(data) == TEXTS  # the first line is a record too
    assert words(data, data.held_out[0].samples) == TEXTS[:6]
    assert names(data)[:2] == ["unacceptable", "acceptable"]


def mnli(path, last: str = "neutral"):
    gold = [("entailment", "neutral", "contradiction")[n % 3] for n in range(39)] + [last]
    return write(path, {"index": list(range(40)), "sentence1": TEXTS, "sentence2": TEXTS[::-1], "gold_label": gold})


def test_mnli_as_released_has_two_held_out_parts(tmp_path, prepare):
    train, matched = mnli(tmp_path / "train.tsv"), mnli(tmp_path / "dev_matched.tsv")
    other = mnli(tmp_path / "dev_mismatched.tsv", last="-")
    files = ("--validation_file", matched, "--validation_mismatched_file", other, "--task_name", "mnli")
    check_refusal([f"{other}, record 40: it has no label (gold_label)", "--skip_bad_records"], prepare, train, *files)
    data = prepare(train, *files, "--skip_bad_records", "--max_eval_samples", "100")
    assert [part.suffix for part in data.held_out] == ["", "_mismatched"]
    assert [len(part.samples) for part in data.held_out] == [40, 39]
    assert data.labels.names == ("entailment", "neutral", "contradiction")
    assert names(data)[:4] == ["entailment", "neutral", "contradiction", "entailment"]
    assert any("1 of 40 records" in note for note in data.notes)


def test_empty_texts_and_missing_labels(tmp_path, prepare):
    texts, labels = ["None", *TEXTS[1:6], " ", *TEXTS[7:20], "", *TEXTS[21:]], [*LABELS[:30], "", *LABELS[31:]]
    path = write(tmp_path / "a.csv", {"text": texts, "label": labels})
    message = refusal(prepare, path)
    assert f"{path}, record 7: the text (text) is empty (3 records cannot be used)" in message
    assert "--skip_bad_records" in message
    unusable = write(tmp_path / "none.csv", {"text": [" ", ""], "label": ["a", "b"]})
    for flags in ((), ("--skip_bad_records",)):
        message = refusal(prepare, unusable, *flags, "--max_train_samples", "2")
        assert f"{unusable} has no usable record: record 1: the text (text) is empty. Correct it" in message
    data = prepare(path, "--skip_bad_records", "--validation_split_percentage", "0")
    kept = [n for n in range(40) if n not in (6, 20, 30)]
    assert words(data) == [texts[n] for n in kept], "pandas would take None for nothing"
    assert names(data) == [LABELS[n] for n in kept]  # no label moved to its neighbour
    assert any("3 of 40 records" in note for note in data.notes)


def test_the_split_loses_nothing_and_keeps_labels_with_their_texts(tmp_path, prepare):
    path = write(tmp_path / "a.csv", {"text": TEXTS, "label": LABELS})
    data = prepare(path, "--validation_split_percentage", "25")
    (held_out,) = data.held_out
    assert (len(data.train), len(held_out.samples)) == (30, 10)
    assert sorted([*words(data), *words(data, held_out.samples)]) == sorted(TEXTS)
    expected = dict(zip(TEXTS, LABELS))
    assert names(data, held_out.samples) == [expected[text] for text in words(data, held_out.samples)]
    assert names(data) == [expected[text] for text in words(data)]
    assert held_out.tables[0]["text"][:] == words(data, held_out.samples)  # what predictions.jsonl shows


def test_pairs_have_token_types(tmp_path, prepare):
    path = write(tmp_path / "a.csv", {"sentence1": TEXTS, "sentence2": TEXTS[::-1], "label": LABELS})
    data = prepare(path, "--validation_split_percentage", "0")
    sample = data.train[3]
    ids, types = sample["input_ids"].tolist(), sample["token_type_ids"].tolist()
    middle = ids.index(data.tokenizer.sep_token_id) + 1
    assert types == [0] * middle + [1] * (len(ids) - middle)
    assert data.tokenizer.decode(ids[1 : middle - 1]).strip() == TEXTS[3]
    assert data.tokenizer.decode(ids[middle:-1]).strip() == TEXTS[36]
    one_type = prepare(path, "--config_overrides", f"{SIZES},type_vocab_size=1")  # the model has no row for the second
    assert "token_type_ids" not in one_type.train[3]
    twice = prepare(path, "--text_columns", "sentence1", "sentence1", "--validation_split_percentage", "0")
    assert words(twice)[3].count(TEXTS[3]) == 2


def test_truncation_is_counted_and_keeps_the_marks(tmp_path, prepare):
    path = write(tmp_path / "a.csv", {"sentence1": TEXTS, "sentence2": ["ok"] * 40, "label": LABELS})
    whole = prepare(path, "--validation_split_percentage", "0")
    cut = prepare(path, "--validation_split_percentage", "0", "--max_length", "12")
    assert whole.train.stats.truncated == 0
    assert whole.train.lengths.max() > 12
    assert cut.train.lengths.max() == 12
    assert cut.train.stats.truncated == int(np.maximum(whole.train.lengths - 12, 0).sum()) > 0
    assert cut.train.stats.tokens == whole.train.stats.tokens
    sample, separator = cut.train[0], cut.tokenizer.sep_token_id
    assert sample["input_ids"][-1] == separator
    assert (sample["input_ids"] == separator).sum() == 2
    assert len(sample["token_type_ids"]) == 12
    assert words(cut)[0].endswith("ok")  # the longer text is cut, not the last one


# ------------------------------------------------------------------------------------------------ Python's own library


def parts_of(name: str, cache: str) -> dict[str, list[dict]]:
    flags = ["--model_type", "bert", "--train_tokenizer_vocab_size", "400", "--dataset_name", name]
    source = read_data(parse_recipe(ClsRecipe, [*flags, "--cache_dir", cache]))
    return {part: table.to_list() for part, table in source.parts.items()}


def said(text: str) -> str:
    return " ".join(re.findall("[a-z]+", text.lower()))


@pytest.fixture(scope="module")
def docstrings(cache) -> dict[str, list[dict]]:
    return parts_of("stdlib-docstrings", cache)


def test_docstrings(docstrings):
    labels = {record["label"] for record in docstrings["train"]}
    assert len(labels) == NUM_PACKAGES
    assert {record["label"] for record in docstrings["validation"]} <= labels
    assert len(docstrings["train"]) > 2000
    assert len(docstrings["validation"]) > 200
    for record in [*docstrings["train"], *docstrings["validation"]]:
        assert not any(label.lower() in record["text"].lower() for label in labels), "the answer is in the text"
        assert len(said(record["text"]).split()) >= MIN_WORDS


@pytest.mark.parametrize("column", ["text", "source"])
def test_nothing_that_is_held_out_is_trained_on(docstrings, cache, column):
    parts = docstrings if column == "text" else parts_of("stdlib-functions", cache)
    trained = {said(record[column]) for record in parts["train"]}
    held_out = {said(record[column]) for record in parts["validation"]}
    assert held_out
    assert not trained & held_out
