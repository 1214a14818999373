"""Labels: which there are, in which order, and the number of each record's."""

import numpy as np
import pytest
from datasets import ClassLabel, Value
from helpers import refusal
from transformers import BertConfig

from zerofit.data.labelled.labels import (
    MISSING,
    Labels,
    configure_labels,
    find_labels,
    in_model_order,
    rare_labels,
    renamed_head,
)

NAN = float("nan")
YES_NO = Labels(("no", "yes"))


def found(values, feature=None, regression=None) -> Labels:
    return find_labels(values, "train.csv", feature, regression)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([2, 0, 1, 0], ("0", "1", "2")),
        ([10, 9, 2], ("2", "9", "10")),  # numbers in their own order, not as words
        (["10", "9", "2"], ("2", "9", "10")),
        ([-1, 0, 1], ("-1", "0", "1")),  # a class like any other, where nobody says what it stands for
        ([1.0, 0.0], ("0", "1")),
        (["1.0", "0.0"], ("0", "1")),
        (["1.0", "1", "0"], ("0", "1")),
        (["yes", "no", "yes"], ("no", "yes")),
        (["1", "x"], ("1", "x")),
        ([True, False], ("False", "True")),
        ([1.0, NAN, 0.0], ("0", "1")),  # pandas stores a missing label so
        (["yes", "", "no", None, "-"], ("no", "yes")),
    ],
)
def test_classes_that_are_found(values, names):
    labels = found(values)
    assert labels.names == names
    assert labels.num_outputs == len(names)
    there = [number for number in labels.encode(values, "train.csv").tolist() if number != MISSING]
    assert sorted(set(there)) == list(range(len(names)))


def test_the_same_class_written_in_different_ways():
    labels = Labels(("0", "1"))
    for values in ([1, 0], ["1", "0"], [1.0, 0.0], ["1.0", "0.0"]):
        numbers = labels.encode(values, "f.csv")
        assert numbers.tolist() == [1, 0]
        assert numbers.dtype == np.int64


@pytest.mark.parametrize("nothing", [None, "", " ", "-", NAN, "nan"])
def test_no_label_is_missing_and_no_class(nothing):
    assert YES_NO.encode(["yes", nothing, "no"], "f.csv").tolist() == [1, MISSING, 0]
    numbers = Labels(None).encode([0.5, nothing, 2], "f.csv")
    assert numbers.dtype == np.float32
    assert np.array_equal(numbers, np.float32([0.5, NAN, 2]), equal_nan=True)


def test_a_class_label_column_names_its_numbers():
    feature = ClassLabel(names=["spam", "ham"])
    labels = found([0, 1, 1], feature)
    assert labels.names == ("spam", "ham")  # not sorted: the data has an order of its own
    assert labels.encode([1, 0], "hub", tuple(feature.names)).tolist() == [1, 0]
    assert found([0, 1, 3], ClassLabel(names=["a", "b", "c", "d"]), regression=True).names is None


def test_glue_labels_as_numbers_names_and_the_hubs_minus_one():
    names = ("entailment", "neutral", "contradiction")
    labels = Labels(names)
    assert labels.encode([0, 2, -1], "hub", names).tolist() == [0, 2, MISSING]
    assert labels.encode(["0", "2", "-1"], "tsv", names).tolist() == [0, 2, MISSING]
    assert labels.encode(["neutral", "-"], "tsv", names).tolist() == [1, MISSING]


def test_numbers_of_the_data_follow_its_names_into_the_models_order():
    labels = Labels(("ham", "spam"))
    assert labels.encode([0, 1], "hub", ("spam", "ham")).tolist() == [1, 0]


@pytest.mark.parametrize(("value", "class_names"), [("maybe", None), (2, ("no", "yes")), ("2", ("no", "yes"))])
def test_outside_the_label_set(value, class_names):
    message = refusal(YES_NO.encode, ["yes", "no", value, value], "dev.tsv", class_names)
    assert f"dev.tsv, record 3: the label {value!r} is outside the label set (no, yes)" in message


@pytest.mark.parametrize(
    ("values", "regression"),
    [([0.5, 1.0], None), (["0.5", "1"], None), ([0.5, NAN], None), ([1, 2, 3], True), (["1", "2"], True)],
)
def test_regression(values, regression):
    labels = found(values, Value("float32"), regression)
    assert labels.names is None
    assert labels.num_outputs == 1


def test_fractional_numbers_are_classes_where_the_recipe_says_so():
    assert found([0.5, 1.5, 0.5], regression=False).names == ("0.5", "1.5")


