"""BlenderBot (Roller et al. 2020): BART's layers, trained by ParlAI on conversations.

transformers 5 reads its published tokenizer (vocab.json, merges.txt) without the end-of-text token after each text and
with a mask token that the model has no row for: zerofit/model/tokenizer.py, end_with_eos and producible_tokens.
"""

from zerofit.model.families.bart import ATTENTION
from zerofit.model.families.family import Family

FAMILIES = (
    Family(
        model_types=("blenderbot", "blenderbot-small"),
        lora_targets=ATTENTION,
        turn_separator="  ",  # ParlAI's delimiter for these models
    ),
)
