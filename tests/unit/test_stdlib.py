"""The data sets made from Python's own library: what a record is, and that nothing is told twice."""

import re
import textwrap
from pathlib import Path

import pytest

from train.data.pairs import prepare_pairs
from train.data.sources import EMBEDDED, read_source
from train.data.stdlib import MIN_WORDS, NUM_PACKAGES, documented, first_sentence, in_words
from train.model.configuration import load_configuration
from train.recipe import ClsRecipe, Seq2SeqRecipe, parse_recipe
from train.run.generation import trivial_answers


def parts_of(name: str, cache: str) -> dict[str, list[dict]]:
    flags = ["--model_type", "bert", "--train_tokenizer_vocab_size", "400", "--dataset_name", name]
    source = read_source(parse_recipe(ClsRecipe, [*flags, "--cache_dir", cache]))
    return {part: table.to_list() for part, table in source.parts.items()}


def said(text: str) -> str:
    return " ".join(re.findall("[a-z]+", text.lower()))


def told(records: list[dict]) -> list[dict]:
    """Those whose target is what the docstring says."""
    return [record for record in records if not record.get("source", "").startswith("name ")]


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
    assert len(functions["train"]) > 3000
    assert len(functions["validation"]) > 300
    asked = [record for record in functions["train"] if record["source"].startswith("name ")]
    assert len(asked) == len(functions["train"]) / 2
    assert all(record["target"] == record["baseline"] for record in asked)
    by_name = {record["baseline"]: record for record in [*asked, *told(functions["train"]), *functions["validation"]]}
    release = by_name["get optional release"]  # of __future__._Feature, in every Python
    assert release["source"] == "def get optional release self return self optional"
    assert release["target"].startswith("Return first release in which this feature was recognized")


@pytest.mark.parametrize("column", ["text", "target"])
def test_nothing_that_is_held_out_is_trained_on(docstrings, functions, column):
    parts = docstrings if column == "text" else functions
    trained = {said(record[column]) for record in told(parts["train"])}
    held_out = {said(record[column]) for record in parts["validation"]}
    assert held_out
    assert not trained & held_out


def test_every_process_has_the_same_records(cache, functions):
    again = parts_of("stdlib-functions", cache)
    assert again == functions


def test_what_is_found_in_a_file(tmp_path):
    file = tmp_path / "things.py"
    file.write_text(
        textwrap.dedent('''\
        """Things."""

        class Box:
            """A box."""

            def open(self):  # a comment
                """Open it. Then look."""
                return 1

            def shut(self):
                return 2

        if Box:
            def empty(): "Say nothing."
    ''')
    )
    found = list(documented(file, Path("pack/things.py")))
    assert [(entry["package"], entry["top"], entry["name"]) for entry in found] == [
        ("pack", "pack/things.py:", ""), ("pack", "pack/things.py:Box", "Box"),
        ("pack", "pack/things.py:Box", "open"), ("pack", "pack/things.py:", "empty"),
    ]  # fmt: skip
    assert [entry["code"] for entry in found] == ["", "", "def open(self):\n    return 1", "def empty():\n    pass"]
    file.write_text("print 'Python 2'")
    assert not list(documented(file, Path("things.py")))


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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Open it. Then look.", "Open it."),
        ("Open it\n\nwith care.", "Open it"),
        ("Open a file, e.g. a\n    text file. See above.", "Open a file, e.g. a text file."),
        ("Return 3.5 or less", "Return 3.5 or less"),
    ],
)
def test_first_sentence(text, sentence):
    assert first_sentence(text) == sentence


def test_the_trivial_answers_are_scored_as_the_models_are(cache):
    flags = ["--config_name", "blenderbot-400M-distill", "--train_tokenizer_vocab_size", "400",
             "--dataset_name", "stdlib-functions", "--max_train_samples", "50", "--max_eval_samples", "40",
             "--cache_dir", cache]  # fmt: skip
    recipe = parse_recipe(Seq2SeqRecipe, flags)
    from transformers import AutoModelForSeq2SeqLM

    data = prepare_pairs(recipe, load_configuration(recipe, AutoModelForSeq2SeqLM))
    assert len(data.validation.baseline) == len(data.validation.targets) == len(data.validation.samples) == 40
    (line,) = trivial_answers(data.validation)
    assert re.fullmatch(r"baseline    the words of the function's name: bleu [\d.]+, rouge1 [\d.]+, .*", line)
    data.validation.baseline = data.validation.targets
    assert "rouge1 100.0000" in trivial_answers(data.validation)[0]


def test_the_help_names_them():
    from train.recipe.options import SourceOptions

    shown = SourceOptions.__dataclass_fields__["dataset_name"].metadata["help"]
    assert len(EMBEDDED) == 2
    assert all(name in shown for name in EMBEDDED)
