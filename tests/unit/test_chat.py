"""Chat templates and the labels of conversations: what is trained on, token by token."""

import pytest
from chats import (
    ANSWERS,
    CHAT,
    INSTRUCTION,
    LONG_TALK,
    PROMPT,
    TOKENIZERS,
    encoded,
    encoder_of,
    trained_text,
)
from helpers import refusal

from zerofit.data.chat.instructions import Form
from zerofit.model.chat import (
    BadTemplate,
    named_template,
    question_ids,
    render,
)
from zerofit.model.loss import IGNORE

# ------------------------------------------------------------------------------- what a template should write, by hand

Pieces = list[tuple[str, bool]]  # text, and whether it is trained on


def expected(template: str, messages: list[dict], tokenizer) -> Pieces:
    """The pieces of a conversation, put together without a template."""
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    rest = messages[1:] if system else messages
    marks = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    words = {"instruction": ("Instruction", "Input", "Response"), "instruction-ja": ("指示", "入力", "応答")}
    begin = bos if marks else ""
    pieces: Pieces = []
    for number, (user, assistant) in enumerate(zip(rest[::2], rest[1::2])):
        answer, first = assistant["content"], number == 0
        if template == "llama-2-chat":
            inner = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system and first else ""
            pieces += [(f"{bos}[INST] {inner}{user['content']} [/INST]", False), (f" {answer} {eos}", True)]
        elif template == "chatml":
            text = (f"{begin}<|im_start|>system\n{system}<|im_end|>\n" if system else begin) if first else "\n"
            text += f"<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n"
            pieces += [(text, False), (f"{answer}<|im_end|>{eos}", True)]
        elif template == "none":
            pieces += [((begin + system if first else "") + user["content"], False), (answer + eos, True)]
        else:
            ask, given, reply = words[template]
            text = begin + (f"{system}\n\n" if system else "") if first else "\n\n"
            text += f"### {ask}:\n{user.get('instruction', user['content'])}\n\n"
            text += f"### {given}:\n{user['input']}\n\n" if user.get("input") else ""
            pieces += [(f"{text}### {reply}:\n", False), (answer + eos, True)]
    return pieces


def tokens_of(pieces: Pieces, tokenizer) -> tuple[list[int], list[int]]:
    """(ids, labels) of pieces that are tokenised one by one: where they meet, no token spans them."""
    ids, labels = [], []
    for text, trained in pieces:
        # After a special token, Llama's tokenizers put no space of their own in front.
        piece = tokenizer(tokenizer.eos_token + text, add_special_tokens=False)["input_ids"][1:]
        if not ids:
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += piece
        labels += piece if trained else [IGNORE] * len(piece)
    return ids, labels


def as_instruction(record: dict) -> dict:
    """White space at its end, which `none` keeps and the others strip, keeps prompt and answer in separate tokens."""
    last = "input" if record["input"] else "instruction"
    return {**record, last: record[last] + "\n"}


def as_prompt(record: dict) -> dict:
    return {"prompt": record["instruction"] + "\n", "completion": record["output"]}


def as_messages(record: dict) -> dict:
    texts = {"user": record["instruction"] + "\n", "assistant": record["output"]}
    return {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", ["llama-2-chat", "chatml", "instruction", "instruction-ja", "none"])
@pytest.mark.parametrize(
    ("form", "in_form"), [(INSTRUCTION, as_instruction), (PROMPT, as_prompt), (CHAT, as_messages)]
)
def test_the_labels_of_records_token_by_token(tokenizer_of, records, form, in_form, template, name):
    tokenizer = tokenizer_of(name)
    asked = [in_form(record) for record in records]
    rows = encoded(encoder_of(tokenizer, form, template), asked)
    assert len(rows) == len(records) >= 30
    for record, row, source in zip(asked, rows, records):
        messages = form.read(record)
        if template != "none":
            messages = [{key: text.strip() for key, text in message.items()} for message in messages]
        ids, labels = tokens_of(expected(template, messages, tokenizer), tokenizer)
        assert list(row["input_ids"]) == ids
        assert list(row["labels"]) == labels
        assert row["trained"] == sum(label != IGNORE for label in labels) > 0
        assert (row["truncated"], row["is_cut"]) == (0, False)
        (answer,) = trained_text(row, tokenizer)
        assert answer.endswith(tokenizer.eos_token)
        assert answer.removesuffix(tokenizer.eos_token).removesuffix("<|im_end|>").strip() == source["output"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", ["llama-2-chat", "chatml", "instruction", "instruction-ja", "none"])
def test_the_model_is_asked_with_what_it_was_trained_on(tokenizer_of, template, name):
    """The prompt that transformers makes for an answer is what stands before the trained part, token by token: so in
    Llama-2's form the space before an answer is trained on, where it is a token of its own (Japanese)."""
    tokenizer = tokenizer_of(name)
    encoder = encoder_of(tokenizer, CHAT, template)
    for talk in (LONG_TALK[:3], LONG_TALK[1:3], LONG_TALK[1:5], LONG_TALK):
        (row,) = encoded(encoder, [{"messages": talk}])
        prompt = tokenizer.apply_chat_template(talk[:-1], add_generation_prompt=True)["input_ids"]
        assert list(row["input_ids"]) == tokenizer.apply_chat_template(talk)["input_ids"]
        if template != "none":  # there, a token may span the two
            assert list(row["input_ids"][: len(prompt)]) == prompt
            assert row["labels"][len(prompt) - 1] == IGNORE
            assert (row["labels"][len(prompt) :] != IGNORE).all()
    asked = question_ids(tokenizer, LONG_TALK[1]["content"], LONG_TALK[0]["content"])
    assert asked == tokenizer.apply_chat_template(LONG_TALK[:2], add_generation_prompt=True)["input_ids"]


def test_answers_in_a_prompt_are_not_trained(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    form = Form("prompt", "prompt", "completion")
    (row,) = encoded(
        encoder_of(tokenizer, form, "instruction"), [{"prompt": LONG_TALK[:4], "completion": LONG_TALK[4:]}]
    )
    assert [run.removesuffix("</s>") for run in trained_text(row, tokenizer)] == ANSWERS[1:]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}\n{% if m.role == 'system' %}\n{{ raise_exception('no system role') }}\n{% endif %}\n"
         "{{ m.content }}{% endfor %}", "line 3: no system role"),
        ("\n{% macro turn(m) %}\n{{ m.text.upper() }}\n{% endmacro %}\n{{ turn(messages[0]) }}", "line 3: "),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "it does not write turn 3, an answer"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ 'x' * (messages[-1].content | length) }}",
         "it changes turn 3, an answer"),
    ],
)  # fmt: skip
def test_a_template_that_fails_on_a_record(tokenizer_of, tmp_path, template, words):
    (tmp_path / "mine.jinja").write_text(template)
    encoder = encoder_of(tokenizer_of("gpt2"), CHAT, str(tmp_path / "mine.jinja"))
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi?"},
            {"role": "assistant", "content": "Good morning."}]  # fmt: skip
    message = refusal(encoder.render, encoder.form.read({"messages": talk}), "a.jsonl, record 7")
    assert message.startswith("error: a.jsonl, record 7: chat_template = ")
    assert "mine.jinja' fails on it: " in message
    assert words in message, message


def test_a_template_that_does_not_write_calls_of_tools_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = named_template("none")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    turns = [LONG_TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(BadTemplate, match="does not write the tool_calls of turn 2"):
        render(tokenizer, Form("messages", "messages").read({"messages": turns}))
