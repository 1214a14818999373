"""OPT (Zhang et al. 2022): a decoder whose attention layers have BART's names."""

from zerofit.model.families.bart import ATTENTION
from zerofit.model.families.family import Family

FAMILIES = (Family(model_types=("opt",), lora_targets=ATTENTION, classifier_heads=("score",)),)
