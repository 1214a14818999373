"""Model families: what is special about one is in its entry, and a model of no listed family has the defaults."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from helpers import small_sizes
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from zerofit.model.configuration import usable_positions
from zerofit.model.families import DEFAULT, FAMILIES, family_of


def test_every_model_type_is_one_of_transformers_in_one_family():
    names = Counter(name for family in FAMILIES for name in family.model_types)
    assert len(names) > 25
    assert max(names.values()) == 1
    assert not names.keys() - CONFIG_MAPPING.keys()


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
        ("xlnet", {}, None),
        ("deberta-v2", {"position_biased_input": False}, None),
    ],
)
def test_usable_positions(model_type, sizes, positions):
    assert usable_positions(AutoConfig.for_model(model_type, **sizes)) == positions


@pytest.mark.parametrize(
    "model_type", ["camembert", "data2vec-text", "ibert", "luke", "markuplm", "roberta-prelayernorm", "xlm-roberta-xl"]
)
def test_a_row_of_all_usable_positions_has_a_place_in_the_model(model_type):
    """Positions of a RoBERTa begin after the padding token's id."""
    sizes = small_sizes(model_type, max_position_embeddings=40)
    config = AutoConfig.for_model(model_type, **sizes | {"pad_token_id": 1, "vocab_size": 50})
    model, row = AutoModel.from_config(config).eval(), torch.full((1, usable_positions(config)), 5)
    assert model(input_ids=row).last_hidden_state.shape[1] == 38
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 39), 5))
