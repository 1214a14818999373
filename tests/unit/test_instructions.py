"""Instructions, prompts and chats: what a table holds, the messages of a record, and records that are of no use."""

import json
from datetime import date
from decimal import Decimal
from functools import partial

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from helpers import check_refusal, refusal, write_records

from zerofit.data.chat.instructions import RecordForm, find_form
from zerofit.data.records import BadRecord
from zerofit.data.text import text_column
from zerofit.recipe import ClmRecipe

QUESTION, ANSWER = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [QUESTION, ANSWER]
RESULT = {"role": "observation", "content": "42"}
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho."}]


def form_of(record: dict, **options) -> RecordForm | None:
    return find_form(ClmRecipe(**options), Dataset.from_list([record]))


@pytest.mark.parametrize(("record", "options", "expected"), [
    ({"instruction": "x", "output": "y"}, {}, RecordForm("instruction", "instruction", "output")),
    ({"instruction": "x", "input": "z", "output": "y", "text": "all of it"}, {},
     RecordForm("instruction", "instruction", "output", "input")),
    ({"instruction": "x", "output": "y", "text": "z"}, {"text_column": "text"}, None),
    ({"instruction": "x", "context": "z", "response": "y", "category": "qa"}, {},
     RecordForm("instruction", "instruction", "response", "context")),  # Dolly
    ({"instruction": "x", "input": "", "output": "y", "system": "s", "history": [["a", "b"]]}, {},
     RecordForm("instruction", "instruction", "output", "input", "history", "system")),  # LLaMA-Factory
    ({"prompt": "x", "completion": "y"}, {}, RecordForm("prompt", "prompt", "completion", plain=True)),
    ({"instruction": "x", "answer": "y"}, {}, RecordForm("instruction", "instruction", "answer")),
    ({"inputs": "x", "targets": "y"}, {}, RecordForm("prompt", "inputs", "targets", plain=True)),  # FLAN
    ({"input": "x", "output": "y"}, {}, RecordForm("prompt", "input", "output", plain=True)),
    ({"prompt": "x", "input": "z", "output": "y"}, {}, RecordForm("instruction", "prompt", "output", "input")),
    ({"user": "x", "assistant": "y", "id": "1"}, {}, RecordForm("prompt", "user", "assistant", plain=True)),
    ({"user": "x", "text": "z", "target": "y"}, {}, None),  # of tweets
    ({"query": "x", "text": "z", "target": "y"}, {}, None),
    ({"question": "x", "answer": ["y", "z"]}, {}, RecordForm("prompt", "question", "answer")),  # NQ-open
    ({"query": "x", "response": "y", "history": [["a", "b"]]}, {},
     RecordForm("prompt", "query", "response", history="history")),  # ms-swift
    ({"system_prompt": "s", "question": "x", "response": "y"}, {},
     RecordForm("prompt", "question", "response", system="system_prompt", plain=True)),  # OpenOrca
    ({"type": "t", "query": "x", "response": "y"}, {}, RecordForm("prompt", "query", "response", plain=True)),
    ({"messages": TURNS, "prompt": "x", "completion": "y"}, {}, RecordForm("messages", "messages")),
    ({"conversations": SHAREGPT, "id": "1"}, {"system_prompt": "s"},
     RecordForm("messages", "conversations", system_prompt="s")),
    ({"conversation": [{"assistant": "y", "human": "x"}]}, {}, RecordForm("messages", "conversation")),
    ({"dialogue": [{"speaker": "Ann", "text": "Hi?"}], "text": "x"}, {}, None),
    ({"id": "1", "context": "z", "question": "x", "answers": {"text": ["y"], "answer_start": [0]}}, {},
     RecordForm("instruction", "question", "answers", "context")),  # SQuAD
    ({"messages": TURNS, "label": True}, {}, RecordForm("messages", "messages", verdict="label")),
    ({"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Ho"]}}, {},
     RecordForm("messages", "conversations")),
])  # fmt: skip
def test_forms_that_are_found(record, options, expected):
    found = form_of(record, **options)
    assert found == expected
    if found:
        assert all(name in found.describe for name in found.columns)
        assert found.read(record)[-1]["role"] == "assistant"


INSTRUCTION = RecordForm("instruction", "instruction", "output", "input", "history", "system", "Default.")
PROMPT = RecordForm("prompt", "prompt", "completion")
CHAT = RecordForm("messages", "messages")
RATED = RecordForm("messages", "messages", verdict="label")


def instruction(**values) -> dict:
    return {"instruction": "Add.", "input": None, "output": "3", "history": None, "system": None, **values}


