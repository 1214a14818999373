"""BART (Lewis et al. 2020) and the encoder-decoder models that have its layers: mBART, M2M-100, Pegasus."""

from dataclasses import replace

from zerofit.model.families.family import Family

ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")

BART = Family(
    model_types=("bart", "mbart", "m2m_100"),
    lora_targets=ATTENTION,
    classifier_heads=("classification_head.out_proj",),
)
PEGASUS = replace(BART, model_types=("pegasus",), decoder_starts_with_padding=True)

FAMILIES = (BART, PEGASUS)
