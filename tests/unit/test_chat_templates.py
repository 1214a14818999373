"""Chat templates as models carry them: what is trained is all that a turn adds to its generation prompt. What a record
says beside its texts reaches the template, masks a turn, or is counted."""

import json

import numpy as np
import pytest
from chats import CHAT, chatml_tokenizer, encoded, encoder_of, trained_text
from helpers import refusal, write_records
from transformers import AutoConfig

from zerofit.data.chat.instructions import RecordForm
from zerofit.data.chat.samples import PreferenceForm
from zerofit.data.prompts import Renderer
from zerofit.data.records import BadRecord
from zerofit.model.chat import Conversation, render, unread_keys
from zerofit.model.loss import IGNORE
from zerofit.tools.generate.generate import GenerateOptions
from zerofit.tools.generate.respond import read_prompts

GENERATION = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
CHATML = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}"
    "{%- endfor %}{{ '\\n</tools><|im_end|>\\n' }}{%- endif %}"
)
QWEN2_5 = (
    TOOLS + "{%- for m in messages %}{%- if m.role == 'tool' %}{%- if messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{%- endif %}{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- elif m.tool_calls %}{{ '<|im_start|>assistant' }}{%- if m.content %}{{ '\\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls %}{%- set call = call.function or call %}"
    "{{ '\\n<tool_call>\\n{\"name\": \"' + call.name + '\", \"arguments\": ' + (ARGUMENTS) + '}\\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    + GENERATION
)
HERMES = QWEN2_5.replace("ARGUMENTS", "call.arguments | tojson")
QWEN3 = (
    TOOLS + "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set content = m.content %}{%- set reasoning = '' %}"
    "{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{ '<|im_start|>assistant\\n' + content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{%- set call = call.function or call %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{%- if call.arguments is string %}{{ call.arguments }}{%- else %}{{ call.arguments | tojson }}{%- endif %}"
    "{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}{%- for m in rest %}"
    "{%- if m.role == 'user' %}{%- if loop.last and system is defined %}"
    "{{ '[INST] ' + system + '\\n\\n' + m.content + '[/INST]' }}"
    "{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{%- endif %}{%- else %}{{ ' ' + m.content + eos_token }}"
    "{%- endif %}{%- endfor %}"
)
R1 = (
    "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{%- elif m.role == 'user' %}"
    "{{ '<User>' + m.content }}{%- else %}{%- set content = m.content %}{%- if '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1] %}{%- endif %}{{ '<Assistant>' + content + eos_token }}"
    "{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<Assistant>' }}{%- endif %}"
)
TEMPLATES = {  # name: its text, the token that ends texts, and what stands after an answer
    "chatml": (CHATML + GENERATION, "<|im_end|>", "<|im_end|>"),
    "qwen2.5": (HERMES, "<|im_end|>", "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>", "<|im_end|>"),
    "mistral": (MISTRAL, "</s>", "</s>"),
    "r1": (R1, "</s>", "</s>"),
}
TALK = [
    {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Nothing more."},
]  # fmt: skip
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {}}}


@pytest.fixture
def tokenizer_with(tokenizer_of):
    return lambda name: chatml_tokenizer(tokenizer_of("gpt2"), *TEMPLATES[name][:2])


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_that_a_turn_adds_to_its_generation_prompt_is_trained(tokenizer_with, name):
    tokenizer, (*_, end) = tokenizer_with(name), TEMPLATES[name]
    for turns in (TALK[:2], TALK):
        text, spans = render(tokenizer, turns)
        assert text == tokenizer.apply_chat_template(turns, tokenize=False)
        for number, (start, stop) in enumerate(spans):
            prompt = tokenizer.apply_chat_template(turns[: 2 * number + 1], tokenize=False, add_generation_prompt=True)
            assert text[:start] == prompt
            assert text[start:stop].endswith(turns[2 * number + 1]["content"] + end)
        (row,) = encoded(encoder_of(tokenizer, CHAT, None), [{"messages": turns}])
        assert trained_text(row, tokenizer) == [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ("<think>\nHm.\n</think>\n\nFour.", "<think>\nHm.\n</think>\n\nFour.<|im_end|>"),
        ("Four.", "<think>\n\n</think>\n\nFour.<|im_end|>"),
        ({"reasoning_content": "Hm.", "content": "Four."}, "<think>\nHm.\n</think>\n\nFour.<|im_end|>"),
    ],
)
def test_reasoning_is_trained_where_the_template_writes_it(tokenizer_with, answer, trained):
    tokenizer = tokenizer_with("qwen3")
    last = {"role": "assistant", **(answer if isinstance(answer, dict) else {"content": answer})}
    record = {"messages": [*TALK[:2], {"role": "user", "content": "2 + 2?"}, last]}
    messages = RecordForm("messages", "messages").read(record)
    text, spans = render(tokenizer, messages)
    assert text == tokenizer.apply_chat_template(record["messages"], tokenize=False)
    assert [text[start:stop] for start, stop in spans] == ["Hello.<|im_end|>", trained]
    assert unread_keys(tokenizer, messages) == []
    if isinstance(answer, dict):
        assert unread_keys(tokenizer_with("chatml"), messages) == ["reasoning_content"]


