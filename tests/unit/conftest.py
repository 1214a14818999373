"""Shared by the tests of single parts: tokenizers and instructions, and strategies as torchrun starts them."""

import os

import pytest
import yaml
from chats import Tokenizers, short_instructions
from folders import tools_in_this_process
from helpers import ROOT

from zerofit.data.causal import prepare_causal_data
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, DpoRecipe, parse_recipe
from zerofit.strategy import launch as launch_module
from zerofit.strategy.read import read_strategy


@pytest.fixture(scope="module")
def tools():
    with tools_in_this_process():
        yield


@pytest.fixture(scope="session")
def tokenizer_of(data) -> Tokenizers:
    """tokenizer_of(NAME), a name of chats.TOKENIZERS."""
    return Tokenizers(data)


@pytest.fixture
def prepare_causal(cache):
    """prepare_causal(model, file, flags): the data of a causal run."""

    def run(model, path, *flags, validation_split_percentage: int = 5):
        words = ["--model_name_or_path", model, "--block_size", "256", "--cache_dir", cache, "--train_file", path]
        words += ["--validation_split_percentage", validation_split_percentage, *flags]
        kind = DpoRecipe if "--preference_loss" in flags else ClmRecipe
        recipe = parse_recipe(kind, [*map(str, words)])
        return prepare_causal_data(recipe, load_configuration(recipe))

    return run


@pytest.fixture(scope="session")
def records(data) -> list[dict]:
    """Instructions, English and Japanese, with and without an input."""
    return short_instructions(data)


@pytest.fixture
def under_torchrun(monkeypatch, tmp_path):
    """read(strategy or content of a YAML, flags): (recipe, strategy) of the first of two processes of torchrun."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launch_module, "find_launcher", lambda: None)
    monkeypatch.setattr("zerofit.strategy.read.check_devices", lambda: None)

    def read(strategy: str | dict, *flags: str, processes: int = 2):
        world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        of_a_launcher = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(of_a_launcher)}
        monkeypatch.setattr(os, "environ", {**kept, **world})
        if isinstance(strategy, dict):
            (tmp_path / "own.yaml").write_text(yaml.safe_dump(strategy))
            strategy = str(tmp_path / "own.yaml")
        words = ["--model_type", "llama", "--train_tokenizer_vocab_size", "400", "--train_file", "x.txt", *flags]
        recipe = parse_recipe(ClmRecipe, [*words, "--strategy", strategy])
        return recipe, read_strategy(recipe)

    return read
