"""Conversations and other pairs: where they are, what is a reply to what, and what is kept of what is too long."""

import json

import pytest
from datasets import Dataset
from helpers import check_refusal, read_data, refusal, write_records

from zerofit.data.pairs import PairEncoder, PairReader, TextPair, find_columns, prepare_pairs, turn_separator
from zerofit.data.records import BadRecord
from zerofit.model.configuration import load_configuration
from zerofit.model.tokenizer import load_tokenizer
from zerofit.recipe import Seq2SeqRecipe, parse_recipe

TURNS = ["Hi!", "Hello, who are you?", "A cat."]
ROLES = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), TURNS)]


def columns_of(record: dict, **options: str) -> PairReader:
    return find_columns(Seq2SeqRecipe(**options), Dataset.from_list([record]))


@pytest.mark.parametrize(("record", "options", "expected"), [
    ({"id": "1", "dialog": TURNS}, {}, PairReader("dialog", None, None)),
    ({"history": TURNS, "response": "x"}, {}, PairReader("history", None, "response")),
    ({"said": TURNS, "answer": "x"}, {"dialogue_column": "said", "target_column": "answer"},
     PairReader("said", None, "answer")),
    ({"context": "z", "question": "x", "answers": {"text": ["y"]}}, {},
     PairReader(None, "question", "answers", "context")),
    ({"messages": ROLES, "label": False}, {}, PairReader("messages", None, None, verdict="label")),
    ({"dialogue": "a text, no list", "summary": "y"}, {}, PairReader(None, "dialogue", "summary")),
    ({"dialogue": "[10:02] Ann: Hi!", "summary": "y"}, {}, PairReader(None, "dialogue", "summary")),
    ({"dialog": "['Hi!', 'Ho.']", "act": "[1, 2]"}, {}, PairReader("dialog", None, None)),  # DailyDialog as .csv
    ({"turns": {"speaker": [0, 1], "utterance": TURNS[:2]}}, {}, PairReader("turns", None, None)),  # MultiWOZ
    ({"ja": "x", "en": "y"}, {"source_column": "en"}, PairReader(None, "en", "ja")),
    ({"answers": "y", "message": "x"}, {}, PairReader(None, "message", "answers")),
    ({"question": "x", "passage": "z", "answer": True}, {}, PairReader(None, "question", "answer")),  # BoolQ
    ({"a": "1 + 1?", "b": 2}, {"source_column": "a", "target_column": "b"}, PairReader(None, "a", "b")),
    ({"dialog": TURNS, "a": "x", "b": "y", "c": "z"}, {"source_column": "a", "target_column": "c"},
     PairReader(None, "a", "c")),
])  # fmt: skip
def test_columns_that_are_found(record, options, expected):
    found = columns_of(record, **options)
    assert found == expected
    assert all(name in found.describe for name in found.columns if name != found.verdict)


@pytest.mark.parametrize(
    ("record", "options", "words"),
    [
        ({"a": "x", "b": "y", "c": "z"}, {}, "name --source_column and --target_column"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, {}, "the records are preferences"),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, {}, "name --source_column and --target_column"),
        ({"source": "x", "target": ["y", "z"]}, {}, "no pairs (target: no text each, but lists or objects)"),
        ({"a": TURNS, "b": "y"}, {"source_column": "a", "target_column": "b"}, "source_column = 'a' holds no text"),
    ],
)
def test_columns_that_are_not_found(record, options, words):
    check_refusal([words, f"the columns are {', '.join(record)}"], columns_of, record, **options)


ASKED, WHO = PairReader(None, "question", "answers", "context"), {"question": "Who?", "context": "Ann did. "}
EACH_TURN = [TextPair(TURNS[:1], TURNS[1]), TextPair(TURNS[:2], TURNS[2])]


@pytest.mark.parametrize(("columns", "record", "pairs"), [
    (PairReader("d", None, None), {"d": TURNS}, EACH_TURN),
    (PairReader("d", None, None), {"d": ROLES}, EACH_TURN[:1]),
    (PairReader("d", None, None), {"d": str(TURNS)}, EACH_TURN),
    (PairReader("d", None, None), {"d": json.dumps(ROLES)}, EACH_TURN[:1]),
    (PairReader("d", None, None), {"d": [{"from": name, "value": name} for name in ("human", "ai", "human")]},
     [TextPair(["human"], "ai")]),
    (PairReader("d", None, None), {"d": [{"from": "human", "value": "Hi!"}, {"from": "gpt", "value": "Ho!"}]},
     [TextPair(["Hi!"], "Ho!")]),
    (PairReader("d", None, None), {"d": [{"role": "Assistant", "text": "Hi!"}, {"role": "User", "text": "Ho?"},
                                      {"role": "Assistant", "text": "Hm."}]}, [TextPair(["Hi!", "Ho?"], "Hm.")]),
    (PairReader("d", None, None), {"d": [{"speaker": "Ann", "text": "Hi!"}, {"speaker": "Bob", "text": "Ho!"}]},
     [TextPair(["Hi!"], "Ho!")]),  # nobody is an assistant: everybody replies
    (PairReader("d", None, "r"), {"d": TURNS, "r": "Oh "}, [TextPair(TURNS, "Oh")]),
    (PairReader(None, "s", "t"), {"s": " some text", "t": "less\n"}, [TextPair(["some text"], "less")]),
    (PairReader(None, "s", "t"), {"s": "1 + 1?", "t": 2.0}, [TextPair(["1 + 1?"], "2")]),
    (ASKED, {**WHO, "context": [], "answers": "Ann"}, [TextPair(["Who?"], "Ann")]),
    (ASKED, {**WHO, "answers": {"text": ["Ann", "she"]}}, [TextPair(["question: Who? context: Ann did."], "Ann")]),
    (ASKED, {**WHO, "context": "", "answers": "{'text': ['Ann'], 'answer_start': [0]}"},
     [TextPair(["Who?"], "Ann")]),
])  # fmt: skip
def test_pairs_of_a_record(columns, record, pairs):
    assert columns.read(record) == pairs


