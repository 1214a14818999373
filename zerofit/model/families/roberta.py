"""RoBERTa (Liu et al. 2019) and the models that count positions as it does: XLM-RoBERTa, CamemBERT, ..."""

from dataclasses import replace

from zerofit.model.families.bert import ATTENTION
from zerofit.model.families.family import Family


def positions_after_padding(config) -> int | None:
    """Positions begin after the padding token's id: 514 rows are 512 positions."""
    rows = getattr(config, "max_position_embeddings", None)
    return rows - config.pad_token_id - 1 if rows else rows


ROBERTA = Family(
    model_types=("roberta", "xlm-roberta", "camembert"),
    lora_targets=ATTENTION,
    classifier_heads=("classifier.out_proj",),
    usable_positions=positions_after_padding,
)
RELATIVES = replace(ROBERTA, model_types=("longformer", "mpnet"), lora_targets=Family().lora_targets)

FAMILIES = (ROBERTA, RELATIVES)
