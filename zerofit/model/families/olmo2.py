"""OLMo 2 (OLMo et al. 2025): Llama's layers, with norms behind attention and MLP, over all queries, all keys."""

from dataclasses import replace

from zerofit.model.families.llama import SPLIT_ALIKE

TENSOR_PLAN = replace(SPLIT_ALIKE.tensor_plan, norms=("q_norm", "k_norm"))

FAMILIES = (replace(SPLIT_ALIKE, model_types=("olmo2",), tensor_plan=TENSOR_PLAN),)
