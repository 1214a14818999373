"""The model itself: pretrained weights, or random ones that are the same under every strategy."""

import copy
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zerofit.compat.transformers import initialize, keep_conversions
from zerofit.model.compilation import fuse_gelu
from zerofit.model.configuration import STORED_ROWS, from_hub_or_folder, missing_package
from zerofit.model.export import read_generation_settings, split_valid_settings
from zerofit.model.lora import quantisation
from zerofit.model.parameters import check_finite, true_shape
from zerofit.model.pretrained_io import WRAPPER_MAPPING, removes_wrapper
from zerofit.model.stages import keep_stage
from zerofit.model.tensor_parallel import draw_share, keep_rows, split_model, stored_dtype
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import TrainingRecipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from zerofit.strategy.strategy import Strategy


def load_model(
    auto_class: Any,
    config: "PretrainedConfig",
    recipe: TrainingRecipe,
    strategy: "Strategy",
    *,
    ignored_weights: Sequence[str] = (),
    num_parameters: int = 0,
) -> Any:
    """Load pretrained weights, or draw random ones from the recipe's seed, in the dtype that the strategy trains in.

    Weights that are missing from the pretrained ones (a classifier's head) are also drawn from it, the same under
    every strategy; the model's `initialized_weights` names them. Generation settings that transformers would refuse to
    save are dropped; `dropped_settings` has them. With LoRA the weights are frozen; they are held in half precision
    (or quantised) if the run trains in half precision. Raises UserError: the weights cannot be loaded, do not fit, or
    hold NaN; the configuration makes no model.

    Args:
        auto_class: AutoModelForCausalLM or another of transformers' auto classes.
        ignored_weights: names of pretrained weights that are not loaded.
        num_parameters: from size_of_model; with it the strategy decides whether each rank draws full random weights.

    Returns: the model; under tensor and pipeline parallelism this rank's share of it.
    """
    dtype = strategy.compute_dtype if recipe.lora else strategy.model_dtype
    options: Any = {"ignored_weights": ignored_weights, "size": num_parameters, "drawn_dtype": dtype}
    build: Any = partial(_build, auto_class, config, recipe, strategy, **options)
    keeps_rows = strategy.fully_shards and not recipe.use_dora  # whose magnitudes are the norms of whole weights
    if strategy.layout.model_size == 1 and not keeps_rows:
        return build(dtype)

    def keep(model: "PreTrainedModel") -> None:
        if strategy.fully_shards:
            keep_rows(model, strategy.layout.shard_rank, strategy.layout.shard_size)
        if strategy.pipeline > 1:
            keep_stage(model, strategy.layout.pipeline_stage, strategy.pipeline, dtype)
        if strategy.tensor > 1:
            split_model(model, strategy.tensor_group())

    if not recipe.model_name_or_path:
        return draw_share(partial(build, dtype), keep)
    # In the dtype of its files it is mapped, and what is not kept is not read.
    model = build(stored_dtype(recipe.model_name_or_path) or dtype)
    keep(model)
    for parameter in model.parameters():
        is_own = hasattr(parameter, "cut")  # in memory of its own already
        parameter.data = parameter.data.to(dtype, copy=not is_own)
    model.config.dtype = dtype
    return model


def _build(
    auto_class: Any,
    config: "PretrainedConfig",
    recipe: TrainingRecipe,
    strategy: "Strategy",
    dtype: torch.dtype,
    *,
    ignored_weights: Sequence[str],
    size: int,
    drawn_dtype: torch.dtype,
) -> Any:
    common = {"dtype": dtype, "trust_remote_code": recipe.trust_remote_code, **quantisation(recipe, dtype)}
    if recipe.attn_implementation:
        common["attn_implementation"] = recipe.attn_implementation
    name = recipe.model_name_or_path
    try:
        torch.manual_seed(recipe.seed)
        if name:
            common |= _ignore_args(ignored_weights, strategy) if ignored_weights else {"key_mapping": WRAPPER_MAPPING}
            if strategy.device_of_weights is not None:  # not a context: computation stays on the CPU
                common.setdefault("device_map", {"": strategy.device_of_weights})
            settings, dropped = read_generation_settings(name)
            if settings is not None:
                common["generation_config"] = settings
            stored = _as_stored(config)
            load = partial(auto_class.from_pretrained, config=stored, output_loading_info=True, **common)
            with strategy.loading():
                model, info = from_hub_or_folder("model_name_or_path", name, load)
                if stored is not config:
                    _resize_embeddings(model, config.vocab_size, drawn_dtype)
                    model.config.pad_token_id = config.pad_token_id
            # What was renamed or converted at load is undone at save. Under ZeRO-3 transformers notes every rule that
            # it knows, and would give the weights names that this model has never had (LayerNorm.gamma).
            keep_conversions(model, lambda rule: rule.was_used() and not removes_wrapper(rule))
            _check_any_loaded(model, info["missing_keys"], name)
            if model.can_generate():
                _, invalid = split_valid_settings(model.generation_config.to_diff_dict())
                for setting in invalid:
                    setattr(model.generation_config, setting, None)
                model.dropped_settings = {**dropped, **invalid}
            # With ignore_mismatched_sizes transformers ignores every weight that does not fit.
            if {entry[0] for entry in info["mismatched_keys"]} - set(ignored_weights):
                raise RuntimeError("ignore_mismatched_sizes is meant for ignored_weights only")
            missing = {*info["missing_keys"], *ignored_weights}
            final_dtype = drawn_dtype if drawn_dtype != dtype else None
            model.initialized_weights = _initialize_missing(model, missing, strategy, recipe.seed, final_dtype)
            model.unused_weights = sorted(info["unexpected_keys"])  # under ZeRO-3 also the replaced ones
            check_finite(model, f"model_name_or_path = {name!r}", strategy.gather)
            return fuse_gelu(model)
        with strategy.building_from_scratch(size):
            return fuse_gelu(auto_class.from_config(config, **common))
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        for option in ("attn_implementation", "config_overrides"):
            if getattr(recipe, option):
                raise UserError(f"{option} = {getattr(recipe, option)!r}: {reason}") from None
        if isinstance(error, ImportError):
            raise UserError(f"config_name = {recipe.config_name!r} {missing_package(error)}") from None
        raise
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        remedy = ". Remove config_overrides" if recipe.config_overrides else ""
        raise UserError(f"model_name_or_path = {name!r}: weights unlike its configuration{remedy}") from None


