"""Files of others that would take all time or memory end in one sentence; large files of honest people do not."""

import time
from types import SimpleNamespace

import psutil
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers import refusal
from zerofit.data.text import tokenize_texts
from zerofit.model.adapter_folder import open_adapter
from zerofit.model.configuration import read_config, read_json
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.tasks import ClmRecipe
from zerofit.record.run_folder import RunFolder
from zerofit.tools.generate.respond import read_prompts

DEEP = "[" * 100_000


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize("bomb", [
    f"{ALIASES}train_file: *i\n", f"train_file: {DEEP}\n", f"train_file: {'{a: ' * 5000}\n",
    f"max_train_steps: {'9' * 9999}\n", "seed: 2026-99-99\n", "train_file: &x [*x]\n",
])  # fmt: skip
def test_yaml(tmp_path, bomb):
    (tmp_path / "recipe.yaml").write_text(bomb)
    began = time.process_time()
    message = refusal(parse_recipe, ClmRecipe, ["--config", str(tmp_path / "recipe.yaml")])
    assert "recipe.yaml" in message
    assert len(message) < 2000
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "loss": 1.0}\n')
    assert RunFolder(tmp_path).recorded() is None
    assert time.process_time() - began < 20


def test_json_that_is_nested_too_deeply(tmp_path):
    for name in ("adapter_config.json", "config.json", "deepspeed.json", "prompts.jsonl"):
        (tmp_path / name).write_text(f'{{"a": {DEEP}')
    assert "adapter_config.json" in refusal(open_adapter, str(tmp_path))
    assert str(tmp_path) in refusal(read_config, "model", str(tmp_path))
    assert "deepspeed.json" in refusal(read_json, tmp_path / "deepspeed.json")
    assert "prompts.jsonl" in refusal(read_prompts, SimpleNamespace(prompt_file=str(tmp_path / "prompts.jsonl")))


@pytest.fixture
def tokenizer():
    words = models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")
    backend = Tokenizer(words)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_a_text_that_takes_more_memory_than_there_is(tokenizer, tmp_path, monkeypatch):
    table = Dataset.from_dict({"text": ["a " * 10**5, "a a"]})
    assert [len(row) for row in tokenize_texts(table, tokenizer, True, tmp_path)["input_ids"]] == [
        10**5 + 1,
        3,
    ]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=30 << 20))
    assert "200,000 characters" in refusal(tokenize_texts, table, tokenizer, False, tmp_path)