def test_an_instruction():
    default = {"role": "system", "content": "Default."}
    asked = {"role": "user", "content": "Add.", "instruction": "Add."}
    three = {"role": "assistant", "content": "3"}
    assert INSTRUCTION.read(instruction()) == [default, asked, three]
    assert INSTRUCTION.read(instruction(input=" \n", system=" ")) == [default, asked, three]
    with_input = {**asked, "content": "Add.\n\n1 2", "input": "1 2"}
    own = {"role": "system", "content": "Count."}
    assert INSTRUCTION.read(instruction(input="1 2", system="Count.")) == [own, with_input, three]
    turns = (("user", "a?"), ("assistant", "b"), ("user", "c?"), ("assistant", "d"))
    past = [{"role": role, "content": text} for role, text in turns]
    assert INSTRUCTION.read(instruction(history=[["a?", "b"], ["c?", "d"]])) == [default, *past, asked, three]
    assert INSTRUCTION.read(instruction(history=past)) == [default, *past, asked, three]
    of_a_csv = instruction(history="[['a?', 'b'], ['c?', 'd']]")
    assert INSTRUCTION.read(of_a_csv) == [default, *past, asked, three]
    assert form_of(of_a_csv).history == "history"
    in_parts = [{"text": "Count."}]  # as Amazon's Bedrock and Anthropic have it
    for system in (in_parts, {"role": "system", "parts": in_parts}):  # the latter as Gemini's
        assert INSTRUCTION.read(instruction(input=12, system=system))[0] == own
    assert INSTRUCTION.read(instruction(output=3)) == [default, asked, three], "an answer of digits"
    record = {"question": "Who?", "context": "Ann did."}
    assert form_of(record, predict_file=["x.jsonl"]).read(record)[-1]["input"] == "Ann did.", "SQuAD without answers"


def test_a_prompt():
    """Text is kept to the last space: what stands between prompt and answer is the data's."""
    messages = PROMPT.read({"prompt": "The sky is", "completion": " blue."})
    assert messages == [{"role": "user", "content": "The sky is"}, {"role": "assistant", "content": " blue."}]
    lists = {"prompt": [SYSTEM, *TURNS, QUESTION], "completion": [ANSWER, QUESTION, ANSWER]}
    given = {**ANSWER, "trained": False}
    assert PROMPT.read(lists) == [SYSTEM, QUESTION, given, QUESTION, ANSWER, QUESTION, ANSWER]


@pytest.mark.parametrize(
    "turns",
    [
        TURNS,
        SHAREGPT,
        [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}, {**ANSWER, "tool_calls": None}],
        {"role": ["user", "assistant"], "content": ["Hi?", "Ho."]},
        [{"assistant": "Ho.", "human": "Hi?"}],  # of Firefly
        [{"input": "Hi?", "output": "Ho."}],  # of Capybara
        [{"user": "Hi?", "assistant": None}, {"user": None, "assistant": "Ho."}],
        [{"role": "user", "parts": [{"text": "Hi?"}]}, {"role": "model", "parts": [{"text": "Ho."}]}],  # of Gemini
    ],
)
def test_a_conversation(turns):
    assert CHAT.read({"messages": turns}) == TURNS


def test_a_system_text():
    with_default = RecordForm("messages", "messages", system_prompt="Default.")
    assert with_default.read({"messages": [SYSTEM, *TURNS]}) == [SYSTEM, *TURNS]
    default = {"role": "system", "content": "Default."}
    assert with_default.read({"messages": TURNS}) == [default, *TURNS]
    assert with_default.read({"messages": [{**SYSTEM, "content": ""}, *TURNS]}) == [default, *TURNS]
    assert CHAT.read({"messages": [{**SYSTEM, "content": " "}, *TURNS]}) == TURNS


@pytest.mark.parametrize(
    ("form", "record", "words"),
    [
        (INSTRUCTION, instruction(output=""), "the output is empty"),
        (INSTRUCTION, instruction(output=date(2024, 1, 2)), "the output is a date, and no text"),
        (INSTRUCTION, instruction(input=["a", "b"]), "its input is a list or an object"),
        (INSTRUCTION, instruction(history=[["a?", "b"], ["c?", ""]]), "the answer in entry 2 of its history is empty"),
        (INSTRUCTION, instruction(input={"title": ["a"]}), "its input is a list or an object"),  # HotpotQA's context
        (INSTRUCTION, instruction(system=["a"]), "the system is a list"),
        (PROMPT, {"prompt": [QUESTION], "completion": [QUESTION]}, "turn 2 is the user's, where one of the assistant"),
        (CHAT, {"messages": []}, "a conversation without a turn"),
        (CHAT, {"messages": [ANSWER, QUESTION, ANSWER]}, "turn 1 is the assistant's, where one of the user was due"),
        (CHAT, {"messages": [QUESTION, SYSTEM, ANSWER]}, "turn 2 is the system's, which can only be the first"),
        (CHAT, {"messages": [QUESTION, {"role": "ann", "content": "x"}]}, "turn 2 .* the role 'ann'.*user: user, h"),
        (CHAT, {"messages": [QUESTION, RESULT, ANSWER]}, "turn 2 is the tool's, where one of the assistant was due"),
        (CHAT, {"messages": [QUESTION, {**ANSWER, "content": None, "tool_calls": [1]}]}, "turn 2 of its messages"),
        (RATED, {"messages": TURNS, "label": False}, r"its answer is a rejected one \(label: false\)"),
        (CHAT, {"messages": [QUESTION, {"role": "assistant", "content": " "}]}, r"turn 2 of its messages \(assistant"),
    ],
)
def test_records_that_are_of_no_use(form, record, words):
    with pytest.raises(BadRecord, match=words):
        form.read(record)


