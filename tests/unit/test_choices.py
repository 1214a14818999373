"""Multiple choice: the columns and labels of the known data sets, samples of several rows, their loss."""

import numpy as np
import pytest
from datasets import ClassLabel, Dataset
from helpers import read_data, refusal, write_records

from zerofit.data.collate import ExampleCollator
from zerofit.data.labelled.examples import find_choices, prepare_examples
from zerofit.data.order import FILLER
from zerofit.model.configuration import load_configuration
from zerofit.model.loss import IGNORE
from zerofit.model.tokenizer import padding_values
from zerofit.recipe import ClsRecipe, parse_recipe
from zerofit.training.classification import figures_of
from zerofit.training.measurement import stretch_sample

QUESTION = {"question": "Which is red?"}
FORMS = {  # how it is published: (a record, the texts of its choices, which is right)
    "JCommonsenseQA": ({"q_id": 1, **QUESTION, "choice0": "sky", "choice1": "blood", "choice2": "sea", "label": 1},
                       ("Which is red?", ["sky", "blood", "sea"]), 1),
    "SWAG": ({"video-id": "x", "startphrase": "He sits. He", "sent1": "He sits.", "sent2": "He", "gold-source": "gold",
              "ending0": "runs.", "ending1": "eats.", "label": 0}, ("He sits.", ["He runs.", "He eats."]), 0),
    "CommonsenseQA": ({**QUESTION, "choices": {"label": ["A", "B"], "text": ["sky", "blood"]}, "answerKey": "B"},
                      ("Which is red?", ["sky", "blood"]), 1),
    "RACE": ({"article": "It was red.", **QUESTION, "options": ["sky", "blood"], "answer": "A"},
             ("It was red.", ["Which is red? sky", "Which is red? blood"]), 0),
    "PIQA": ({"goal": "Sit.", "sol1": "on it", "sol2": "in it", "label": 1}, ("Sit.", ["on it", "in it"]), 1),
    "Winogrande": ({"sentence": "The _ is red.", "option1": "sky", "option2": "sea", "answer": "2"},
                   ("The _ is red.", ["sky", "sea"]), 1),
    "HellaSwag": ({"ctx": "He", "endings": ["runs.", "eats."], "label": "1"}, ("He", ["runs.", "eats."]), 1),
    "CosmosQA": ({"context": "It was red.", **QUESTION, "answer0": "sky", "answer1": "blood", "label": 1},
                 ("It was red.", ["Which is red? sky", "Which is red? blood"]), 1),
    "SocialIQA": ({"context": "It was red.", **QUESTION, "answerA": "sky", "answerB": "blood", "label": "2"},
                  ("It was red.", ["Which is red? sky", "Which is red? blood"]), 1),
    "MedQA": ({**QUESTION, "options": {"A": "sky", "B": "blood"}, "answer": "B"},
              ("Which is red?", ["sky", "blood"]), 1),
    "a column": ({**QUESTION, "option_a": "sky", "option_b": "blood", "label": "option_b"},
                 ("Which is red?", ["sky", "blood"]), 1),
}  # fmt: skip


@pytest.fixture
def recipe_of(pairs_tokenizer, tmp_path):
    words = ["--model_type", "bert", "--tokenizer_name", pairs_tokenizer, "--cache_dir", tmp_path / "cache"]
    return lambda path, *flags: parse_recipe(ClsRecipe, list(map(str, [*words, "--train_file", path, *flags])))


def others(record: dict) -> list[dict]:
    """Records that show where the numbers of the choices begin."""
    name = next(name for name in ("label", "answer", "answerKey") if name in record)
    values = {"A": "AB", "B": "AB", "2": "12", "option_b": ["option_a"]}.get(
        record[name], (0, 1) if record[name] in (0, 1) else "01"
    )
    return [{**record, name: value} for value in values]


@pytest.mark.parametrize("form", list(FORMS))
def test_published_forms(recipe_of, tmp_path, form):
    record, (question, texts), right = FORMS[form]
    recipe = recipe_of(write_records(tmp_path / "a.jsonl", [record, *others(record)]))
    table = read_data(recipe).parts["train"]
    choices = find_choices(recipe, table)
    assert choices.read(table[0]) == ([(question, text) for text in texts], right)


