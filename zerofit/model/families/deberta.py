"""DeBERTa (He et al. 2021), versions 1, 2 and 3: attention by relative positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zerofit.model.families.family import Family


def absolute_positions(config) -> int | None:
    """No limit without absolute positions: max_position_embeddings is then the range of the relative ones' buckets."""
    return getattr(config, "max_position_embeddings", None) if getattr(config, "position_biased_input", True) else None


def derive_head_and_pooler(config, overrides: Mapping[str, Any]) -> None:
    """The pooler is as wide as the hidden states, and a head of a published configuration follows both."""
    if "hidden_size" in overrides and "pooler_hidden_size" not in overrides:
        config.pooler_hidden_size = config.hidden_size
    changed = {"hidden_size", "num_attention_heads"} & overrides.keys()
    if hasattr(config, "attention_head_size") and changed and "attention_head_size" not in overrides:
        config.attention_head_size = config.hidden_size // config.num_attention_heads


V1 = Family(
    model_types=("deberta",),
    lora_targets=("in_proj",),  # query, key and value in one layer
    classifier_heads=("classifier",),
    usable_positions=absolute_positions,
    derive_sizes=derive_head_and_pooler,
)
V2 = replace(V1, model_types=("deberta-v2",), lora_targets=("query_proj", "key_proj", "value_proj"))

FAMILIES = (V1, V2)
