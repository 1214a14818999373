"""Files of others that would take all time or memory end in one sentence; large files of honest people do not."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import refusal
from train.data.sources import read_source
from train.model.adapter_folder import open_adapter
from train.model.folders import read_json
from train.model.pretrained_io import read_config
from train.recipe.parse import parse_recipe
from train.recipe.tasks import ClmRecipe
from train.record.run_folder import RunFolder
from train.tools.generate.prompts import read_prompts

DEEP = "[" * 100_000
NAMED = ["--config_name", "gpt2", "--tokenizer_name", "any", "--train_file", "x"]


def source_of(path: Path):
    recipe = ["--config_name", "gpt2", "--tokenizer_name", "any", "--cache_dir", str(path.parent / "cache")]
    return read_source(parse_recipe(ClmRecipe, [*recipe, "--train_file", str(path)]))


# --------------------------------------------------------------------------------------------------------------- YAML

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize("bomb", [
    f"{ALIASES}train_file: *i\n", f"train_file: {DEEP}\n", f"train_file: {'{a: ' * 5000}\n",
    f"max_train_steps: {'9' * 9999}\n", "run_name: 2026-99-99\n", "train_file: &x [*x]\n",
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


def test_yaml_that_repeats_a_value(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: &n 7\nmax_train_steps: *n\nconfig_name: gpt2\ntokenizer_name: a\n"
                                          "train_file: [a, b]\n")  # fmt: skip
    assert parse_recipe(ClmRecipe, ["--config", str(tmp_path / "recipe.yaml")]).max_train_steps == 7


# --------------------------------------------------------------------------------------------------------------- JSON


def test_json_that_is_nested_too_deeply(tmp_path):
    for name in ("adapter_config.json", "config.json", "deepspeed.json", "prompts.jsonl"):
        (tmp_path / name).write_text(f'{{"a": {DEEP}')
    assert "adapter_config.json" in refusal(open_adapter, str(tmp_path))
    assert str(tmp_path) in refusal(read_config, "model", str(tmp_path))
    assert "deepspeed.json" in refusal(read_json, tmp_path / "deepspeed.json")
    assert "prompts.jsonl" in refusal(read_prompts, SimpleNamespace(prompt_file=str(tmp_path / "prompts.jsonl")))