@pytest.mark.parametrize(
    ("columns", "record", "words"),
    [
        (PairReader("d", None, None), {"d": ["Hi!", " ", "Ho!"]}, "turn 2 of its d is empty"),
        (PairReader("d", None, None), {"d": [{"who": "a", "said": "x"}]}, "a turn has who, said, and none of content"),
        (PairReader("d", None, None), {"d": ["Hi!"]}, "a reply with no history"),
        (PairReader("d", None, None), {"d": "['Hi!' 'Ho!'\n 'Hm.']"}, "is the text of a list that is not valid JSON"),
        (PairReader("d", None, None), {"d": "Hi!"}, "a text, and no list of turns"),
        (PairReader("d", None, None), {"d": []}, "a conversation without a turn"),
        (PairReader(None, "s", "t"), {"s": " ", "t": "x"}, "the s is empty"),
        (ASKED, {**WHO, "answers": {"text": []}}, "the answers is empty"),
        (ASKED, {**WHO, "answers": "{'text': array(['y']), 'answer_start': array([0])}"}, "its answers are the text"),
        (ASKED, {**WHO, "context": {"title": ["t"]}, "answers": "Ann"}, "its context is a list or an object"),
    ],
)
def test_records_that_hold_no_pair(columns, record, words):
    with pytest.raises(BadRecord, match=words):
        columns.read(record)


def test_conversations_by_their_name(tmp_path):
    """The form of Topical-Chat."""
    for part in (0, 1):
        talks = {}
        for n in range(10 * part, 10 * part + 3):
            content = [{"message": f"{turn} ({n})", "agent": f"agent_{k % 2}"} for k, turn in enumerate(TURNS)]
            talks[f"t_{n:02}"] = {"article_url": "", "config": "C", "content": content}
        (tmp_path / f"{part}.json").write_text(json.dumps(talks))
    recipe = Seq2SeqRecipe(train_file=[str(tmp_path / "*.json")], cache_dir=tmp_path)
    table = read_data(recipe).parts["train"]
    columns = find_columns(recipe, table)
    assert columns == PairReader("content", None, None)
    expected = [[f"{turn} ({n})" for turn in TURNS] for n in (0, 1, 2, 10, 11, 12)]
    assert [[*pairs[-1].source, pairs[-1].target] for pairs in map(columns.read, table)] == expected


@pytest.fixture(scope="module")
def blenderbot(data):
    """(source, target, prefix, separator) -> an encoder with BlenderBot's tokenizer."""
    folder = data("tokenizers/blenderbot")
    flags = ["--config_name", "blenderbot-400M-distill", "--tokenizer_name", str(folder), "--train_file", "a.jsonl"]
    config = load_configuration(parse_recipe(Seq2SeqRecipe, flags))
    tokenizer = load_tokenizer(parse_recipe(Seq2SeqRecipe, flags), config)

    def encoder(source: int = 128, target: int = 128, prefix: str = "", separator: str | None = None) -> PairEncoder:
        separator = separator or turn_separator(config, tokenizer)
        return PairEncoder(tokenizer, prefix, separator, (source, target))

    return encoder


def decoded(encoder: PairEncoder, ids: list[int]) -> str:
    return encoder.tokenizer.decode(ids, skip_special_tokens=True).strip()


NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
LONG = [f"turn {number} of our long talk" for number in NUMBERS]


def test_every_source_and_target_ends_with_the_end_of_text(blenderbot):
    """Also what was cut: a model that never sees the end of a target never learns to stop."""
    encoder = blenderbot(16, 6)
    pairs = [TextPair(LONG[:n], LONG[n]) for n in range(1, 8)]
    pairs += [TextPair(["no"], "yes"), TextPair(["word " * 50], "word " * 50)]
    encoded = encoder.encode([pairs], [])
    end = encoder.tokenizer.eos_token_id
    assert {len(rows) for rows in encoded.values()} == {len(pairs)}
    for name, width in (("input_ids", 16), ("labels", 6)):
        rows = encoded[name]
        assert all(row[-1] == end and row.count(end) == 1 for row in rows), name
        assert max(map(len, rows)) == width
    assert encoded["target"] == [pair.target for pair in pairs]  # measured against the whole text
    assert decoded(encoder, encoded["labels"][-2]) == "yes"


