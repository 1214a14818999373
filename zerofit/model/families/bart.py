"""BART (Lewis et al. 2020) and the models that have its layers: mBART, M2M-100, Pegasus, BlenderBot (Roller et al.
2020: trained by ParlAI on conversations), and the decoder OPT (Zhang et al. 2022).

transformers 5 reads BlenderBot's published tokenizer (vocab.json, merges.txt) without the end-of-text token after each
text and with a mask token that the model has no row for: zerofit/model/tokenizer.py, end_with_eos and
producible_tokens.
"""

from dataclasses import replace

from zerofit.model.families.family import Family

ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")

BART = Family(
    model_types=("bart", "mbart", "m2m_100"),
    lora_targets=ATTENTION,
    classifier_heads=("classification_head.out_proj",),
)
PEGASUS = replace(BART, model_types=("pegasus",), decoder_starts_with_padding=True)

BLENDERBOT = Family(
    model_types=("blenderbot", "blenderbot-small"),
    lora_targets=ATTENTION,
    turn_separator="  ",  # ParlAI's delimiter for these models
)
OPT = Family(model_types=("opt",), lora_targets=ATTENTION, classifier_heads=("score",))

FAMILIES = (BART, PEGASUS, BLENDERBOT, OPT)