@pytest.mark.parametrize("name", ["qwen3", "r1"])
def test_reasoning_of_earlier_answers_is_dropped_as_the_template_drops_it(tokenizer_with, name):
    tokenizer = tokenizer_with(name)
    turns = [TALK[0], {"role": "assistant", "content": "<think>\nHm.\n</think>Hello."}, *TALK[2:]]
    text, spans = render(tokenizer, turns)
    end = TEMPLATES[name][2]
    expected = ["Hello." + end, ("<think>\n\n</think>\n\n" if name == "qwen3" else "") + "Nothing more." + end]
    assert [text[start:stop] for start, stop in spans] == expected


def test_a_template_that_begins_an_answer_otherwise_in_generation_is_said(
    tokenizer_of, prepare_causal, llama, tmp_path
):
    tokenizer = chatml_tokenizer(
        tokenizer_of("gpt2"), R1.replace("'<Assistant>' }}{%- endif", "'<Assistant><think>' }}{%- endif"), "</s>"
    )
    text, spans = render(tokenizer, TALK)
    assert [text[start:stop] for start, stop in spans] == ["Hello.</s>", "Nothing more.</s>"]
    file = write_records(tmp_path / "a.jsonl", [{"messages": TALK}] * 8)
    (tmp_path / "r1.jinja").write_text(tokenizer.chat_template)
    notes = prepare_causal(llama, file, "--chat_template", tmp_path / "r1.jinja", "--packing", "none").notes
    assert any("begins an answer with '<think>' in generation" in note for note in notes)


# ------------------------------------------------------------------------------------------------------ calls of tools


@pytest.mark.parametrize("arguments", ["call.arguments | tojson", "call.arguments", "ROBUST"])
@pytest.mark.parametrize("given", [dict, str])
def test_arguments_are_written_once_as_an_object(tokenizer_of, arguments, given):
    written = arguments.replace("ROBUST", "call.arguments if call.arguments is string else call.arguments | tojson")
    tokenizer = chatml_tokenizer(tokenizer_of("gpt2"), QWEN2_5.replace("ARGUMENTS", written), "<|im_end|>")
    held = CALL["function"]["arguments"]
    call = {
        "function": {"name": "weather", "arguments": held if given is dict else json.dumps(held, ensure_ascii=False)}
    }
    record = {"messages": [
        TALK[0], {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "dry", "tool_call_id": "1", "name": "weather"}, TALK[1],
    ]}  # fmt: skip
    text, spans = render(tokenizer, RecordForm("messages", "messages").read(record))
    body = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
    prompt = "<|im_start|>assistant\n"
    assert [text[start:stop] for start, stop in spans] == [(body * 2)[1:] + "<|im_end|>", "Hello.<|im_end|>"]
    assert prompt + body[1:] in text


def test_the_older_form_of_a_call(tokenizer_with):
    turn = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    record = {"messages": [TALK[0], turn, {"role": "function", "name": "weather", "content": "dry"}, TALK[1]]}
    text, _ = render(tokenizer_with("qwen2.5"), RecordForm("messages", "messages").read(record))
    assert '{"name": "weather", "arguments": {"city": "Bern"}}' in text


