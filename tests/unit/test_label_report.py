"""What the log says of the labels, and data whose records have several."""

import numpy as np
import pytest
import torch
from helpers import labelled_recipe, refusal, write_records
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoConfig

from zerofit.data.collate import ExampleCollator
from zerofit.data.labelled.examples import prepare_examples
from zerofit.data.labelled.labels import Labels, class_weights, label_report
from zerofit.data.order import FILLER
from zerofit.model.configuration import load_configuration
from zerofit.model.loss import loss_of_examples
from zerofit.recipe import ClsRecipe, parse_recipe
from zerofit.record.run_folder import RunFolder

SETS = [["a"], [], ["a", "b"], ["c"], ["b", "c"], ["a", "b", "c"]]


def prepared(path, tokenizer, labels, *flags, name="labels", **more):
    records = [{"id": f"{n:03}", "text": f"text {n}", name: label, **more} for n, label in enumerate(labels)]
    recipe = labelled_recipe(path, records, tokenizer, *flags)
    return recipe, prepare_examples(recipe, load_configuration(recipe))


def test_counts_and_notes():
    labels = Labels(("negative", "positive", "postive", "rare"))
    trained, held_out = np.array([0] * 9 + [1] * 8 + [2]), np.array([0, 0, 3])
    report = label_report(labels, [trained[:5], trained[5:]], [held_out])
    text = " ".join(report)
    assert "negative 9 + 2, positive 8 + 0, postive 1 + 0, rare 0 + 1" in text
    assert "fewer than 5 training records: postive (1)" in text
    assert "no training records: rare" in text
    assert "no held-out records: positive, postive" in text
    assert label_report(Labels(None), [trained], []) == []
    many = label_report(Labels(tuple(f"class {n}" for n in range(1000))), [np.arange(1000)], [])
    assert all(len(note) < 400 for note in many)


def test_records_with_several_labels(tmp_path, byte_tokenizer):
    recipe, data = prepared(tmp_path / "a.jsonl", byte_tokenizer, SETS * 4, prediction=7)
    assert data.labels.names == ("a", "b", "c")
    assert data.labels.of_sets
    assert any("training + held out" in note for note in data.notes)
    (part,) = data.held_out
    assert set(part.tables[0].column_names) == {"id", "text", "labels", "input_prediction"}
    numbers = [int(number) for number in part.tables[0]["id"]]
    expected = [[float(name in SETS[number % 6]) for name in "abc"] for number in numbers]
    assert part.samples.labels.tolist() == expected
    assert data.train.labels.dtype == np.float32
    batch = ExampleCollator({"input_ids": 0})([(part.samples[0], 0), (part.samples[1], FILLER)])
    assert batch.num_targets == 1
    assert batch.labels[0].tolist() == expected[0]
    assert batch.labels[1].isnan().all()
    logits = torch.randn(2, 3)
    own = binary_cross_entropy_with_logits(logits[:1], batch.labels[:1])
    torch.testing.assert_close(loss_of_examples(logits, batch.labels), own)
    recipe.label_smoothing = 0.1
    assert "lists" in refusal(class_weights, recipe, data)


@pytest.mark.parametrize(("labels", "flags", "words"), [
    ([[0, 1, 1], [0, 0, 1]] * 4, (), "lists of numbers"),
    ([[0, 1], [1, 0]] * 4, (), "lists of numbers"),
    ([[0.25, 0.75], [0.5, 0.5]] * 4, (), "lists of numbers"),
    (SETS * 4, ("--regression", "true"), "has lists of labels"),
    ([["a"], None] * 4, (), "it has no label"),
    ([["a"]] * 8, (), "only one label"),
])  # fmt: skip
def test_lists_that_are_refused(tmp_path, byte_tokenizer, labels, flags, words):
    if None in labels:
        labels[0] = ["b"]
    assert words in refusal(prepared, tmp_path / "a.jsonl", byte_tokenizer, labels, *flags)


def test_numbers_of_labels_are_sets_too(tmp_path, byte_tokenizer):
    _, data = prepared(tmp_path / "a.jsonl", byte_tokenizer, [[0, 2], [1], [5]] * 4)
    assert data.labels.names == ("0", "1", "2", "5")


@pytest.mark.parametrize(("kind", "labels", "words"), [
    ("single_label_classification", [["a"], ["b"]] * 4, "trained for one label a record"),
    ("multi_label_classification", ["a", "b"] * 4, None),  # one label is a set too
    ("multi_label_classification", [["a", "b"], []] * 4, None),
])  # fmt: skip
def test_data_for_a_stored_model(tmp_path, byte_tokenizer, kind, labels, words):
    recipe = labelled_recipe(
        tmp_path / "a.jsonl", [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)], byte_tokenizer
    )
    config = load_configuration(recipe)
    config.id2label, config.problem_type = {0: "a", 1: "b"}, kind
    recipe.evaluate_only = True
    if words:
        assert words in refusal(prepare_examples, recipe, config)
    else:
        data = prepare_examples(recipe, config)
        assert data.labels.of_sets
        expected = [1.0, 0.0] if labels[0] == "a" else [1.0, 1.0]
        assert expected in data.held_out[0].samples.labels.tolist()


def test_texts_for_a_model_of_label_sets_need_no_labels(tmp_path, byte_tokenizer):
    write_records(tmp_path / "b.jsonl", [{"text": "one", "label": ["x"]}, {"text": "two", "label": []}])
    flags = ["--model_name_or_path", "m", "--tokenizer_name", byte_tokenizer, "--cache_dir", tmp_path / "cache"]
    recipe = parse_recipe(ClsRecipe, [str(word) for word in (*flags, "--predict_file", tmp_path / "b.jsonl")])
    config = AutoConfig.for_model("bert", id2label={0: "a", 1: "b"}, problem_type="multi_label_classification")
    data = prepare_examples(recipe, config)
    assert data.held_out[0].samples.labels.tolist() == [[0.0, 0.0]] * 2
    assert data.held_out[0].tables[0]["label"][:] == [["x"], []]  # of the data


def test_columns_with_the_names_of_predictions_are_kept(tmp_path, byte_tokenizer):
    more = {"prediction": 7, "input_prediction": 8, "probabilities": {"a": 1}, "label": "mine"}
    _, data = prepared(
        tmp_path / "a.jsonl", byte_tokenizer, ["a", "b"] * 8, "--label_column", "kind", name="kind", **more
    )
    record = next(iter(data.held_out[0].tables[0]))
    kept = {name: value for name, value in record.items() if name not in ("id", "text", "kind")}
    assert kept == {
        "input_input_prediction": 7, "input_prediction": 8, "input_probabilities": {"a": 1}, "input_label": "mine"
    }  # fmt: skip
    assert record["kind"] in ("a", "b")


def test_a_date_of_a_record_is_a_text_in_predictions(tmp_path):
    RunFolder(tmp_path).write_predictions([{"when": np.datetime64("2024-01-01")}])
    assert RunFolder(tmp_path).predictions() == [{"when": "2024-01-01"}]
