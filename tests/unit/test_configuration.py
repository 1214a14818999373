"""A run's configuration is resolved once."""

import json

import pytest
import yaml

from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.training.configuration import resolve

FLAGS = ["--config_name", "gpt2", "--tokenizer_name", "x", "--train_file", "x.txt"]


def parsed(tmp_path, *flags: str) -> ClmRecipe:
    return parse_recipe(ClmRecipe, [*FLAGS, "--output_dir", str(tmp_path / "run"), *flags], prog="clm.py")


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A user's pair, as accelerate's launcher hands it down."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": 32, "gradient_clipping": 0.5}))
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED"}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    return str(file)


def test_every_value_has_its_source(tmp_path, pair):
    config = resolve("clm", parsed(tmp_path, "--learning_rate", "1e-3"))
    recipe = config.recipe
    assert (recipe.learning_rate, recipe.source("learning_rate")) == (1e-3, "--learning_rate")
    assert (recipe.max_grad_norm, recipe.source("max_grad_norm")) == (0.5, pair)
    assert (recipe.global_batch_size, recipe.source("global_batch_size")) == (32, pair)
    assert (recipe.seed, recipe.source("seed")) == (42, None)
    assert recipe.dataloader_num_workers is not None, "what is left open is filled in"
    assert config.strategy.batches.accumulation == 32 // recipe.per_device_train_batch_size
    assert config.strategy.deepspeed["gradient_clipping"] == 0.5
