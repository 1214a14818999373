"""Labels: which there are, in which order, the number of each record's, and what the log says of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import check_refusal, labelled_recipe, refusal, write_records
from sklearn.utils.class_weight import compute_class_weight
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoConfig, BertConfig

from zerofit.data.collate import ExampleCollator
from zerofit.data.labelled.examples import prepare_examples
from zerofit.data.labelled.labels import (
    Labels,
    class_weights,
    configure_labels,
    find_labels,
    label_report,
    order_as_model,
    trained_labels,
)
from zerofit.data.order import FILLER
from zerofit.data.records import BadRecord
from zerofit.model.configuration import load_configuration
from zerofit.model.loss import loss_of_examples
from zerofit.recipe import ClsRecipe, parse_recipe
from zerofit.record.run_folder import RunFolder

NAN = float("nan")
NLI = ("entailment", "neutral", "contradiction")


def found(values, class_names=None, regression=None) -> Labels:
    return find_labels(values, "train.csv", class_names, regression)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([2, 0, 1, 0], ("0", "1", "2")),
        ([10, 9, 2], ("2", "9", "10")),  # numbers in their own order, not as words
        ([-1, 0, 1], ("-1", "0", "1")),  # a class like any other, where nobody says what it stands for
        (["1.0", "1", "0"], ("0", "1")),
        ([1.0, NAN, 0.0], ("0", "1")),  # pandas stores a missing label so
        (["yes", "", "no", None], ("no", "yes")),
        (["0110", "0210", "110"], ("0110", "0210", "110")),  # a text is a name, byte for byte
        (["900000000000013009", "900000000000013010"], ("900000000000013009", "900000000000013010")),
        (["1e3", "1000", "1_000", "007", "7", "7.0"], ("007", "1000", "1_000", "1e3", "7", "7.0")),
        (["1.0", "0.0"], ("0.0", "1.0")),  # no integer beside them
        (["1.0", 1, 0, "2"], ("0", "1", "2")),
        (["1.0", "1", "dev"], ("1", "1.0", "dev")),  # versions
        (["a", 3, "b"], ("3", "a", "b")),
        (["10", "9", "-1"], ("-1", "9", "10")),
        (["+1", "1"], ("+1", "1")),
        (["nan", "-", "+", "None", "null", "NA", "N/A"], ("+", "-", "N/A", "NA", "None", "nan", "null")),
        (["true", "True", "false", "Infinity", "-inf", "1E5"], ("-inf", "1E5", "Infinity", "True", "false", "true")),
        (["\u00b2", "2", "\u0662"], ("2", "\u00b2", "\u0662")),  # digits that are no ASCII
        (["2024-01-01", "2024-01-02"], ("2024-01-01", "2024-01-02")),
    ],
)
def test_classes_that_are_found(values, names):
    labels = found(values)
    assert labels.names == names
    assert labels.num_outputs == len(names)
    there = [labels.encode(value) for value in values if value not in (None, "") and value == value]
    assert sorted(set(there)) == list(range(len(names)))


@pytest.mark.parametrize(("names", "class_names", "value", "number"), [
    (("0", "1"), None, 1, 1), (("0", "1"), None, "1", 1), (("0", "1"), None, 1.0, 1), (("0", "1"), None, "1.0", 1),
    (NLI, NLI, 2, 2), (NLI, NLI, "2", 2), (NLI, NLI, "neutral", 1),
    (("0.0", "1.0"), None, 1, 1), (("0", "1"), None, " 1 ", 1), (("no", "yes"), None, "yes ", 1),
    (("no", "yes"), ("no", "yes"), "1.0", 1), (("007", "7"), None, "007", 0), (("007", "7"), None, 7, 1),
    (None, None, "1e3", 1000.0), (None, None, " 2 ", 2.0),
    (("1", "2", "3"), ("1", "2", "3"), 1, 1),  # a number of a class, and not the name that looks like it
    (("ham", "spam"), ("spam", "ham"), 0, 1),  # numbers of the data follow its names into the model's order
    (None, None, "0.5", 0.5), (None, None, 2, 2.0),
])  # fmt: skip
def test_the_same_label_written_in_different_ways(names, class_names, value, number):
    assert Labels(names).encode(value, class_names) == number


@pytest.mark.parametrize(("names", "class_names", "value", "words"), [
    *((("no", "yes"), None, nothing, "no label") for nothing in (None, "", " ", NAN)),
    *((None, None, nothing, "no label") for nothing in (None, "", NAN)),
    (NLI, NLI, -1, "no label"), (NLI, NLI, "-1", "no label"),
    (("no", "yes"), None, "maybe", "label set"), (("no", "yes"), ("no", "yes"), "2", "label set"),
    (("0110", "110"), None, "0210", "label set"), (("1000", "2"), None, "1e3", "label set"),
    (None, None, "1_000", "not a number"), (None, None, "0,5", "not a number"), (None, None, "nan", "not a number"),
    (None, None, "good", "not a number"), (None, None, float("inf"), "not a number"),
])  # fmt: skip
def test_labels_that_are_refused(names, class_names, value, words):
    with pytest.raises(BadRecord, match=words):
        Labels(names).encode(value, class_names)


def test_the_missing_mark_of_snli_is_a_name_elsewhere():
    assert Labels(("+", "-")).encode("-") == 1
    with pytest.raises(BadRecord, match="no label"):
        Labels(NLI, number="gold_label").encode("-")
    assert find_labels([*NLI, "-"], "a.csv", None, None, "gold_label").names == tuple(sorted(NLI))


def test_blanks_around_labels_are_removed_and_said():
    labels = found([" pos", "pos ", "pos", "neg"])
    assert labels.names == ("neg", "pos")
    assert "' pos', 'pos '" in labels.notes[0]
    assert not found(["pos", "neg"]).notes
    assert "the label -1 is a class" in found([0, 1, 2, -1]).notes[0]  # SNLI's, as to_json writes it
    assert not found([-1, 1]).notes


@pytest.mark.parametrize("values", [["0,5", "1,25", "2"], ["-0,5", ",5"], ["1,5e3", "2"]])
def test_decimal_commas_are_numbers_if_that_is_said(values):
    assert "--regression true" in refusal(found, values)
    assert found(values, regression=False).names
    labels = found(values, regression=True)
    assert "decimal commas" in labels.notes[0]
    assert [labels.encode(value) for value in values] == [float(value.replace(",", ".")) for value in values]


@pytest.mark.parametrize("values", [["['a', 'b']", "['a']", "[]"], ["c; a", "a", "c"], ["a", "b|c", "c", "b", "c|d"]])
def test_several_labels_in_a_text_are_no_classes(values):
    assert ".jsonl" in refusal(found, values)
    assert len(found(values, regression=False).names) == len(values)
    assert found(["a, b", "a", "c|d"]).names, "no label joins others"


@pytest.mark.parametrize("other", ["NA", "NULL", "-", "n/a", "inf", "#N/A", float("inf")])
def test_a_name_among_numbers_is_told(other):
    values = ["0.5", "1.25", "3", other] if isinstance(other, str) else [0.5, 1.25, 3.0, other]
    assert f"{str(other)!r} is none" in refusal(found, values)
    assert found(values, regression=True).names is None
    assert len(found(values, regression=False).names) == 4
    assert found(["dev", "beta", "1.5"]).names == ("1.5", "beta", "dev")


@pytest.mark.parametrize(
    "values", [["1 234,5", "2 500,0"], ["1\u202f234", "12"], ["1'234.5", "2"], ["1\u2019234", "2"]]
)
def test_numbers_with_blanks_or_apostrophes_are_no_classes(values):
    assert "--regression" in refusal(found, values)
    assert len(found(values, regression=False).names) == 2


@pytest.mark.parametrize("values", [["1,500", "2,250"], ["0,5", "0.5"], ["1.234,5", "1,0"], ["1,234,567", "2"]])
def test_commas_that_may_separate_thousands_are_refused(values):
    assert "Write 1234.5" in refusal(found, values, regression=True)
    assert "--regression" in refusal(found, values)


@pytest.mark.parametrize(
    ("theirs", "values", "class_names", "numbers"),
    [
        (("No", "no", "yes"), ["no", "yes"], None, [1, 2]),  # their case tells classes apart
        (("POS", "NEG"), ["neg", "pos"], None, [1, 0]),
        (("pos", "neg"), ["Pos", "pos", "neg"], None, [None, 0, 1]),
        (("spam", "ham"), [1, "0"], None, [1, 0]),  # numbers of the classes
        (("spam", "ham"), ["spam", "01"], None, [0, None]),
        (("0110", "110"), ["110", "0110"], None, [1, 0]),
        (("1", "2"), ["2.0", "1.0"], None, [1, 0]),
        (("3", "1"), ["1", "3"], None, [1, 0]),  # names, not numbers of classes
        (("c", "a", "b"), [0, 1, "c"], ("a", "c"), [1, 0, 0]),  # data with fewer classes
    ],
)
def test_labels_of_data_for_a_trained_model(theirs, values, class_names, numbers):
    labels, numbered = trained_labels(pretrained(*theirs), class_names, values)
    for value, number in zip(values, numbers):
        if number is None:
            with pytest.raises(BadRecord):
                labels.encode(value, numbered)
        else:
            assert labels.encode(value, numbered) == number


def test_a_class_label_column_names_its_numbers():
    assert found([0, 1, 1], ("spam", "ham")).names == ("spam", "ham")  # an order of its own
    assert found([0, 1, 3], ("a", "b", "c", "d"), regression=True).names is None


@pytest.mark.parametrize(
    ("values", "regression"),
    [([0.5, 1.0], None), (["0.5", "1"], None), ([0.5, NAN], None), ([1, 2, 3], True), (["1", "2"], True)],
)
def test_regression(values, regression):
    labels = found(values, None, regression)
    assert (labels.names, labels.num_outputs) == (None, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([None, "", " ", NAN], "train.csv: no record has a label"),
        ([1, 1, 1], "only one label, '1'"),
        ([f"word {n}" for n in range(1001)], "1,001 different labels"),
    ],
)
def test_nothing_to_classify(values, words):
    check_refusal([words, "label_column"], found, values)


def pretrained(*names: str) -> BertConfig:
    return BertConfig(id2label=dict(enumerate(names)), architectures=["BertForSequenceClassification"])


@pytest.mark.parametrize(("ours", "theirs", "order"), [
    (("contradiction", "entailment", "neutral"), ("CONTRADICTION", "NEUTRAL", "ENTAILMENT"),
     ("contradiction", "neutral", "entailment")),
    (("a", "b"), ("b", "c"), ("a", "b")),
    (("No", "no", "yes"), ("yes", "no"), ("No", "no", "yes")),  # no class may be lost
])  # fmt: skip
def test_a_pretrained_models_own_order(ours, theirs, order):
    assert order_as_model(Labels(ours), pretrained(*theirs)).names == order


@pytest.mark.parametrize(
    ("labels", "ours"), [(Labels(("a", "b", "c")), "3 labels (a, b, c)"), (Labels(None), "one number")]
)
def test_another_number_of_labels(labels, ours):
    message = refusal(configure_labels, pretrained("no", "yes"), labels, "some/model", False)
    assert "'some/model' has 2 labels (no, yes)" in message
    assert ours in message
    assert "--ignore_mismatched_sizes" in message
    config = pretrained("no", "yes")
    had, _ = configure_labels(config, labels, "some/model", True)
    assert had == 2, "the outputs of the head that is to be replaced"
    assert config.num_labels == labels.num_outputs


# ------------------------------------------------------------------------------------------------------------ weights


def weighted(*words: str, names=("a", "b", "c"), choices=False, **options):
    train = SimpleNamespace(labels=np.array([0, 0, 0, 2, 0, 2]))
    data = SimpleNamespace(labels=Labels(names, choices), train=train, passes=[])
    return class_weights(ClsRecipe(class_weights=[*words] or None, **options), data)


def test_balanced_weights_are_scikit_learns():
    expected = compute_class_weight("balanced", classes=np.array([0, 2]), y=[0, 0, 0, 2, 0, 2])
    assert weighted("balanced") == pytest.approx([expected[0], 1.0, expected[1]])
    assert weighted("c=3", "a=0.5") == [0.5, 1.0, 3.0]
    assert weighted() is None
    assert weighted("balanced", evaluate_only=True, model_name_or_path="x") is None


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (("d=2",), {}, "class_weights"),
        (("balanced",), {"names": None}, "class_weights"),
        ((), {"names": None, "focal_gamma": 2.0}, "focal_gamma"),
        ((), {"choices": True, "label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_weights_of_no_class_are_refused(words, options, said):
    assert said in refusal(weighted, *words, **options)


@pytest.mark.parametrize("words", ["a", "a=0", "a=x", "a=1 a=2", "balanced a=1", "a=inf"])
def test_what_is_no_weight_is_refused(words):
    assert "class_weights" in refusal(parse_recipe, ClsRecipe, ["--class_weights", *words.split()])


# ------------------------------------------------------------------------------- what the log says, and sets of labels


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
    assert data.labels.is_multi_label
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
    _, of_numbers = prepared(tmp_path / "b.jsonl", byte_tokenizer, [[0, 2], [1], [5]] * 4)
    assert of_numbers.labels.names == ("0", "1", "2", "5")


@pytest.mark.parametrize(
    ("labels", "flags", "words"),
    [
        ([[0, 1, 1], [0, 0, 1]] * 4, (), "lists of numbers"),
        ([[0, 1], [1, 0]] * 4, (), "lists of numbers"),
        ([[0.25, 0.75], [0.5, 0.5]] * 4, (), "lists of numbers"),
        (SETS * 4, ("--regression", "true"), "has lists of labels"),
        ([["a"], None] * 4, (), "it has no label"),
        ([["a"]] * 8, (), "only one label"),
    ],
)
def test_lists_that_are_refused(tmp_path, byte_tokenizer, labels, flags, words):
    if None in labels:
        labels[0] = ["b"]
    assert words in refusal(prepared, tmp_path / "a.jsonl", byte_tokenizer, labels, *flags)


@pytest.mark.parametrize(
    ("kind", "labels", "words"),
    [
        ("single_label_classification", [["a"], ["b"]] * 4, "trained for one label a record"),
        ("multi_label_classification", ["a", "b"] * 4, None),  # one label is a set too
        ("multi_label_classification", [["a", "b"], []] * 4, None),
    ],
)
def test_data_for_a_stored_model(tmp_path, byte_tokenizer, kind, labels, words):
    records = [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)]
    recipe = labelled_recipe(tmp_path / "a.jsonl", records, byte_tokenizer)
    config = load_configuration(recipe)
    config.id2label, config.problem_type = {0: "a", 1: "b"}, kind
    recipe.evaluate_only = True
    if words:
        assert words in refusal(prepare_examples, recipe, config)
    else:
        data = prepare_examples(recipe, config)
        assert data.labels.is_multi_label
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
    more = {"prediction": 7, "input_prediction": 8, "probabilities": {"a": 1}, "label": "mine", "name": "kind"}
    _, data = prepared(tmp_path / "a.jsonl", byte_tokenizer, ["a", "b"] * 8, "--label_column", "kind", **more)
    record = next(iter(data.held_out[0].tables[0]))
    kept = {name: value for name, value in record.items() if name not in ("id", "text", "kind")}
    assert kept == {
        "input_input_prediction": 7,
        "input_prediction": 8,
        "input_probabilities": {"a": 1},
        "input_label": "mine",
    }
    assert record["kind"] in ("a", "b")


def test_a_date_of_a_record_is_a_text_in_predictions(tmp_path):
    RunFolder(tmp_path).write_predictions([{"when": np.datetime64("2024-01-01")}])
    assert RunFolder(tmp_path).predictions() == [{"when": "2024-01-01"}]
