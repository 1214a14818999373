"""Model families: what is special about one is in its entry, and a model of no listed family has the defaults."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
from helpers import ROOT
from transformers import CONFIG_MAPPING, AutoConfig

from zerofit.model.configuration import usable_positions
from zerofit.model.families import BY_MODEL_TYPE, DEFAULT, FAMILIES, family_of

ASKS_FOR_A_NAME = re.compile(r"model_type(\.startswith\(| (==|!=|in|not in) )")


def test_every_model_type_is_one_of_transformers_in_one_family():
    names = Counter(name for family in FAMILIES for name in family.model_types)
    assert len(names) > 25
    assert max(names.values()) == 1
    assert not names.keys() - CONFIG_MAPPING.keys()


def test_only_the_families_know_names_of_families():
    files = [file for file in (ROOT / "zerofit").rglob("*.py") if "convert" not in file.parts]
    assert len(files) > 150
    asking = [file.name for file in files if ASKS_FOR_A_NAME.search(file.read_text())]
    assert asking == ["configuration.py"]  # --model_type: is it one of transformers'?


def test_an_unknown_family_has_the_defaults():
    config = SimpleNamespace(model_type="of-tomorrow", hidden_size=64, max_position_embeddings=128)
    assert family_of(config) is DEFAULT
    assert family_of(config).lora_targets == ("all-linear",)
    assert family_of(config).attention_width(config) == 64
    assert usable_positions(config) == 128


@pytest.mark.parametrize(
    ("model_type", "sizes", "positions"),
    [
        ("gpt2", {"n_positions": 32}, 32),
        ("roberta", {"max_position_embeddings": 34, "pad_token_id": 1}, 32),
        ("deberta-v2", {"position_biased_input": False}, None),
    ],
)
def test_usable_positions(model_type, sizes, positions):
    assert usable_positions(AutoConfig.for_model(model_type, **sizes)) == positions


def test_every_listed_family_counts_its_attention_width():
    assert len(BY_MODEL_TYPE) > 25
    for model_type, family in BY_MODEL_TYPE.items():
        assert family.attention_width(AutoConfig.for_model(model_type)) > 0