@pytest.mark.parametrize("prefix", ["", "Answer: "])
def test_the_latest_turns_are_kept_whole_and_as_many_as_fit(blenderbot, prefix):
    tokenizer = blenderbot().tokenizer
    texts = [prefix + "  ".join(LONG[-n:]) for n in range(1, 9)]
    needed = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 for text in texts]
    seen = set()
    for width in range(needed[0], needed[-1] + 2):
        encoder = blenderbot(width, 8, prefix)
        kept = sum(length <= width for length in needed)
        encoded = encoder.encode([[TextPair(LONG, "x")]], [])
        (ids,) = encoded["input_ids"]
        assert len(ids) <= width
        assert decoded(encoder, ids) == (prefix + "  ".join(LONG[-kept:])).strip(), width
        assert encoded["truncated"] == [needed[-1] - len(ids)]
        seen.add(kept)
    assert seen == set(range(1, 9))


@pytest.mark.parametrize("prefix", ["summarize: ", "summarize:", "Q."])
@pytest.mark.parametrize("turns", [["one " * 30 + "end"], ["first " * 9, "one " * 30 + "end"], LONG])
def test_the_prefix_survives_truncation(blenderbot, prefix, turns):
    """And nothing of the old turns with it, where the space at its end belongs to the next token."""
    encoder = blenderbot(14, 8, prefix)
    (ids,) = encoder.encode([[TextPair(turns, "x")]], [])["input_ids"]
    text = decoded(encoder, ids)
    assert text.startswith(prefix.strip())
    assert "first" not in text
    assert len(ids) <= 14
    if turns is not LONG:
        assert len(ids) == 14
        assert set(text.removeprefix(prefix.strip()).replace("end", "").split()) == {"one"}


@pytest.fixture
def prepare(cache):
    def run(path, *flags: str):
        model = ["--model_type", "bart", "--train_tokenizer_vocab_size", "262", "--cache_dir", cache]
        recipe = parse_recipe(Seq2SeqRecipe, [*model, "--train_file", str(path), *map(str, flags)])
        return prepare_pairs(recipe, load_configuration(recipe))

    return run


def talk(number: int, turns: int = 4) -> dict:
    return {"dialogue": [f"talk {number} turn {turn}" for turn in range(turns)]}


def sources(data, samples) -> list[str]:
    ids = [samples[index]["input_ids"] for index in range(len(samples))]
    return [data.tokenizer.decode(row, skip_special_tokens=True).strip() for row in ids]


def test_the_held_out_part_shares_no_conversation_with_the_training_part(tmp_path, prepare):
    path = write_records(tmp_path / "a.jsonl", [{**talk(n, turns=2 + n % 4), "Answer": "x"} for n in range(40)])
    data = prepare(path, "--validation_split_percentage", "25")
    assert "note      not read: columns Answer" in data.notes
    parts = (data.train, data.validation)
    train, held_out = ({source.split()[1] for source in sources(data, part)} for part in parts)
    assert len(held_out) == 10
    assert train | held_out == {str(n) for n in range(40)}
    assert not train & held_out
    assert len(data.train) + len(data.validation) == sum(1 + n % 4 for n in range(40))
    assert len(data.targets) == len(data.validation)
    for source, target in zip(sources(data, data.validation), data.targets):
        assert source.split()[1] == target.split()[1]


@pytest.mark.parametrize("key", [{"weight": 0}, {"train": False}, {"mask": True}])
def test_replies_that_a_record_excludes_are_no_targets(key):
    turns = [("user", "Hi?"), ("assistant", "Hello."), ("user", "And?"), ("assistant", "Nothing.")]
    talk = [{"role": role, "content": text} for role, text in turns]
    talk[1] |= key
    assert PairReader("d", None, None).read({"d": talk}) == [TextPair(["Hi?", "Hello.", "And?"], "Nothing.")]
    with pytest.raises(BadRecord, match="none of its replies is trained on"):
        PairReader("d", None, None).read({"d": talk[:2]})


@pytest.mark.parametrize("column", ["image", "videos"])
def test_places_of_pictures_in_pairs_are_refused(tmp_path, prepare, column):
    text, place = f"<{column.rstrip('s')}> What?", f"<{column.rstrip('s')}>"
    for number, texts in enumerate(({"source": text, "target": "A cat."}, {"dialogue": [text, "A cat."]})):
        path = write_records(tmp_path / f"{number}.jsonl", [{**texts, column: "a.png"}] * 4)
        assert f"a text has {place}" in refusal(prepare, path)
