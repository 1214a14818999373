"""Llama (Touvron et al. 2023), and the families that have its layers under its names: Mistral, Qwen, Gemma, ..."""

from dataclasses import replace

from train.model.families.family import Family

RELATIVES = Family(
    model_types=("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "granite", "smollm3"),
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    classifier_heads=("score",),
)
SPLIT_ALIKE = replace(RELATIVES, model_types=("mistral", "qwen2", "qwen3"), splits_rows=True)
# Meta's own code and published folders begin every text with the beginning-of-text token.
LLAMA = replace(SPLIT_ALIKE, model_types=("llama",), bare_tokenizer_options={"add_bos_token": True})

FAMILIES = (LLAMA, SPLIT_ALIKE, RELATIVES)
