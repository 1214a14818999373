"""Which models' rows can be split: found out before data is read. That it is right: tests/launch/test_sequence.py."""

import pytest
from helpers import check_refusal
from transformers import AutoConfig

from zerofit.recipe import ClmRecipe
from zerofit.strategy.sequence import check_sequence_parallel

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
            "original_max_position_embeddings": 64}  # fmt: skip


def config(model_type: str = "llama", heads: int = 8, kv_heads: int = 2, **changes):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 96}
    return AutoConfig.for_model(model_type, **sizes, **changes)


@pytest.mark.parametrize(
    ("model", "degree"),
    [(config(), 2), (config(), 4), (config(), 8), (config(kv_heads=1), 2), (config("qwen2", 6, 3), 3),
     (config("mistral", sliding_window=None), 2), (AutoConfig.for_model("gpt2"), 12)],
)  # fmt: skip
def test_heads_that_the_ranks_can_share(model, degree):
    check_sequence_parallel(model, degree, "mine.json", ClmRecipe(), "fp32")


def test_more_ranks_pass_keys_and_values_on():
    plain = ClmRecipe(packing="concatenate")
    for model in (config(), config(heads=6, kv_heads=2), AutoConfig.for_model("gpt2", attn_pdrop=0.0)):
        check_sequence_parallel(model, 5, "mine.json", plain, "bf16")
    words = ["sequence_parallel_size = 5", "ring attention", "packing", "attn_pdrop=0", "Use 2 or 3 or 4 or 6 or 12"]
    check_refusal(words, check_sequence_parallel, AutoConfig.for_model("gpt2"), 5, "mine.json", ClmRecipe(), "bf16")


@pytest.mark.parametrize(
    ("model", "degree", "words"),
    [
        (config(), 3, ["sequence_parallel_size = 3", "packing", "Use 2 or 4 or 8"]),
        (config(heads=6, kv_heads=2), 3, ["reset_attention_mask", "Use 2 or 6"]),
        (config("mistral", sliding_window=64), 2, ["do not attend to the row in full"]),
        (config(rope_parameters=LONGROPE), 2, ["scales positions by the length of a row"]),
        (config("gemma3_text"), 2, ["not supported for a gemma3_text", "such as zero3"]),
    ],
)
def test_the_others_are_refused_with_the_remedy(model, degree, words):
    words = ["mine.json: sequence_parallel_size = ", *words]
    check_refusal(words, check_sequence_parallel, model, degree, "mine.json", ClmRecipe(), "fp32")
