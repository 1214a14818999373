"""Mixtures of experts: Mixtral (Jiang et al. 2024), Qwen 2 and 3 MoE, OLMoE (Muennighoff et al. 2024).

In each of them transformers keeps the experts of a layer in two parameters, and a router chooses for each token.
"""

from zerofit.model.families.family import Family

FAMILIES = (
    Family(
        model_types=("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        classifier_heads=("score",),
        has_experts=True,
    ),
)
