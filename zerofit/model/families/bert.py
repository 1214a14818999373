"""BERT (Devlin et al. 2019), ELECTRA, RoBERTa (Liu et al. 2019) and those that count positions as RoBERTa does."""

from dataclasses import replace

from zerofit.model.families.family import Family

ATTENTION = ("query", "key", "value")


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

FAMILIES = (
    Family(model_types=("bert",), lora_targets=ATTENTION, classifier_heads=("classifier",)),
    Family(model_types=("electra",), lora_targets=ATTENTION, classifier_heads=("classifier.out_proj",)),
    ROBERTA,
    RELATIVES,
)
