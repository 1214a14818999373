"""Token classification: tags at the first token of each word, their loss, entities as seqeval finds them."""

import gzip
import io

import pytest
import torch
from helpers import check_refusal, labelled_recipe, planned_bert, refusal

from zerofit.data.collate import ExampleCollator
from zerofit.data.labelled.examples import find_entities, prepare_examples
from zerofit.data.labelled.labels import HeldOut, Labels
from zerofit.data.order import FILLER
from zerofit.data.sources import read_sentences
from zerofit.model.configuration import load_configuration
from zerofit.model.loss import IGNORE, loss_of_examples
from zerofit.model.tokenizer import padding_values
from zerofit.recipe import ClsRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.tools.plan.plan_options import PlanOptions
from zerofit.tools.tool_recipe import read_with_recipe
from zerofit.training.classification import figures_of, report_classes
from zerofit.training.evaluation import compute

WORDS = ["Licensor", "Apache", "is", "unquestionably", "here"]
TAGS = ["B-WHO", "I-WHO", "O", "O", "B-WHERE"]


@pytest.fixture
def recipe_of(pairs_tokenizer, tmp_path):
    return lambda records, *flags: labelled_recipe(tmp_path / "tags.jsonl", records, pairs_tokenizer, *flags)


def test_tags_stand_at_first_tokens(recipe_of):
    records = [{"tokens": WORDS, "ner_tags": TAGS}] * 7 + [{"tokens": WORDS[:1], "ner_tags": ["O"]}]
    recipe = recipe_of(records, "--max_length", "16")
    data = prepare_examples(recipe, load_configuration(recipe))
    assert data.labels.names == ("B-WHERE", "B-WHO", "I-WHO", "O")
    assert data.labels.entities
    assert any("max_length" in note for note in data.notes), "longer sentences are counted"
    assert figures_of(data.labels, data.held_out, None)[0] == "f1"
    sample = next(row for row in map(data.train.__getitem__, range(6)) if len(row["tags"]) == 5)
    batch = ExampleCollator(padding_values(data.tokenizer))([(sample, 0), (sample, FILLER)])
    expected = torch.full((16,), IGNORE)
    encoded = data.tokenizer(WORDS, is_split_into_words=True, truncation=True, max_length=16)
    for place, word in reversed([*enumerate(encoded.word_ids())]):
        if word is not None:
            expected[place] = data.labels.names.index(TAGS[word])
    for place in range(1, 16):
        if encoded.word_ids()[place] == encoded.word_ids()[place - 1]:
            expected[place] = IGNORE
    assert torch.equal(batch.labels[0], expected)
    assert (batch.labels[1] == IGNORE).all()
    assert batch.num_targets == (expected != IGNORE).sum() < 5, "the last word is cut off"
    logits = torch.randn(2, 16, 4)
    assert torch.allclose(
        loss_of_examples(logits, batch.labels),
        torch.nn.functional.cross_entropy(logits[0], expected, reduction="sum", ignore_index=IGNORE),
    )


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"ner_tags": TAGS[:2]}, "2 tags"),
        ({"tokens": [], "ner_tags": []}, "no words"),
        ({"tokens": ["a", " "], "ner_tags": ["O", "O"]}, "empty word"),
        ({"tokens": ["a", "b"], "ner_tags": [-100, "O"]}, "a tag is -100 (ner_tags)"),
    ],
)
def test_bad_records(recipe_of, bad, said):
    good = {"tokens": WORDS, "ner_tags": TAGS}
    recipe = recipe_of([good] * 8 + [good | bad])
    check_refusal(["record 9", said], prepare_examples, recipe, load_configuration(recipe))


def test_entities_are_those_of_seqeval():
    for tags, expected in {  # of seqeval 1.2.2, get_entities
        "B-A I-A O I-B": [("A", 0, 1), ("B", 3, 3)],
        "I-A B-A I-B I-B": [("A", 0, 0), ("A", 1, 1), ("B", 2, 3)],
        "S-A B-A I-A E-A E-A O": [("A", 0, 0), ("A", 1, 3), ("A", 4, 4)],
        "B-A-B I-A-B O": [("A-B", 0, 1)],
        "U-A U-A B-A I-A L-A L-B O": [("A", 0, 0), ("A", 1, 1), ("A", 2, 4), ("B", 5, 5)],  # BILOU, as spaCy has it
    }.items():
        assert find_entities([[], tags.split()]) == {(1, *entity) for entity in expected}
        assert Labels(tuple(tags.split()), is_token_level=True).entities
    figures = compute("entities", [["B-A", "I-A", "O", "B-B"]], [["B-A", "O", "O", "B-B"]])
    assert figures == {"f1": 0.5, "precision": 0.5, "recall": 0.5, "accuracy": 0.75}


