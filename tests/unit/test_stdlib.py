"""The data sets made from Python's own library: what a record is, and that nothing is told twice."""

import re

import pytest

from tests.helpers import read_data
from zerofit.data.sources import MIN_WORDS, NUM_PACKAGES
from zerofit.recipe import ClsRecipe, parse_recipe


def parts_of(name: str, cache: str) -> dict[str, list[dict]]:
    flags = ["--model_type", "bert", "--train_tokenizer_vocab_size", "400", "--dataset_name", name]
    source = read_data(parse_recipe(ClsRecipe, [*flags, "--cache_dir", cache]))
    return {part: table.to_list() for part, table in source.parts.items()}


def said(text: str) -> str:
    return " ".join(re.findall("[a-z]+", text.lower()))


@pytest.fixture(scope="module")
def docstrings(cache) -> dict[str, list[dict]]:
    return parts_of("stdlib-docstrings", cache)


@pytest.fixture(scope="module")
def functions(cache) -> dict[str, list[dict]]:
    return parts_of("stdlib-functions", cache)


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
def test_nothing_that_is_held_out_is_trained_on(docstrings, functions, column):
    parts = {"text": docstrings, "source": functions}[column]
    trained = {said(record[column]) for record in parts["train"]}
    held_out = {said(record[column]) for record in parts["validation"]}
    assert held_out
    assert not trained & held_out
