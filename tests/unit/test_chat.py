"""Chat templates and the labels of conversations: what is trained on, token by token."""

from types import SimpleNamespace

import pytest
from chats import ANSWERS, CHAT, LONG_TALK, TOKENIZERS, encoded, encoder_of, trained_text
from helpers import refusal

from zerofit.data.chat.instructions import Form
from zerofit.data.prompts import Renderer
from zerofit.model.chat import BadTemplate, named_template, render, written_twice
from zerofit.model.loss import IGNORE

WRITTEN = {  # Llama-2's: test_chat_blocks.py
    "chatml": "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n⟦3<|im_end|></s>⟧",
    "instruction": "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n⟦3</s>⟧",
    "instruction-ja": "### 指示:\nAdd.\n\n### 入力:\n1 2\n\n### 応答:\n⟦3</s>⟧",
    "none": "Add.\n\n1 2⟦3</s>⟧",
}


@pytest.mark.parametrize("template", WRITTEN)
def test_what_the_templates_write(tokenizer_of, template):
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = named_template(template)
    asked = {"role": "user", "content": "Add.\n\n1 2", "instruction": "Add.", "input": "1 2"}
    text, ((start, stop),) = render(tokenizer, [asked, {"role": "assistant", "content": "3"}])
    begin = text[:start].removeprefix(tokenizer.bos_token)
    assert f"{begin}⟦{text[start:stop]}⟧{text[stop:]}" == WRITTEN[template]


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
    renderer = Renderer(tokenizer, SimpleNamespace(is_encoder_decoder=False), system=LONG_TALK[0]["content"])
    asked = renderer.ids(LONG_TALK[1]["content"])
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


def test_texts_that_a_template_has_written_are_named(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = named_template("llama-2-chat")
    (warning,) = written_twice(tokenizer, "it", ["a", "<s>[INST] b [/INST]"])
    assert "texts have '[INST]', which it writes again" in warning
    assert not written_twice(tokenizer, "it", ["a", "<|im_start|>user"])
    tokenizer.chat_template = named_template("none")
    assert not written_twice(tokenizer, "it", ["[INST]"])


def test_a_template_that_does_not_write_calls_of_tools_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = named_template("none")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    turns = [LONG_TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(BadTemplate, match="does not write the tool_calls of turn 2"):
        render(tokenizer, Form("messages", "messages").read({"messages": turns}))
