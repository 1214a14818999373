"""Llama (Touvron et al. 2023), and the families that have its layers under its names: Mistral, Qwen, Gemma, ..."""

from dataclasses import replace

from zerofit.model.families.family import Family, StagePlan, TensorPlan


def widths(config) -> dict[str, int]:
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {name: getattr(config, name) for name in names}


RELATIVES = Family(
    model_types=("gemma", "gemma2", "gemma3_text", "olmo", "granite", "smollm3"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    classifier_heads=("score",),
)
QWEN3 = replace(RELATIVES, model_types=("qwen3",), splits_rows=True)
# The others have norms within their attention, or factors before and behind their layers.
SPLIT_ALIKE = replace(
    RELATIVES,
    model_types=("mistral", "qwen2"),
    splits_rows=True,
    tensor_plan=TensorPlan(
        columns=dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1),
        rows=("o_proj", "down_proj"),
        widths=widths,
    ),
    stage_plan=StagePlan(layers="layers", before=("embed_tokens",), after=("norm",)),
)
# Meta's own code and published folders begin every text with the beginning-of-text token.
LLAMA = replace(SPLIT_ALIKE, model_types=("llama",), bare_tokenizer_options={"add_bos_token": True})

FAMILIES = (LLAMA, SPLIT_ALIKE, QWEN3, RELATIVES)