def test_tools_answer_between_two_turns_of_the_assistant():
    call = {"role": "function_call", "content": '{"name": "ask"}'}
    found = CHAT.read({"messages": [QUESTION, call, RESULT, RESULT, ANSWER, QUESTION, ANSWER]})
    roles = " ".join(message["role"] for message in found)
    assert roles == "user assistant tool tool assistant user assistant"


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "x", "chosen": "y", "rejected": "z"},
        {"chosen": TURNS, "rejected": TURNS},
        {"prompt": "x", "response_0": "y", "response_1": "z", "better_response_id": 0},
        {"conversation_a": TURNS, "conversation_b": TURNS, "winner": "model_a"},
    ],
)
def test_preferences_are_refused(record):
    check_refusal(["the records are preferences", "train/dpo.py reads them"], form_of, record)
    assert form_of({"prompt": "x", **record}, predict_file=["x.jsonl"]).read({"prompt": "x"})[-1]["content"] == "x"


@pytest.fixture
def prepare(llama, prepare_causal):
    return partial(prepare_causal, llama)


def asked(number: int) -> dict:
    return {"instruction": f"Say {number}.", "output": f"It is {number}."}


def text_of(data, samples) -> str:
    return "".join(data.tokenizer.decode(samples[n]["input_ids"]) for n in range(len(samples)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--packing", "concatenate"], ["packing = concatenate", "--packing documents or none"]),
        ([], ["no chat template", "chatml, instruction, instruction-ja, llama-2-chat, none, or a .jinja file"]),
    ],
)
def test_options_that_do_not_go_with_instructions(tmp_path, prepare, flags, words):
    path = write_records(tmp_path / "a.jsonl", [asked(n) for n in range(30)])
    check_refusal(words, prepare, path, *flags)


def test_a_record_of_another_form_is_told_from_an_empty_one(tmp_path, prepare):
    path = write_records(tmp_path / "a.jsonl", [asked(0), {"messages": TURNS, "id": "1"}, asked(2)])
    message = refusal(prepare, path, "--chat_template", "instruction")
    assert "record 1: a conversation without a turn (not read: its instruction, output; files of" in message


def test_a_held_out_file_of_another_form(tmp_path, prepare):
    """Each part is read as what it is: other columns, or turns in place of columns."""
    path = write_records(tmp_path / "a.jsonl", [asked(n) for n in range(30)])
    other = write_records(tmp_path / "b.jsonl", [{"messages": [SYSTEM, *TURNS]}, {"messages": TURNS}])
    data = prepare(path, "--chat_template", "instruction", "--validation_file", other)
    assert data.validation.stats.documents == 2
    assert "Be brief.\n\n### Instruction:\nHi?\n\n### Response:\nHo." in text_of(data, data.validation)


@pytest.mark.parametrize("written", [json.dumps, repr, partial(json.dumps, indent=1)])
def test_turns_as_the_text_of_a_list(written):
    record = {"id": "1", "messages": written(TURNS)}
    form = form_of(record)
    assert form == RecordForm("messages", "messages")
    assert form.read(record) == TURNS
    asked = {"prompt": written([SYSTEM, QUESTION]), "completion": written([ANSWER])}
    assert form_of(asked) == RecordForm("prompt", "prompt", "completion"), "which is not plain"
    assert form_of(asked).read(asked) == [SYSTEM, *TURNS]
    of_numpy = {"messages": f"[{QUESTION}\n {ANSWER}]"}
    for cut in ({"messages": "[{"}, of_numpy):
        with pytest.raises(BadRecord, match="list that is not valid"):
            form.read(cut)
    assert form_of(of_numpy) == form, "it is no plain text"


def test_answers_that_are_numbers():
    records = [{"question": "?", "answer": number} for number in (2, 0.5, 3.0, Decimal("1.10"))]
    form = form_of(records[0])
    assert [form.read(record)[-1]["content"] for record in records] == ["2", "0.5", "3", "1.10"]


def test_answers_that_are_names_of_classes(tmp_path, prepare):
    features = Features({"question": Value("string"), "answer": ClassLabel(names=["no", "yes"])})
    table = Dataset.from_dict({"question": ["Is it so? "] * 30, "answer": [1] * 30}, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    data = prepare(tmp_path / "a.parquet", "--chat_template", "none")
    assert "Is it so? yes" in text_of(data, data.train)


@pytest.mark.parametrize(
    "record",
    [
        {"title": "t", "paragraphs": [{"context": "a long text"}]},
        {"id": "17", "data": ["a question", "an answer"]},
        {"id": "a", "body": {"messages": TURNS}},
    ],
)
def test_a_small_text_beside_lists_is_not_the_text(record):
    message = refusal(text_column, Dataset.from_list([record] * 3), None)
    assert f"the only column of text is {next(iter(record))}" in message
    assert text_column(Dataset.from_list([{**record, "content": "x"}]), "content") == "content"


def test_a_text_beside_small_lists():
    record = {"content": "a long text", "tags": ["a"], "meta": {"n": 1}}
    assert text_column(Dataset.from_list([record]), None) == "content"
