"""Model families: what is special about one is in its entry, and a model of no listed family has the defaults."""

import pytest
import torch
from helpers import small_sizes
from transformers import AutoConfig, AutoModel

from zerofit.model.configuration import usable_positions


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
