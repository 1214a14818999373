"""The model itself: pretrained weights, or random ones that are the same under every strategy."""

import copy
import re
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from train.model.configuration import from_hub_or_folder
from train.model.finite import check_finite
from train.model.lora import quantisation
from train.model.parameters import true_shape
from train.recipe.errors import UserError
from train.recipe.options import TrainingRecipe


def build_model(auto_class, config, recipe: TrainingRecipe, strategy, seed: int, left_out: Sequence[str] = (),
                num_parameters: int = 0):  # fmt: skip
    """Load pretrained weights, or draw random ones from `seed`, in the dtype that the strategy trains in.

    What the pretrained weights lack (a classifier's head) is drawn from `seed` too, the same under every strategy; the
    model's `drawn_weights` names it. With LoRA the weights are frozen, and are held in half precision (or quantised)
    where half precision is trained in.

    Args:
        auto_class: AutoModelForCausalLM or another of transformers' auto classes.
        left_out: names of pretrained weights that are not to be loaded.
        num_parameters: as size_of_model has them; by these the strategy knows whether random weights are drawn whole.

    Raises:
        UserError: the weights cannot be had, do not fit, or hold NaN; the configuration makes no model.
    """
    dtype = strategy.frozen_dtype if recipe.lora else strategy.model_dtype
    common = {"dtype": dtype, "trust_remote_code": recipe.trust_remote_code, **quantisation(recipe, dtype)}
    if recipe.attn_implementation:
        common["attn_implementation"] = recipe.attn_implementation
    name = recipe.model_name_or_path
    try:
        torch.manual_seed(seed)
        if name:
            common |= _leaving_out(left_out, strategy) if left_out else {}
            if strategy.device_of_weights is not None:  # not a context: what is computed stays the CPU's work
                common.setdefault("device_map", {"": strategy.device_of_weights})
            load = partial(auto_class.from_pretrained, config=config, output_loading_info=True, **common)
            model, info = from_hub_or_folder("model_name_or_path", name, load)
            # Leaving out some lets transformers leave out any.
            if {entry[0] for entry in info["mismatched_keys"]} - set(left_out):
                raise RuntimeError("ignore_mismatched_sizes is meant for left_out alone")
            model.drawn_weights = _draw_missing(model, {*info["missing_keys"], *left_out}, strategy, seed)
            check_finite(model, f"model_name_or_path = {name!r}", strategy.gather)
            return model
        with strategy.building_from_scratch(num_parameters):
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


def _leaving_out(names: Sequence[str], strategy) -> dict:
    """The arguments of from_pretrained that leave weights out. Under ZeRO-3 transformers does not heed
    ignore_mismatched_sizes; there, and only there, a weight that is given another name is left out."""
    if strategy.shards_parameters:
        return {"key_mapping": {f"^{re.escape(name)}$": f"left_out.{name}" for name in names}}
    return {"ignore_mismatched_sizes": True}


def weights_of_head(auto_class, config, num_labels: int) -> list[str]:
    """The weights of a classifier whose shapes would be others with `num_labels` labels."""
    other, shapes = copy.deepcopy(config), []
    other.num_labels = num_labels
    for each in (config, other):
        with torch.device("meta"):
            model = auto_class.from_config(each)
        shapes.append({name: parameter.shape for name, parameter in model.named_parameters()})
    return [name for name, shape in shapes[0].items() if shapes[1][name] != shape]


def _draw_missing(model: torch.nn.Module, missing: Iterable[str], strategy, seed: int) -> list[str]:
    """Draw the weights that were not loaded, as the model's own code does, on the CPU and in a fixed order: so they
    are the same in every run, on every device and under every strategy. Returns their names."""
    parameters = dict(model.named_parameters())
    torch.manual_seed(seed)
    names = sorted(set(missing) & parameters.keys())
    for name in names:
        parameter, (owner, _, own_name) = parameters[name], name.rpartition(".")
        module = model.get_submodule(owner)
        drawn = torch.nn.Parameter(torch.empty(true_shape(parameter), dtype=parameter.dtype))
        others = {key: held for key, held in module._parameters.items() if key != own_name and held is not None}
        for held in others.values():
            held._is_hf_initialized = True  # transformers leaves such alone
        module._parameters[own_name] = drawn
        model._init_weights(module)
        module._parameters[own_name] = parameter
        with strategy.gathered(parameter), torch.no_grad():
            parameter.copy_(drawn)
    return names


def size_of_model(auto_class, config, strategy, trust_remote_code: bool) -> int:
    """The number of parameters, before there are any; 0 where that cannot be told."""
    try:
        with strategy.building_from_scratch(0), torch.device("meta"):
            model = auto_class.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    except Exception:  # a mistake in the configuration: loading will tell; or code that has no use for meta tensors
        return 0
    return sum(parameter.numel() for parameter in model.parameters())
