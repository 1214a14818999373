"""Load a LoRA adapter onto the base that it was trained on, for the tools, or inject it into the model that the engine
will hold, also under ZeRO-3's sharding, to be evaluated or trained on; refuse every other base.

peft itself silently skips adapter weights that have no place in the base, and only warns where it initializes missing
ones at random. Here both are errors, and so is a base with the right shapes and other weights.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from zerofit.compat.transformers import keep_conversions
from zerofit.model.adapter_folder import (
    CLASSIFIERS,
    TASK_TYPES,
    AdapterFolder,
    Base,
    adapter_settings,
    check_base_weights,
    trained_config,
)
from zerofit.model.configuration import has_head, has_model, name_some
from zerofit.model.lora import (
    Adapter,
    check_expert_targets,
    inside_of,
    make_trainable,
    mark_magnitudes,
    published_base,
    with_tied,
)
from zerofit.model.parameters import true_shape
from zerofit.model.pretrained_io import read_model
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.model_options import merge_command
from zerofit.recipe.options import TrainingRecipe

if TYPE_CHECKING:
    from peft import LoraConfig

    from zerofit.strategy.strategy import Strategy

NAME = "default"  # peft's name for the only adapter
ALONE: Any = SimpleNamespace(  # the strategy of a tool: nothing is sharded, and weights keep their precision
    deepspeed={},
    shards_parameters=False,
    fully_shards=False,
    gathered=lambda *args, **kwargs: nullcontext(),
    read_from_outside=lambda *args: None,
)


def load_with_adapter(
    folder: AdapterFolder,
    base: Base,
    *,
    precision: str | None = None,
    quantised: str = "refuse",
    trust_remote_code: bool = False,
) -> tuple[Any, Any, list[str]]:
    """Load the base, and the adapter onto it. Returns (their PeftModel, in evaluation mode; the class of transformers
    that loads the base; notes). Raises UserError: the base cannot be loaded, or the adapter is for another one.
    `precision`: fp32, bf16 or fp16; None: that of the base. `quantised`: what to do with a quantised base: "refuse",
    "dequantize" or "keep"."""
    import transformers

    is_quantised = getattr(base.config, "quantization_config", None) is not None
    if is_quantised and quantised == "refuse":
        raise UserError(f"{base.option} = {base.name!r} is quantised. Name its original, or say --dequantize")
    config, notes = trained_config(folder, base.config)
    task_type = folder.settings.get("task_type")
    if task_type is None:
        classifiers = [kind for kind in CLASSIFIERS if has_head(config, TASK_TYPES[kind][1])]
        task_type = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else (*classifiers, "CAUSAL_LM")[0]
    auto_class = getattr(transformers, f"AutoModelFor{TASK_TYPES[task_type][1]}")
    if not has_model(auto_class, config):
        kind = config.model_type
        raise UserError(f"{folder.where}: {base.name!r} is a {kind}, and there is no {auto_class.__name__} for it")
    reading: Any = {"precision": precision, "trust_remote_code": trust_remote_code, "revision": base.revision}
    model, missing = read_model(auto_class, base.option, base.name, config, **reading)
    if lacking := [weight for weight in missing if weight not in folder.full_weights]:
        raise UserError(f"{folder.where} and {base.name!r} lack {name_some(lacking)}. Name the adapter's own base")
    if is_quantised and quantised == "dequantize":
        model = _dequantize(model, base.name)
    for tied in trained_apart(folder, model):
        for weight in tied[1:]:
            owner, _, attribute = weight.rpartition(".")
            own = torch.nn.Parameter(model.get_parameter(weight).detach().clone(), requires_grad=False)
            setattr(model.get_submodule(owner), attribute, own)
        model.config.tie_word_embeddings = False
    adapted, more = inject_adapter(folder, model, base.name, ALONE, quantised=is_quantised, as_peft_model=True)
    return adapted.eval(), auto_class, [*notes, *more]


def _dequantize(model: Any, name: str) -> Any:
    try:
        model = model.dequantize()
    except (NotImplementedError, ValueError, ImportError) as error:
        raise UserError(f"--dequantize: {name!r} cannot be converted: {first_line(error)}. Set --base") from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

    def quantises(step: Any) -> bool:
        return any("bitsandbytes" in type(operation).__module__ for operation in getattr(step, "operations", ()))

    # The steps that read quantised weights cannot be reversed, and writing would try to.
    keep_conversions(model, lambda step: not quantises(step), or_usual=True)
    return model


def continue_adapter(
    folder: AdapterFolder, model: torch.nn.Module, recipe: TrainingRecipe, strategy: "Strategy"
) -> Adapter:
    """Inject an adapter that is trained on into a model of build_model: its layers, and the modules that it has in
    full, are trained further. Raises UserError where it is for another base."""
    original = adapter_settings(folder)
    settings = replace(original, inference_mode=False, init_lora_weights=True, lora_dropout=recipe.lora_dropout)
    drawn = [name for name in getattr(model, "initialized_weights", ()) if name not in folder.full_weights]
    fresh = [*(name.rpartition(".")[0] for name in drawn), *getattr(model, "resized_modules", ())]  # in no file yet
    saved = with_tied(model, [*_saved_modules(folder, model, settings), *fresh])
    base, quantised = str(recipe.model_name_or_path), recipe.quantised is not None
    torch.manual_seed(recipe.seed)
    _, notes = inject_adapter(folder, model, base, strategy, quantised=quantised, settings=settings, saved=saved)
    written = replace(original, base_model_name_or_path=published_base(base), lora_dropout=recipe.lora_dropout)
    adapter = make_trainable(model, written, saved, strategy)
    lines = [f"{folder.path}, trained on: {adapter.note}"]
    lines += [f"note      {each.removeprefix('note: ')}" for each in notes]
    return replace(adapter, note="\n".join(lines), base=base)


def _saved_modules(folder: AdapterFolder, model: torch.nn.Module, settings: "LoraConfig") -> list[str]:
    """Names of the modules that the adapter has in full: those that it names, and embeddings that were resized."""
    fully_trained = tuple(f".{module}" for module in settings.modules_to_save or ())  # the model's own modules
    names = [name for name, _ in model.named_modules() if fully_trained and f".{name}".endswith(fully_trained)]
    owners = (weight.rpartition(".")[0] for weight in folder.tensors if "lora_" not in weight)
    has_weight = (owner for owner in owners if f"{owner}.weight" in folder.tensors and ".base_layer" not in owner)
    inside = {name for name, _ in model.named_modules(remove_duplicate=False)}
    return list(dict.fromkeys([*names, *(owner for owner in has_weight if owner in inside)]))


def inject_adapter(
    folder: AdapterFolder,
    model: Any,
    name: str,
    strategy: "Strategy",
    *,
    quantised: bool,
    settings: "LoraConfig | None" = None,
    saved: list[str] | None = None,
    as_peft_model: bool = False,
) -> tuple[Any, list[str]]:
    """Inject the adapter's layers into its base, and load all weights of its file into them and the modules that it
    has in full. Returns the model, or a PeftModel of it, and notes. `name`: the base's. `quantised`: its weights are,
    or were. `settings`, `saved`: by default the adapter's own. Raises UserError: the adapter is for another base."""
    from peft import PeftModel, get_peft_model_state_dict, inject_adapter_in_model

    settings = settings or adapter_settings(folder)
    saved = _saved_modules(folder, model, settings) if saved is None else saved
    refusal = f"{folder.where} is for another base than {name!r}"
    inside = inside_of(model, saved)
    settings = replace(settings, modules_to_save=None, exclude_modules=inside or settings.exclude_modules)
    check_expert_targets(sorted(settings.target_parameters or ()), strategy)
    try:
        inject: Any = PeftModel if as_peft_model else inject_adapter_in_model
        adapted = inject(model=model, peft_config=settings, adapter_name=NAME)
    except ValueError as error:  # nothing matches target_modules
        raise UserError(f"{refusal}: {first_line(error)}") from None
    parameters = dict(model.named_parameters(remove_duplicate=False))
    adapter_parameters = get_peft_model_state_dict(model, state_dict=dict(parameters), save_embedding_layers=False)
    tensors = folder.tensors
    unplaced = [key for key in tensors if key not in adapter_parameters and key not in parameters]
    unfilled = [key for key in adapter_parameters if key not in tensors]
    if unplaced or unfilled:
        problem = f"no place for {name_some(unplaced)}" if unplaced else f"no weights for {name_some(unfilled)}"
        raise UserError(f"{refusal}: {problem}")
    for tied in trained_apart(folder, model):
        raise UserError(
            f"{folder.where}: {tied[0]} and {tied[-1]} are one weight in {name!r}, and the adapter trained them "
            f"apart. Make a full model of it: {merge_command(str(folder.path))}"
        )
    for key, tensor in tensors.items():
        parameter = adapter_parameters.get(key, parameters.get(key))
        if true_shape(parameter) != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, and that one takes {tuple(true_shape(parameter))}"
            raise UserError(f"{refusal}: {key} has the shape {shapes}")
        if strategy.deepspeed is None:  # as in training: it is the only copy, so it is in fp32
            parameter.data = parameter.data.float()
        with strategy.gathered(parameter), torch.no_grad():
            parameter.copy_(tensor)
    mark_magnitudes(model, strategy)
    return adapted, check_base_weights(model, folder, name, strategy, quantised)


def trained_apart(folder: AdapterFolder, model: torch.nn.Module) -> list[list[str]]:
    """Names of each weight that the base uses twice (its embeddings, as the head) and the adapter trained apart."""
    tensors = {key.replace(".base_layer.", "."): tensor for key, tensor in folder.tensors.items()}  # below an adapter
    names: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(key.replace(".base_layer.", "."))
    found = []
    for tied in names.values():
        own = [tensors[key] for key in tied if key in tensors]
        lacks_one = len(own) != len(tied) and not folder.settings.get("ensure_weight_tying")
        if own and (lacks_one or any(not torch.equal(own[0], other) for other in own[1:])):
            found.append(tied)
    return found