@pytest.mark.parametrize("column", ["tools", "functions"])
@pytest.mark.parametrize("form", [lambda tools: tools, json.dumps, lambda tools: [json.dumps(tool) for tool in tools]])
def test_tools_of_a_record_reach_the_template(tokenizer_with, column, form):
    tokenizer = tokenizer_with("qwen2.5")
    tools = [TOOL["function"]] if column == "functions" else [TOOL]
    record = {"messages": TALK, column: form(tools)}
    messages = RecordForm("messages", "messages", given=(column,)).read(record)
    text, spans = render(tokenizer, messages)
    assert text == tokenizer.apply_chat_template(TALK, tools=[TOOL], tokenize=False)
    assert json.dumps(TOOL) in text
    assert len(spans) == 2
    assert unread_keys(tokenizer, messages) == []
    assert unread_keys(tokenizer_with("chatml"), messages) == ["tools"]
    asked = Renderer(tokenizer, AutoConfig.for_model("llama")).ids(Conversation(TALK[:1], messages.given))
    prompt = tokenizer.apply_chat_template(TALK[:1], tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(asked) == prompt


def test_of_several_templates_that_for_tools_is_taken(tokenizer_of):
    plain, tokenizer = CHATML + GENERATION, chatml_tokenizer(tokenizer_of("gpt2"), "", "<|im_end|>")
    tokenizer.chat_template = {"default": plain, "tool_use": HERMES}
    encoder = encoder_of(tokenizer, RecordForm("messages", "messages", given=("tools",)), None)
    for tools, template in (([], plain), ([TOOL], HERMES)):
        text, *_ = encoder.render(encoder.form.read({"messages": TALK, "tools": tools}), "a.jsonl, record 1")
        single = chatml_tokenizer(tokenizer_of("gpt2"), template, "<|im_end|>")
        assert text == single.apply_chat_template(TALK, tools=tools or None, tokenize=False)


def test_arguments_of_a_record_reach_the_template(tokenizer_with):
    tokenizer = tokenizer_with("qwen3")
    form = RecordForm("messages", "messages", given=("chat_template_kwargs",))
    messages = form.read({"messages": TALK[:2], "chat_template_kwargs": '{"enable_thinking": false}'})
    text, spans = render(tokenizer, messages)
    assert [text[start:stop] for start, stop in spans] == ["Hello.<|im_end|>"]
    for wrong in ({"tokenize": True}, {"messages": []}, "[1]"):
        with pytest.raises(BadRecord, match="chat_template_kwargs"):
            form.read({"messages": TALK[:2], "chat_template_kwargs": wrong})


# ------------------------------------------------------------------------------------------------- what masks a turn


@pytest.mark.parametrize(
    "key",
    [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"trainable": "false"}, {"loss": False}, {"loss_mask": 0},
     {"mask": True}, {"masked": "true"}, {"weight": 1, "train": False}],
)  # fmt: skip
def test_turns_that_are_masked(tokenizer_with, key):
    tokenizer = tokenizer_with("chatml")
    turns = [{**TALK[0], "weight": 0}, {**TALK[1], **key}, TALK[2], {**TALK[3], "weight": 1, "mask": False}]
    (row,) = encoded(encoder_of(tokenizer, CHAT, None), [{"messages": turns}])
    assert trained_text(row, tokenizer) == ["Nothing more.<|im_end|>"]
    (plain,) = encoded(encoder_of(tokenizer, CHAT, None), [{"messages": TALK}])
    assert list(row["input_ids"]) == list(plain["input_ids"])
    (whole,) = encoded(encoder_of(tokenizer, CHAT, None, whole=True), [{"messages": turns}])
    masked = tokenizer.decode(np.array(whole["input_ids"])[1:][np.array(whole["labels"])[1:] == IGNORE])
    assert masked == "Hello.<|im_end|>", "with train_on_prompt all else is trained"
    with pytest.raises(BadRecord, match="none of its answers is trained"):
        CHAT.read({"messages": turns[:2]})
    assert unread_keys(tokenizer, CHAT.read({"messages": turns})) == []


@pytest.mark.parametrize("key", [{"weight": 0.5}, {"mask": 1}, {"train": "perhaps"}])
def test_values_that_are_neither_yes_nor_no(key):
    with pytest.raises(BadRecord, match=f"turn 2 of its messages .*{next(iter(key))} = "):
        CHAT.read({"messages": [TALK[0], {**TALK[1], **key}]})


def test_masks_tools_and_more_in_preferences(tokenizer_with):
    form = PreferenceForm(None, None, plain=False, given=("tools",))
    other = {"role": "assistant", "content": "No."}
    record = {"chosen": TALK, "rejected": [*TALK[:3], other], "tools": [TOOL]}
    text, spans = render(tokenizer_with("qwen2.5"), form.read(record)[1])
    assert json.dumps(TOOL) in text
    assert [text[start:stop] for start, stop in spans] == ["No.<|im_end|>"]
    with pytest.raises(BadRecord, match="nothing is compared"):
        form.read({**record, "rejected": [*TALK[:3], {**other, "weight": 0}]})


# ---------------------------------------------------------------------------------------------- what nobody reads


def test_what_nobody_reads_is_counted_in_one_note(prepare_causal, llama, tmp_path):
    turns = [{**TALK[0], "name": "Ann", "id": 7}, {**TALK[1], "reasoning_content": "Hm."}]
    rows = [{"messages": turns, "source": "web", "tools": [TOOL]}] * 3 + [{"messages": TALK, "source": "a"}] * 5
    file = write_records(tmp_path / "a.jsonl", [{**row, "tools": row.get("tools")} for row in rows])
    flags = ("--chat_template", "chatml", "--packing", "none")
    notes = prepare_causal(llama, file, *flags, validation_split_percentage=0).notes
    keys = ", ".join(f"{name} (3 records)" for name in ("id", "name", "reasoning_content", "tools"))
    assert [note for note in notes if "not read" in note] == [f"note      not read: columns source; keys {keys}"]
    pairs = [{"chosen": turns, "rejected": [turns[0], {**TALK[1], "content": "No."}], "source": "web"}] * 8
    file = write_records(tmp_path / "b.jsonl", pairs)
    notes = prepare_causal(llama, file, "--preference_loss", "dpo", "--chat_template", "chatml",
                           validation_split_percentage=0).notes  # fmt: skip
    keys = ", ".join(f"{name} (8 records)" for name in ("id", "name", "reasoning_content"))
    assert [note for note in notes if "not read" in note] == [f"note      not read: columns source; keys {keys}"]


