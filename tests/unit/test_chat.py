"""Chat templates and the labels of conversations: what is trained on, token by token; from file to
blocks: packed whole, cut and counted, shown, cached."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chats import ANSWERS, CHAT, LONG_TALK, PROMPT, TOKENIZERS, encoded, encoder_of, trained_text
from helpers import refusal, tiny_model, write_records

from zerofit.data.chat.instructions import RecordForm
from zerofit.data.chat.samples import best_fit
from zerofit.data.collate import CausalCollator
from zerofit.data.prompts import Renderer
from zerofit.model.chat import BadTemplate, read_template, render, warn_of_repeated_prompt
from zerofit.model.loss import IGNORE, install_loss, model_loss

WRITTEN = {  # Llama-2's: below
    "chatml": "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n⟦3<|im_end|></s>⟧",
    "instruction": "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n⟦3</s>⟧",
    "instruction-ja": "### 指示:\nAdd.\n\n### 入力:\n1 2\n\n### 応答:\n⟦3</s>⟧",
    "none": "Add.\n\n1 2⟦3</s>⟧",
}


@pytest.mark.parametrize("template", WRITTEN)
def test_what_the_templates_write(tokenizer_of, template):
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = read_template(template)
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
    form = RecordForm("prompt", "prompt", "completion")
    record = {"prompt": LONG_TALK[:4], "completion": LONG_TALK[4:]}
    (row,) = encoded(encoder_of(tokenizer, form, "instruction"), [record])
    assert [run.removesuffix("</s>") for run in trained_text(row, tokenizer)] == ANSWERS[1:]


@pytest.mark.parametrize(("template", "words"), [
    ("{% for m in messages %}\n{% if m.role == 'system' %}\n{{ raise_exception('no system role') }}\n{% endif %}\n"
     "{{ m.content }}{% endfor %}", "line 3: no system role"),
    ("\n{% macro turn(m) %}\n{{ m.text.upper() }}\n{% endmacro %}\n{{ turn(messages[0]) }}", "line 3: "),
    ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "it does not write turn 3, an answer"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}{{ 'x' * (messages[-1].content | length) }}",
     "it changes turn 3, an answer"),
])  # fmt: skip
def test_a_template_that_fails_on_a_record(tokenizer_of, tmp_path, template, words):
    (tmp_path / "mine.jinja").write_text(template)
    encoder = encoder_of(tokenizer_of("gpt2"), CHAT, str(tmp_path / "mine.jinja"))
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Good morning."},
    ]
    message = refusal(encoder.render, encoder.form.read({"messages": talk}), "a.jsonl, record 7")
    assert message.startswith("error: a.jsonl, record 7: chat_template = ")
    assert "mine.jinja' fails on it: " in message
    assert words in message, message


def test_texts_that_a_template_has_written_are_named(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = read_template("llama-2-chat")
    (warning,) = warn_of_repeated_prompt(tokenizer, "it", ["a", "<s>[INST] b [/INST]"])
    assert "texts have '[INST]', which it writes again" in warning
    assert not warn_of_repeated_prompt(tokenizer, "it", ["a", "<|im_start|>user"])
    tokenizer.chat_template = read_template("none")
    assert not warn_of_repeated_prompt(tokenizer, "it", ["[INST]"])


def test_a_template_that_does_not_write_calls_of_tools_is_refused(tokenizer_of):
    tokenizer = tokenizer_of("llama")
    tokenizer.chat_template = read_template("none")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    turns = [LONG_TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(BadTemplate, match="does not write the tool_calls of turn 2"):
        render(tokenizer, RecordForm("messages", "messages").read({"messages": turns}))


# ------------------------------------------------------------------------------------------------- from file to blocks


@pytest.fixture
def prepare(data, prepare_causal):
    return partial(prepare_causal, data("models/llama/hf"), validation_split_percentage=0)


@pytest.fixture
def short(records, tmp_path):
    """A file of records that are short enough for small blocks."""
    cut = [{**record, "input": record["input"][:20]} for record in records]
    kept = [record for record in cut if sum(len(text.encode()) for text in record.values()) < 300]
    assert sum(not record["output"].isascii() for record in kept) >= 5
    asked = [{**record, "instruction": f"{n} {record['instruction']}"} for n in range(3) for record in kept]
    assert len(asked) >= 40
    return write_records(tmp_path / "short.jsonl", asked)


def all_of(samples) -> list[dict]:
    assert len(samples) > 0
    return [samples[index] for index in range(len(samples))]


def segments(block: dict) -> list[tuple[tuple, tuple]]:
    """(ids, labels) of each part of a block whose positions count up from 0."""
    begins = np.flatnonzero(block["position_ids"] == 0).tolist()
    parts = list(zip(begins, [*begins[1:], len(block["position_ids"])]))
    for a, b in parts:
        assert block["position_ids"][a:b].tolist() == list(range(b - a))
    return [(tuple(block["input_ids"][a:b].tolist()), tuple(block["labels"][a:b].tolist())) for a, b in parts]


def test_blocks_hold_whole_samples(short, prepare):
    blocks = prepare(short, "--chat_template", "instruction", "--block_size", "400")
    single = prepare(short, "--chat_template", "instruction", "--block_size", "400", "--packing", "none")
    rows = [(tuple(row["input_ids"].tolist()), tuple(row["labels"].tolist())) for row in all_of(single.train)]
    found, filler = [], 0
    for block in all_of(blocks.train):
        assert {len(block[name]) for name in ("input_ids", "labels", "position_ids")} == {400}
        held = segments(block)
        if block["num_tokens"] < 400:
            ids, labels = held.pop()
            assert len(ids) == 400 - block["num_tokens"]
            assert set(labels) == {IGNORE}
            filler += len(ids)
        assert sum(len(ids) for ids, _ in held) == block["num_tokens"]
        found += held
    assert sorted(found) == sorted(rows)
    assert filler > 0
    assert max(len(segments(block)) for block in all_of(blocks.train)) > 2
    stats, alone = blocks.train.stats, single.train.stats
    tokens, positions = sum(len(ids) for ids, _ in rows), 400 * len(blocks.train)
    assert (stats.documents, stats.samples, stats.tokens, stats.truncated) == (len(rows), len(blocks.train), tokens, 0)
    assert stats.padding == pytest.approx(filler / positions)
    assert positions == tokens + filler
    assert stats.trained == alone.trained == sum(label != IGNORE for _, labels in rows for label in labels)
    assert (alone.documents, alone.samples, alone.tokens) == (len(rows), len(rows), tokens)
    assert alone.padding == pytest.approx(1 - tokens / (len(rows) * max(len(ids) for ids, _ in rows)))
    again = prepare(short, "--chat_template", "instruction", "--block_size", "400").train
    assert [segments(block) for block in all_of(again)] == [segments(block) for block in all_of(blocks.train)]


@pytest.mark.parametrize("seed", range(2))
def test_best_fit(seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(3, 1, size=2000).astype(int) + 1, 100)
    blocks = best_fit(lengths, 100)
    assert sorted(index for block in blocks for index in block) == list(range(2000))
    sums = [int(lengths[block].sum()) for block in blocks]
    assert max(sums) <= 100
    assert len(blocks) <= 1.02 * -(-lengths.sum() // 100)
    assert best_fit(lengths, 100) == blocks


def test_the_loss_of_a_block_is_the_sum_of_its_samples(short, prepare):
    flags = ("--chat_template", "llama-2-chat", "--block_size", "500", "--max_train_samples", "24")
    model = tiny_model("llama", vocab_size=512, max_position_embeddings=512)
    install_loss(model, "full")
    collate = CausalCollator(pad_id=0)

    def loss_of(samples) -> tuple[float, int, int]:
        batches = [collate([(sample, n)]) for n, sample in enumerate(all_of(samples))]
        with torch.no_grad():
            losses = [float(model_loss(model, batch)) for batch in batches]
        return sum(losses), sum(b.num_targets for b in batches), sum(b.num_tokens for b in batches)

    blocks, rows = prepare(short, *flags).train, prepare(short, *flags, "--packing", "none").train
    assert len(blocks) < len(rows) / 2
    packed, separate = loss_of(blocks), loss_of(rows)
    assert packed[0] == pytest.approx(separate[0], rel=1e-5)
    assert packed[1:] == separate[1:] == (rows.stats.trained, rows.stats.tokens)
    with torch.no_grad():
        together = float(model_loss(model, collate([(rows[n], n) for n in range(len(rows))])))
    assert together == pytest.approx(separate[0], rel=1e-5)


def asked(sizes: list[int], words: list[int]) -> list[dict]:
    """Prompts and answers of so many tokens, about."""
    pairs = zip(sizes, words, strict=True)
    return [{"prompt": "x" * size + "\n", "completion": "yes" + " yes" * count} for size, count in pairs]


def test_answers_beyond_the_block_are_counted(tokenizer_of, tmp_path, prepare):
    some = asked([5, 5, 50, 5, 120, 5, 300, 5, 5, 50], [90, 2, 2, 2, 2, 2, 90, 2, 2, 40])
    whole = encoded(encoder_of(tokenizer_of("small"), PROMPT, "none"), some)
    path = write_records(tmp_path / "a.jsonl", some)
    data = prepare(path, "--packing", "none", "--block_size", "100")
    kept = [row for n, row in enumerate(whole) if n not in (4, 6)]
    for name in ("input_ids", "labels"):
        assert [row[name].tolist() for row in all_of(data.train)] == [row[name][:100].tolist() for row in kept]
    warnings = [note for note in data.notes if "WARNING" in note]
    assert len(warnings) == 2
    remedies = ("512 positions", "block_size = 4")  # published tokenizers make fewer tokens of these texts
    assert all("20%: 2 of 10" in note and any(each in note for each in remedies) for note in warnings), warnings
    stats, tokens = data.train.stats, sum(len(row["input_ids"]) for row in whole)
    assert (stats.documents, stats.samples, stats.tokens) == (10, 8, tokens)
    assert stats.truncated == tokens - sum(min(len(row["input_ids"]), 100) for row in kept)
    assert stats.trained == sum(int((row["labels"] != IGNORE).sum()) for row in all_of(data.train))
    packed = prepare(path, "--block_size", "100").train
    assert (packed.stats.trained, packed.stats.truncated) == (stats.trained, stats.truncated)
    assert sum(len(segments(block)) - (block["num_tokens"] < 100) for block in all_of(packed)) == 8


def test_where_most_is_lost_the_run_stops(tmp_path, prepare):
    few = write_records(tmp_path / "few.jsonl", asked([5] * 20 + [120], [2] * 21))
    most = write_records(tmp_path / "most.jsonl", asked([5] + [120] * 2, [2] * 3))
    flags = ("--packing", "none", "--block_size", "100")
    assert "note      1 of 21 training samples are skipped" in "\n".join(prepare(few, *flags).notes)
    for path, part in ((most, "training"), (few, "held-out")):
        held_out = ("--validation_file", most) if part == "held-out" else ()
        message = refusal(prepare, path, *flags, *held_out)
        assert f"2 of 3 {part} samples are skipped" in message
        assert "block_size = 1" in message
        assert "--allow_data_loss" in message
        assert len(prepare(path, *flags, *held_out, "--allow_data_loss").train)


def test_a_sample_is_shown(tmp_path, prepare):
    path = write_records(tmp_path / "a.jsonl", [{"messages": LONG_TALK}] + [{"messages": LONG_TALK[1:3]}] * 9)
    data = prepare(path, "--chat_template", "llama-2-chat", "--block_size", "512")
    heading, *lines = data.shown
    assert "chat_template = 'llama-2-chat'" in heading
    assert "⟦ ⟧ is trained on" in heading
    assert all(line.startswith("  | ") for line in lines)
    assert "\n".join(line[4:] for line in lines) == (
        "<s>[INST] <<SYS>>\nあなたは誠実で優秀な日本人のアシスタントです。\n<</SYS>>\n\n日本で一番高い山は? [/INST]"
        "⟦ 富士山です。🗻 </s>⟧<s>[INST] And in 𠮷野? [/INST]⟦ That is Mt. Hakkyō,\n1,915 m. </s>⟧"
        "<s>[INST] ありがとう。 [/INST]⟦ どういたしまして! </s>⟧"
    )