def _as_stored(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration with as many rows as the stored embeddings, where an added padding token has none."""
    if not hasattr(config, STORED_ROWS):
        return config
    stored = copy.deepcopy(config)
    stored.vocab_size = getattr(config, STORED_ROWS)
    if (stored.pad_token_id or 0) >= stored.vocab_size:
        stored.pad_token_id = None
    delattr(stored, STORED_ROWS)
    return stored


def _resize_embeddings(model: Any, rows: int, dtype: torch.dtype) -> None:
    """Add rows to embeddings and head, each the mean of the stored rows: what transformers draws around that mean
    (1e-9 times the covariance) would depend on the strategy. The model's `resized_modules` names them. `dtype`: the
    dtype that the model will be converted to: the mean is taken in it."""
    before = model.config.get_text_config().vocab_size
    model.resize_token_embeddings(rows, mean_resizing=False)  # under ZeRO-3 new weights are whole until it shards them
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    for parameter in {id(each): each for end in ends for each in end.parameters() if len(each) == rows}.values():
        parameter.data = parameter.data.to(dtype)
        total = sum(part.double().sum(dim=0) for part in parameter.data[:before].split(4096))
        parameter.data[before:] = (total / before).to(parameter.dtype)
    model.resized_modules = [name for name, module in model.named_modules() if any(module is end for end in ends)]


def _ignore_args(names: Sequence[str], strategy: "Strategy") -> dict[str, Any]:
    """Return the arguments of from_pretrained with which it ignores some weights. Under ZeRO-3 ignore_mismatched_sizes
    has no effect on transformers; there, and only there, it ignores a weight that gets a name unknown to the model."""
    if strategy.shards_parameters:
        return {"key_mapping": WRAPPER_MAPPING | {f"^{re.escape(name)}$": f"ignored.{name}" for name in names}}
    return {"key_mapping": WRAPPER_MAPPING, "ignore_mismatched_sizes": True}


def _check_any_loaded(model: torch.nn.Module, missing: Iterable[str], name: str) -> None:
    """Raises UserError if no weight of the model was loaded: it would train from random ones."""
    if not {each for each, _ in model.named_parameters()} - set(missing):
        first = next(model.named_parameters())[0]
        kind = type(model).__name__
        raise UserError(
            f"model_name_or_path = {name!r}: its files have none of the weights of a {kind}, such as {first}. Store "
            "them under these names, as save_pretrained does; to train from scratch name it with --config_name"
        )


def head_weights(auto_class: Any, config: "PretrainedConfig", num_labels: int) -> list[str]:
    """Return the names of a classifier's weights whose shapes depend on the number of labels. `num_labels` differs
    from the configuration's."""
    relabelled = copy.deepcopy(config)
    shapes = []
    relabelled.num_labels = num_labels
    for candidate in (config, relabelled):
        with torch.device("meta"):
            model = auto_class.from_config(candidate)
        shapes.append({name: parameter.shape for name, parameter in model.named_parameters()})
    return [name for name, shape in shapes[0].items() if shapes[1][name] != shape]


def _initialize_missing(
    model: torch.nn.Module, missing: Iterable[str], strategy: "Strategy", seed: int, dtype: torch.dtype | None = None
) -> list[str]:
    """Initialize the weights that were not loaded, as the model's own code does, on the CPU and in a fixed order, so
    that they are the same under every strategy. Returns their names. `dtype`: that the model will be converted to,
    where it was loaded in another one."""
    parameters = dict(model.named_parameters())
    torch.manual_seed(seed)
    names = sorted(set(missing) & parameters.keys())
    for name in names:
        parameter = parameters[name]
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        drawn = torch.nn.Parameter(torch.empty(true_shape(parameter), dtype=dtype or parameter.dtype))
        initialize(model, module, attribute, drawn)
        if drawn.dtype != parameter.dtype:
            parameter.data = drawn.data
            continue
        with strategy.gathered(parameter), torch.no_grad():
            parameter.copy_(drawn)
    return names


def size_of_model(auto_class: Any, config: "PretrainedConfig", strategy: "Strategy", trust_remote_code: bool) -> int:
    """Return the number of parameters, before any exists; 0 if it cannot be computed."""
    try:
        with strategy.building_from_scratch(0), torch.device("meta"):
            model = auto_class.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    except Exception:  # the configuration is wrong (loading reports it), or the code cannot use meta tensors
        return 0
    return sum(parameter.numel() for parameter in model.parameters())
