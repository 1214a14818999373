"""T5 (Raffel et al. 2020) and its relatives: encoder-decoder models whose heads have a width of their own."""

from collections.abc import Mapping
from typing import Any

from zerofit.model.families.family import Family


def attention_width(config) -> int:
    return config.num_heads * config.d_kv


def derive_decoder_layers(config, overrides: Mapping[str, Any]) -> None:
    """The decoder has as many layers as the encoder, unless the overrides say otherwise."""
    if "num_layers" in overrides and "num_decoder_layers" not in overrides:
        config.num_decoder_layers = config.num_layers


T5 = Family(
    model_types=("t5", "mt5", "umt5", "longt5"),
    lora_targets=("q", "k", "v", "o"),
    classifier_heads=("classification_head.out_proj",),
    decoder_starts_with_padding=True,
    overflows_fp16=True,  # trained in bf16; the larger sizes exceed fp16's range
    attention_width=attention_width,
    derive_sizes=derive_decoder_layers,
)
SWITCH = Family(
    model_types=("switch_transformers",),
    overflows_fp16=True,
    attention_width=attention_width,
    derive_sizes=derive_decoder_layers,
)

FAMILIES = (T5, SWITCH)
