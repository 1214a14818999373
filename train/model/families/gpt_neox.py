"""GPT-NeoX (Black et al. 2022; Pythia, OpenCALM), and BLOOM and Falcon, which fuse query, key and value as it does."""

from train.model.families.family import Family

FAMILIES = (
    Family(
        model_types=("gpt_neox", "bloom", "falcon"),
        lora_targets=("query_key_value",),  # one layer; each head has its own query, key and value side by side in it
        classifier_heads=("score",),
    ),
)
