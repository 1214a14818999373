"""The model itself: pretrained weights, or random ones that are the same under every strategy."""

from contextlib import AbstractContextManager

import torch

from train.model.configuration import from_hub_or_folder
from train.recipe.options import ModelOptions


def load_model(
    auto_class, config, recipe: ModelOptions, seed: int, dtype: torch.dtype, scratch: AbstractContextManager
):
    """Load pretrained weights, or draw random ones from `seed`.

    Args:
        auto_class: AutoModelForCausalLM or another of transformers' auto classes.
        dtype: of the weights. The checkpoint's own is not used: training state follows from it.
        scratch: the context in which a model from scratch is built (the strategy knows whether whole or in shares).

    Raises:
        UserError: the weights cannot be had.
        ValueError, ImportError: the configuration makes no model, or the attention implementation does not exist.
    """
    attention = {"attn_implementation": recipe.attn_implementation} if recipe.attn_implementation else {}
    if recipe.model_name_or_path:
        return from_hub_or_folder(
            "model_name_or_path",
            recipe.model_name_or_path,
            auto_class.from_pretrained,
            config=config,
            dtype=dtype,
            trust_remote_code=recipe.trust_remote_code,
            **attention,
        )
    with scratch:
        torch.manual_seed(seed)
        return auto_class.from_config(config, dtype=dtype, trust_remote_code=recipe.trust_remote_code, **attention)
