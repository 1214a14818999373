"""`zerofit plan`: what an evaluation by generation takes, against what transformers' own search caches."""

import pytest
import torch
import transformers

from zerofit.estimate.peak import cache_of
from zerofit.recipe.tasks import Seq2SeqRecipe

SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 90}  # fmt: skip
MODELS = {
    "blenderbot": transformers.BlenderbotConfig(**SMALL),
    "bart": transformers.BartConfig(**SMALL),
    "t5": transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=4, vocab_size=90, decoder_start_token_id=0
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_are_those_of_a_search(name):
    batch, beams, source, target = 3, 2, 7, 5
    model = transformers.AutoModelForSeq2SeqLM.from_config(MODELS[name]).eval()
    written = model.generate(
        torch.full((batch, source), 8), num_beams=beams, min_new_tokens=target, max_new_tokens=target,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = written.past_key_values
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    with torch.device("meta"):
        counted = cache_of(transformers.AutoModelForSeq2SeqLM.from_config(MODELS[name]))
    recipe = Seq2SeqRecipe(max_source_length=source, max_target_length=target)
    parts = counted.parts(recipe, batch * beams, 4)
    assert parts["keys and values"] == held
    assert parts["activations"] == batch * beams * source * 32 * 4
