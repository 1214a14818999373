"""BERT (Devlin et al. 2019) and ELECTRA."""

from zerofit.model.families.family import Family

ATTENTION = ("query", "key", "value")

FAMILIES = (
    Family(model_types=("bert",), lora_targets=ATTENTION, classifier_heads=("classifier",)),
    Family(model_types=("electra",), lora_targets=ATTENTION, classifier_heads=("classifier.out_proj",)),
)
