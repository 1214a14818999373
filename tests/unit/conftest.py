"""Shared by the tests of single parts: tokenizers and instructions."""

import pytest
from chats import Tokenizers, short_instructions


@pytest.fixture(scope="session")
def tokenizer_of(data) -> Tokenizers:
    """tokenizer_of(NAME), a name of chats.TOKENIZERS."""
    return Tokenizers(data)


@pytest.fixture(scope="session")
def records(data) -> list[dict]:
    """Instructions, English and Japanese, with and without an input."""
    return short_instructions(data)
