"""The data sets made from Python's own library: what a record is, and that nothing is told twice."""

import re
from pathlib import Path

import pytest

from tests.helpers import read_data
from zerofit.data.pairs.prepare import prepare_pairs
from zerofit.data.stdlib import MIN_WORDS, NUM_PACKAGES, definitions, in_words
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClsRecipe, Seq2SeqRecipe, parse_recipe
from zerofit.training.generation import trivial_answers


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


def test_functions(functions):
    assert len(functions["train"]) > 8000
    assert len(functions["validation"]) > 800
    by_name = {record["target"]: record for part in functions.values() for record in part}
    release = by_name["get optional release"]  # of __future__._Feature, in every Python
    assert release["source"] == "def this self return self optional"


@pytest.mark.parametrize("column", ["text", "source"])
def test_nothing_that_is_held_out_is_trained_on(docstrings, functions, column):
    parts = docstrings if column == "text" else functions
    trained = {said(record[column]) for record in parts["train"]}
    held_out = {said(record[column]) for record in parts["validation"]}
    assert held_out
    assert not trained & held_out


def test_every_process_has_the_same_records(cache, functions):
    again = parts_of("stdlib-functions", cache)
    assert again == functions


THINGS = '''"""Things."""
class Box:
    """A box."""
    def open(self):  # a comment
        """Open it. Then look."""
        return other.open(1)
    def shut(self):
        def lid(): pass
        return 2
if Box:
    def empty(): "Say nothing."
'''


def test_what_is_found_in_a_file(tmp_path):
    file = tmp_path / "things.py"
    file.write_text(THINGS)
    found = list(definitions(file, Path("pack/things.py")))
    assert [(entry["package"], entry["top"], entry["name"]) for entry in found] == [
        ("pack", "pack/things.py:", ""), ("pack", "pack/things.py:Box", "Box"), ("pack", "pack/things.py:Box", "open"),
        ("pack", "pack/things.py:Box", "shut"), ("pack", "pack/things.py:Box", "lid"),
        ("pack", "pack/things.py:", "empty"),
    ]  # fmt: skip
    assert [entry["text"] for entry in found] == ["Things.", "A box.", "Open it. Then look.", "", "", "Say nothing."]
    assert [entry["code"] for entry in found] == [
        "", "", "def this(self):\n    return other.this(1)",
        "def this(self):\n\n    def lid():\n        pass\n    return 2", *2 * ["def this():\n    pass"],
    ]  # fmt: skip
    file.write_text("print 'Python 2'")
    assert not list(definitions(file, Path("things.py")))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def getSize(self, max_depth=3)", "def get size self max depth 3"),
        ("__init__", "init"),
        ("HTTPServer2", "httpserver 2"),
        ("_", "_"),
    ],
)
def test_code_in_words(code, words):
    assert in_words(code) == words


def test_the_trivial_answers_are_scored_as_the_models_are(cache):
    flags = ["--config_name", "blenderbot-400M-distill", "--train_tokenizer_vocab_size", "400",
             "--dataset_name", "stdlib-functions", "--max_train_samples", "2000", "--max_eval_samples", "40",
             "--cache_dir", cache]  # fmt: skip
    recipe = parse_recipe(Seq2SeqRecipe, flags)
    from transformers import AutoModelForSeq2SeqLM

    data = prepare_pairs(recipe, load_configuration(recipe, AutoModelForSeq2SeqLM))
    assert len(data.validation.targets) == len(data.validation.samples) == 40
    (line,) = trivial_answers(data.validation)
    assert re.fullmatch(r"baseline    always 'init': bleu [\d.]+, rouge1 [\d.]+, .*", line)
    data.validation.targets = ["init"] * 40
    assert "rouge1 100.0000" in trivial_answers(data.validation)[0]
