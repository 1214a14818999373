"""Tokenizers of each kind, instructions, and conversations made into token ids."""

import copy
import json

import numpy as np

from zerofit.data.chat.instructions import RecordForm
from zerofit.data.chat.samples import ChatEncoder
from zerofit.model.chat import install_template
from zerofit.model.configuration import load_configuration
from zerofit.model.loss import IGNORE
from zerofit.model.tokenizer import load_tokenizer
from zerofit.recipe import ClmRecipe, parse_recipe

TOKENIZERS = {  # byte-level, with byte fallback, and a small one with byte fallback that came with a model
    "gpt2": ("tokenizers/gpt2", "--config_name", "gpt2", "--tokenizer_name"),
    "llama": ("tokenizers/llama", "--config_name", "llama-2-7b", "--tokenizer_name"),
    "small": ("models/llama/hf", "--model_name_or_path"),
}
INSTRUCTION = RecordForm("instruction", "instruction", "output", "input")
PROMPT = RecordForm("prompt", "prompt", "completion", plain=True)
CHAT = RecordForm("messages", "messages")

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


class Tokenizers:
    """tokenizers(NAME) is one of TOKENIZERS with no template installed yet; each is loaded once."""

    def __init__(self, data):
        self._data, self._loaded = data, {}

    def __call__(self, name: str):
        if name not in self._loaded:
            folder, *flags = TOKENIZERS[name]
            recipe = parse_recipe(ClmRecipe, [*flags, str(self._data(folder)), "--train_file", "a.json"])
            self._loaded[name] = load_tokenizer(recipe, load_configuration(recipe))
        self._loaded[name].chat_template = None
        return self._loaded[name]


def short_instructions(data) -> list[dict]:
    """Instructions, English and Japanese, with and without an input."""
    found = []
    for name in ("english", "japanese"):
        some = json.loads(data(f"instruct/{name}.json").read_text())[:400]
        short = [record for record in some if sum(map(len, record.values())) < 700]
        found += [record for record in short if record["input"]][:12]
        found += [record for record in short if not record["input"]][:12]
    assert len(found) >= 30
    assert sum(not record["output"].isascii() for record in found) >= 10
    return found


def encoder_of(tokenizer, form: RecordForm, template: str | None, whole: bool = False) -> ChatEncoder:
    default = "none" if form.plain else None
    encoder = ChatEncoder(tokenizer, install_template(tokenizer, template, default)[0], 4096, whole)
    encoder.form = form  # for `encoded`
    return encoder


def encoded(encoder: ChatEncoder, records: list[dict]) -> list[dict]:
    table = encoder.encode([encoder.render(encoder.form.read(record), "a.json, record 1") for record in records])
    return [dict(zip(table, values)) for values in zip(*table.values())]


def trained_text(row: dict, tokenizer) -> list[str]:
    """The trained tokens as text, one for each run of them."""
    trained = np.array(row["labels"]) != IGNORE
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]])))
    assert len(edges) % 2 == 0
    return [tokenizer.decode(row["input_ids"][a:b]) for a, b in edges.reshape(-1, 2)]


def chatml_tokenizer(tokenizer, template: str, eos: str):
    """A copy with ChatML's tokens, a template of its own, and this token at the end of texts."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_special_tokens({"eos_token": eos})  # a token of its own, also where it was none
    tokenizer.chat_template = template
    return tokenizer
