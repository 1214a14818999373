"""Model families: all that is special about one is in its file here; the rest of the code asks family_of(config).

A new family is a file with a tuple FAMILIES, listed in MODULES; a model of no listed family has the defaults of
`Family`.
"""

from zerofit.model.families import bart, bert, deberta, gpt2, gpt_neox, llama, moe, olmo2, t5
from zerofit.model.families.family import Family

MODULES = (bart, bert, deberta, gpt2, gpt_neox, llama, moe, olmo2, t5)
DEFAULT = Family()
BY_MODEL_TYPE = {name: family for module in MODULES for family in module.FAMILIES for name in family.model_types}


def family_of(config) -> Family:
    """The family of a model with this configuration of transformers."""
    return BY_MODEL_TYPE.get(config.model_type, DEFAULT)
