"""The model itself: pretrained weights, or random ones that are the same under every strategy."""

import contextlib

import torch

from train.model.configuration import from_hub_or_folder
from train.recipe.errors import UserError
from train.recipe.options import ModelOptions


def build_model(auto_class, config, recipe: ModelOptions, strategy, seed: int, **kwargs):
    """Load pretrained weights, or draw random ones from `seed`, in the dtype that the strategy trains in.

    Args:
        auto_class: AutoModelForCausalLM or another of transformers' auto classes.
        kwargs: for `from_pretrained` alone.

    Raises:
        UserError: the weights cannot be had, or do not fit; the configuration makes no model.
    """
    common = {"dtype": strategy.model_dtype, "trust_remote_code": recipe.trust_remote_code}
    if recipe.attn_implementation:
        common["attn_implementation"] = recipe.attn_implementation
    name = recipe.model_name_or_path
    try:
        if name:
            load = auto_class.from_pretrained
            return from_hub_or_folder("model_name_or_path", name, load, config=config, **common, **kwargs)
        with _where_it_is_drawn(auto_class, config, strategy, recipe.trust_remote_code):
            torch.manual_seed(seed)
            return auto_class.from_config(config, **common)
    except (ValueError, ImportError) as error:
        said = " ".join(str(error).split())
        for option in ("attn_implementation", "config_overrides"):
            if getattr(recipe, option):
                raise UserError(f"{option} = {getattr(recipe, option)!r}: {said}") from None
        raise
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        overrides = ". Leave config_overrides out" if recipe.config_overrides else ""
        raise UserError(
            f"model_name_or_path = {name!r}: its weights have other shapes than its configuration says{overrides}"
        ) from None


def _where_it_is_drawn(auto_class, config, strategy, trust: bool):
    """The context for random weights: the strategy knows whether they are drawn whole or in shares."""
    if not strategy.shards_parameters:
        return contextlib.nullcontext()
    with strategy.building_from_scratch(0), torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=trust)
        size = sum(parameter.numel() for parameter in model.parameters())
    return strategy.building_from_scratch(size)