def test_a_table_of_tags_that_are_no_entities(tmp_path):
    labels, folder = Labels(("DET", "NOUN", "VERB"), is_token_level=True), RunFolder(str(tmp_path))
    rows = [["DET", "NOUN", "NOUN"], ["DET", "VERB", None], ["VERB"], ["NOUN"]]
    folder.write_predictions({"label": truth, "prediction": found} for truth, found in zip(rows[::2], rows[1::2]))
    head, text = report_classes(folder, labels, [HeldOut(None, None, "")])
    assert "3 held-out words" in head
    header, *classes = [line.split() for line in text.splitlines()]
    assert header == ["class", "precision", "recall", "f1", "words", "predicted"]
    assert [row for row in classes if row[0] in labels.names] == [
        ["DET", "1.0000", "1.0000", "1.0000", "1", "1"],
        ["NOUN", "0.0000", "0.0000", "0.0000", "1", "1"],
        ["VERB", "0.0000", "0.0000", "0.0000", "1", "1"],
    ]


CONLL = """-DOCSTART- -X- O O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

-DOCSTART- -X- O O
Peter NNP B-NP B-PER
"""


@pytest.mark.parametrize("name", ["a.conll", "a.conll.gz"])
def test_conll_files(pairs_tokenizer, tmp_path, name):
    path, text = tmp_path / name, (CONLL * 5).encode("utf-8-sig")
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    recipe = ClsRecipe(
        model_type="bert",
        tokenizer_name=str(pairs_tokenizer),
        train_file=[str(path)],
        cache_dir=tmp_path / "cache",
        validation_split_percentage=20,
    )
    data = prepare_examples(recipe, load_configuration(recipe))
    assert data.labels.names == ("B-ORG", "B-PER", "O")
    rows = [*data.held_out[0].tables[0]["tokens"]]
    assert len(data.train) + len(rows) == 10
    assert all(row in (["EU", "rejects"], ["Peter"]) for row in rows)


def sentences_of(text: str, path) -> list[dict]:
    return list(read_sentences(io.StringIO(text, newline=None), path))


def test_columns_of_conll_files(tmp_path):
    assert sentences_of("a\n\nb\n", tmp_path) == [{"tokens": ["a"]}, {"tokens": ["b"]}]
    read = sentences_of("New York\tB-LOC\r\n\u2028\tO\n\t\n.\tO", tmp_path)
    assert read == [{"tokens": ["New York", "\u2028"], "tags": ["B-LOC", "O"]}, {"tokens": ["."], "tags": ["O"]}]
    assert sentences_of("B-52 B-X\nO O\n", tmp_path) == [{"tokens": ["B-52", "O"], "tags": ["B-X", "O"]}]


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_comments_and_line_ends_of_conll_files(tmp_path, ends):
    comments = "# id 52\tdomain=en\n# sent_id = 1\n# newdoc\n# global.columns = A B\n#text=a # b\n"
    text = f"{comments}a _ _ O\n# _ _ B-X\n\n{comments}# _ _ O\n# = _ B-X\n".replace("\n", ends)
    rows = sentences_of(text, tmp_path)
    assert rows == [{"tokens": ["a", "#"], "tags": ["O", "B-X"]}, {"tokens": ["#", "#"], "tags": ["O", "B-X"]}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a O\nb\n", "line 2"),
        ("a X O\n\nb O", "line 3"),
        ("a\tO\nb\t\n", "line 2"),
        ("\tO", "line 1"),
        ("1 The the DET _\n2 dog dog NOUN SpaceAfter=No\n", "numbers of words, as in CoNLL-U"),
        ("O\ta\n\nO\twith\nB-Rating\tfive\n", "line 5: the first column has the tags"),
        ("\n\n", "no "),
    ],
)
def test_bad_lines_of_conll_files(tmp_path, text, said):
    assert said in refusal(sentences_of, text, tmp_path)


def test_a_plan_counts_logits_of_each_word():
    (few, least), (of_words, most) = (planned_bert("--num_tags", number) for number in ("100", "1000"))
    assert few == of_words == "BertForTokenClassification"
    logits = 4 * 64 * 900 * 4
    assert most - least == pytest.approx(3 * logits, rel=0.05)
    assert planned_bert("--train_file", "a.conll.gz")[0] == of_words
    assert "num_tags" in refusal(read_with_recipe, PlanOptions, ["--task", "clm", "--num_tags", "3"], "test")
