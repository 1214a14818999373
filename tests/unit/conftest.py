"""Shared by the tests of single parts: tokenizers and instructions."""

import pytest
from chats import Tokenizers, short_instructions
from folders import tools_in_this_process

from zerofit.data.causal import prepare_causal_data
from zerofit.model.configuration import load_configuration
from zerofit.recipe import ClmRecipe, DpoRecipe, parse_recipe


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
