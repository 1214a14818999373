"""GPT-NeoX (Black et al. 2022; Pythia, OpenCALM), and BLOOM and Falcon, which fuse query, key and value as it does."""

from dataclasses import replace

from train.model.families.family import Family

RELATIVES = Family(
    model_types=("bloom", "falcon"),
    lora_targets=("query_key_value",),  # one layer; each head has its own query, key and value side by side in it
    classifier_heads=("score",),
)
GPT_NEOX = replace(RELATIVES, model_types=("gpt_neox",), splits_rows=True)

FAMILIES = (GPT_NEOX, RELATIVES)
