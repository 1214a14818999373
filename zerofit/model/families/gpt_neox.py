"""GPT-NeoX (Black et al. 2022; Pythia, OpenCALM), and BLOOM and Falcon, which fuse query, key and value as it does."""

from dataclasses import replace

from zerofit.model.families.family import Family, StagePlan, TensorPlan


def widths(config) -> dict[str, int]:
    return {name: getattr(config, name) for name in ("num_attention_heads", "intermediate_size")}


RELATIVES = Family(
    model_types=("bloom", "falcon"),
    lora_targets=("query_key_value",),  # one layer; each head has its own query, key and value side by side in it
    classifier_heads=("score",),
)
GPT_NEOX = replace(
    RELATIVES,
    model_types=("gpt_neox",),
    splits_rows=True,
    tensor_plan=TensorPlan(
        columns={"query_key_value": 1, "dense_h_to_4h": 1}, rows=("dense", "dense_4h_to_h"), widths=widths
    ),
    stage_plan=StagePlan(layers="layers", before=("embed_in", "emb_dropout"), after=("final_layer_norm",)),
)

FAMILIES = (GPT_NEOX, RELATIVES)