def test_a_text_that_the_template_does_not_write_is_counted(tokenizer_with, prepare_causal, llama, tmp_path):
    """Mistral's template writes the system text before the last turn only if that is the user's."""
    turns = [{"role": "system", "content": "Be kind."}, *TALK]
    text, spans = render(tokenizer_with("mistral"), turns)
    assert [text[start:stop].strip() for start, stop in spans] == ["Hello.</s>", "Nothing more.</s>"]
    (tmp_path / "mistral.jinja").write_text(MISTRAL)
    file = write_records(tmp_path / "a.jsonl", [{"messages": turns}] * 3 + [{"messages": TALK}] * 3)
    flags = ("--chat_template", tmp_path / "mistral.jinja", "--packing", "none")
    notes = prepare_causal(llama, file, *flags, validation_split_percentage=0).notes
    assert [note for note in notes if "not read" in note] == ["note      not read: keys system.content (3 records)"]
    rows = [{"instruction": "Say hello.", "input": "To Ann.", "output": "Hello, Ann."}] * 4
    flags = ("--chat_template", "instruction", "--packing", "none", "--system_prompt", "Be kind.")
    notes = prepare_causal(llama, write_records(tmp_path / "b.jsonl", rows), *flags).notes
    assert not any("not read" in note for note in notes)


PARTS = [
    {"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": "data:"}},
    {"type": "input_image", "image_url": "http://"}, {"type": "input_audio", "input_audio": {"data": ""}},
    {"type": "video", "video": "a.mp4"}, {"image": "a.png"}, {"type": "audio_url", "audio_url": {"url": "a"}},
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_pictures_and_sounds_are_refused(part):
    content = [{"type": "text", "text": "What?"}, part]
    kind = part.get("type", "image")
    with pytest.raises(BadRecord, match=f"a turn holds {kind}: only text is read"):
        CHAT.read({"messages": [{"role": "user", "content": content}, TALK[1]]})


ROWS = {
    "messages": {"messages": TALK[:2]},
    "instruction": {"instruction": "Say hello.", "input": "", "output": "Hello."},
    "prompt": {"prompt": "Hi?", "completion": "Hello."},
}


@pytest.mark.parametrize("column", ["images", "audios"])
def test_placeholders_of_pictures_are_refused(prepare_causal, llama, tmp_path, column):
    place = f"<{column.rstrip('s')}>"
    rows = {
        "messages": {"messages": [{"role": "user", "content": f"{place}\nWhat?"}, TALK[1]]},
        "instruction": {"instruction": f"What is this {place}?", "input": "", "output": "A cat."},
        "prompt": {"prompt": f"{place} What?", "completion": "A cat."},
    }
    for name, row in rows.items():
        file = write_records(tmp_path / f"{name}.jsonl", [{**each, column: "a.png"} for each in (row, ROWS[name])] * 4)
        said = refusal(prepare_causal, llama, file, "--chat_template", "chatml", "--packing", "none")
        assert f"a text has {place}, the place of what is in the column {column}: only text is read" in said
        file = write_records(tmp_path / f"{name}-bare.jsonl", [row] * 4)
        assert prepare_causal(llama, file, "--chat_template", "chatml", "--packing", "none").train is not None


def test_prompts_of_generate_bring_what_records_bring(tmp_path):
    file = write_records(tmp_path / "asked.jsonl", [{"messages": [
        TALK[0], {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": "dry"},
    ], "tools": json.dumps([TOOL])}])  # fmt: skip
    (prompt,) = read_prompts(GenerateOptions(model="a", prompt_file=str(file)))
    assert prompt.given == {"tools": [TOOL]}
    assert prompt[1]["tool_calls"] == [CALL]
    assert prompt[2]["name"] == "weather"
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    write_records(file, [{"prompt": "q", "system": "s", "id": 1}, {"prompt": asked}, {"prompt": "q", "system": ""}])
    assert read_prompts(GenerateOptions(model="a", prompt_file=str(file))) == [asked, asked, "q"]
    write_records(file, [{"messages": [{"role": "user", "content": [PARTS[0], {"type": "text", "text": "What?"}]}]}])
    assert "line 1: a turn holds image" in refusal(read_prompts, GenerateOptions(model="a", prompt_file=str(file)))