@pytest.mark.parametrize(
    ("choices", "numbers", "right"),
    [
        (["a", "b", "c"], [1, 2], [1, 2]),
        (["a", "b", "c"], [1, 2, 3], [0, 1, 2]),
        ({"text": ["a", "b", "c"], "label": []}, [2, 1], [2, 1]),
        (["one ", "two", "3"], ["two", "one"], [1, 0]),  # by their texts
        (["2", "3", "4"], [3, 4], [1, 2]),
        (["2", "3", "4"], [1, 2], [1, 2]),
    ],
)
def test_whether_numbers_of_choices_begin_at_one(recipe_of, tmp_path, choices, numbers, right):
    records = [{**QUESTION, "choices": choices, "label": number} for number in numbers]
    recipe = recipe_of(write_records(tmp_path / "a.jsonl", records))
    table = read_data(recipe).parts["train"]
    found = find_choices(recipe, table)
    assert [found.read(record)[1] for record in table] == right


@pytest.mark.parametrize(("classes", "numbers", "right"), [(["B", "C"], [0, 1], [1, 2]), (["1", "3"], [0, 1], [0, 2])])
def test_numbers_of_classes_are_those_of_their_names(recipe_of, tmp_path, classes, numbers, right):
    table = Dataset.from_list([{**QUESTION, "choices": ["a", "b", "c"], "answer": number} for number in numbers])
    table.cast_column("answer", ClassLabel(names=classes)).to_parquet(tmp_path / "a.parquet")
    recipe = recipe_of(tmp_path / "a.parquet", "--validation_split_percentage", 0)
    data = prepare_examples(recipe, load_configuration(recipe))
    assert data.train.labels.tolist() == right


def test_what_is_no_multiple_choice(recipe_of, tmp_path):
    plain = write_records(tmp_path / "a.jsonl", [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}])
    recipe = recipe_of(plain)
    assert find_choices(recipe, read_data(recipe).parts["train"]) is None
    record = FORMS["JCommonsenseQA"][0]
    recipe = recipe_of(write_records(tmp_path / "b.jsonl", others(record)), "--text_columns", "question")
    assert find_choices(recipe, read_data(recipe).parts["train"]) is None
    recipe = recipe_of(tmp_path / "b.jsonl", "--choice_columns", "choice0", "nothing")
    assert "no column 'nothing'" in refusal(find_choices, recipe, read_data(recipe).parts["train"])


def test_samples_and_their_loss(recipe_of, tmp_path):
    """Records of two and three choices: a batch has three, and the missing one is never chosen."""
    two = {**QUESTION, "choices": ["the sky", "blood"], "label": 1}
    three = {**QUESTION, "choices": ["a", "much longer than the others are", "c"], "label": 2}
    bad = {**QUESTION, "choices": ["a", "b"], "label": 7}
    path = write_records(tmp_path / "a.jsonl", [two, three] * 6 + [{**two, "label": 0}, bad])
    flags = ("--max_length", "64", "--validation_split_percentage", "25")
    recipe = recipe_of(path, *flags)
    config = load_configuration(recipe)
    assert "record 14: its label 7 is not one of the 2 choices" in refusal(prepare_examples, recipe, config)
    recipe = recipe_of(path, *flags, "--skip_bad_records")
    data = prepare_examples(recipe, config)
    assert (len(data.train), len(data.held_out[0].samples)) == (10, 3)
    assert data.labels.names == ("0", "1", "2")
    assert figures_of(data.labels, data.held_out, None) == ("accuracy", "loss")

    sizes = [len(data.train[index]["sizes"]) for index in range(10)]
    small, large = sizes.index(2), sizes.index(3)
    collate = ExampleCollator(padding_values(data.tokenizer))
    batch = collate([(data.train[small], small), (data.train[large], large), (data.train[large], FILLER)])
    assert batch.inputs["input_ids"].shape == (3, 3, max(data.train.lengths) // 3)
    assert batch.num_targets == 2
    alone = [collate([(data.train[index], index)]).num_tokens for index in (small, large)]
    assert batch.num_tokens == sum(alone), "whatever a sample is batched with"
    assert batch.labels.tolist() == [data.train.labels[small], 2, IGNORE]
    row = batch.inputs["input_ids"][1, 1][batch.inputs["attention_mask"][1, 1] == 1]
    assert data.tokenizer.decode(row) == "[CLS] Which is red?[SEP] much longer than the others are[SEP]"

    longest = stretch_sample(data.train[large], {"input_ids": 50})
    assert longest["sizes"].tolist() == [16, 16, 18]
    assert collate([(longest, 0)]).inputs["token_type_ids"].shape == (1, 3, 18)
    assert np.issubdtype(longest["label"].dtype, np.integer)