@pytest.mark.parametrize("value", ["good", "inf", float("inf")])
def test_what_is_no_number(value):
    """The record named is the one at fault, not an earlier one without a label."""
    message = refusal(Labels(None).encode, [None, 0.5, value], "a.csv")
    assert f"a.csv, record 3: the label {value!r} is no number" in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([None, "", "-", NAN], "train.csv: no record has a label"),
        ([1, 1, 1], "only one label, '1'"),
        (["1", "1.0"], "only one label, '1'"),
        (list(range(1001)), "1,001 different labels"),
        ([f"word {n}" for n in range(1001)], "1,001 different labels"),
    ],
)
def test_nothing_to_classify(values, words):
    message = refusal(found, values)
    assert words in message
    assert "label_column" in message


def pretrained(*names: str) -> BertConfig:
    return BertConfig(id2label=dict(enumerate(names)), architectures=["BertForSequenceClassification"])


@pytest.mark.parametrize(
    ("ours", "theirs", "order"),
    [
        (("contradiction", "entailment", "neutral"), ("CONTRADICTION", "NEUTRAL", "ENTAILMENT"),
         ("contradiction", "neutral", "entailment")),
        (("a", "b"), ("b", "a"), ("b", "a")),
        (("a", "b"), ("LABEL_0", "LABEL_1"), ("a", "b")),
        (("a", "b"), ("b", "c"), ("a", "b")),
        (("a", "b"), ("b", "a", "c"), ("a", "b")),
        (("No", "no", "yes"), ("yes", "no"), ("No", "no", "yes")),  # no class may be lost
        (None, ("LABEL_0",), None),
    ],
)  # fmt: skip
def test_a_pretrained_models_own_order(ours, theirs, order):
    assert in_model_order(Labels(ours), pretrained(*theirs)).names == order


def test_ten_classes_are_ordered_by_number_and_not_by_their_text():
    names = tuple(f"topic {n}" for n in range(12))
    assert in_model_order(Labels(tuple(sorted(names))), pretrained(*names)).names == names


@pytest.mark.parametrize("labels", [Labels(("a", "b", "c")), Labels(None, number="score")])
@pytest.mark.parametrize("model", [None, "a-body-without-a-head"])
def test_the_labels_go_into_the_configuration(labels, model):
    config = BertConfig()
    assert configure_labels(config, labels, model, False) is None
    assert config.num_labels == labels.num_outputs
    assert config.id2label == dict(enumerate(labels.names or ("score",)))
    assert config.label2id == {name: number for number, name in config.id2label.items()}
    assert config.problem_type == ("single_label_classification" if labels.names else "regression")


@pytest.mark.parametrize(
    ("labels", "ours"), [(Labels(("a", "b", "c")), "3 labels (a, b, c)"), (Labels(None), "one number")]
)
def test_another_number_of_labels(labels, ours):
    message = refusal(configure_labels, pretrained("no", "yes"), labels, "some/model", False)
    assert "model_name_or_path = 'some/model' was trained for 2 labels (no, yes)" in message
    assert ours in message
    assert "--ignore_mismatched_sizes" in message
    config = pretrained("no", "yes")
    had = configure_labels(config, labels, "some/model", True)
    assert had == 2, "the outputs of the head that is to be replaced"
    assert config.num_labels == labels.num_outputs


def test_the_same_number_of_labels_is_no_mismatch():
    assert configure_labels(pretrained("no", "yes"), Labels(("0", "1")), "some/model", False) is None
    assert configure_labels(pretrained("no", "yes"), Labels(("a", "b", "c")), None, False) is None  # from scratch


def test_a_head_that_goes_on_under_other_names_is_said():
    note = renamed_head(pretrained("neg", "pos"), Labels(("alpha", "zeta")), "some/model")
    assert note.endswith("neg as alpha, pos as zeta")
    assert renamed_head(pretrained("neg", "pos"), Labels(("neg", "pos")), "some/model") is None
    assert renamed_head(pretrained("NEG", "POS"), Labels(("neg", "pos")), "some/model") is None
    assert renamed_head(pretrained("neg", "pos"), Labels(("alpha", "zeta")), None) is None, "from scratch"


def test_an_index_taken_for_the_label():
    names = tuple(map(str, range(100)))
    assert "100 of 100" in rare_labels(Labels(names, number="id"), np.arange(100))[0]
    assert "label_column = 'id'" in rare_labels(Labels(names, number="id"), np.append(np.arange(100), MISSING))[0]
    assert not rare_labels(Labels(names), np.arange(200) // 2)
    assert not rare_labels(Labels(names[:3]), np.arange(3))
    assert not rare_labels(Labels(None), np.linspace(0, 1, 100, dtype=np.float32))
