"""Real tokenizers, real instructions, and conversations made into token ids."""

import functools
import json

import pytest
from conftest import SHARED

from train.data.chat import ChatEncoder
from train.data.instructions import Form
from train.model.chat import install_template
from train.model.configuration import load_configuration
from train.model.tokenizer import load_tokenizer
from train.recipe import ClmRecipe, UserError, parse_recipe

TOKENIZERS = {  # of GPT-2 (byte-level), of Llama 2 (byte fallback), and a small one of Llama's kind
    "gpt2": ("--config_name", "gpt2", "--tokenizer_name", str(SHARED / "tokenizers" / "gpt2")),
    "llama2": ("--config_name", "llama-2-7b", "--tokenizer_name", str(SHARED / "tokenizers" / "llama2")),
    "stories": ("--model_name_or_path", str(SHARED / "models" / "stories260K" / "hf")),
}
INSTRUCTION = Form("instruction", "instruction", "output", "input")
PROMPT = Form("prompt", "prompt", "completion", plain=True)
CHAT = Form("messages", "messages")

LONG_TALK = [
    {"role": "system", "content": "あなたは誠実で優秀な日本人のアシスタントです。"},
    {"role": "user", "content": "日本で一番高い山は?"},
    {"role": "assistant", "content": "富士山です。🗻"},
    {"role": "user", "content": "And in 𠮷野?"},
    {"role": "assistant", "content": "That is Mt. Hakkyō,\n1,915 m."},
    {"role": "user", "content": "ありがとう。"},
    {"role": "assistant", "content": "どういたしまして!"},
]
ANSWERS = [message["content"] for message in LONG_TALK if message["role"] == "assistant"]


def tokenizer_of(name: str):
    """A real tokenizer, with no template installed yet; tests that use it are skipped where the data is absent."""
    tokenizer = _loaded(name)
    tokenizer.chat_template = None
    return tokenizer


@functools.cache
def _loaded(name: str):
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there: this test reads real tokenizers")
    recipe = parse_recipe(ClmRecipe, [*TOKENIZERS[name], "--train_file", "a.json"])
    return load_tokenizer(recipe, load_configuration(recipe))


@functools.cache
def real_records() -> list[dict]:
    """Real instructions, English and Japanese, with and without an input."""
    found = []
    for name in ("alpaca_en_demo", "ja_qa"):
        some = json.loads((SHARED / "instruct" / f"{name}.json").read_text())[:400]
        short = [record for record in some if sum(map(len, record.values())) < 700]
        found += [record for record in short if record["input"]][:12]
        found += [record for record in short if not record["input"]][:12]
    assert len(found) >= 30
    assert sum(not record["output"].isascii() for record in found) >= 10
    return found


def refusal(function, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    return caught.value.report()


def encoder_of(
    tokenizer, form: Form, template: str | None, block_size: int = 4096, whole: bool = False
) -> ChatEncoder:
    default = "none" if form.plain else None
    return ChatEncoder(tokenizer, form, install_template(tokenizer, template, default), block_size, whole)


def encoded(encoder: ChatEncoder, records: list[dict]) -> list[dict]:
    table = encoder.encode([encoder.render(record, "a.json, record 1") for record in records])
    return [dict(zip(table, values)) for values in zip(*table.values())]
