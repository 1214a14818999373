"""LoRA: low-rank adapters inside a frozen model, through peft: which layers get one, what is saved, and how a saved
one is put onto its base, to be merged, evaluated or trained on.

peft injects its layers into the transformers model itself, so that the loss, generation and the engine work with the
model as without LoRA. A run saves a folder that peft loads. peft itself silently skips adapter weights that have no
place in the base, and only warns where it initializes missing ones at random. Here both are errors.
"""

import copy
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from zerofit.compat.transformers import keep_conversions
from zerofit.model.adapter_folder import (
    ADAPTER_PREFIX,
    CLASSIFIER_TASK_TYPES,
    PEFT_CLASSIFIER_HEADS,
    TASK_TYPES,
    AdapterBase,
    AdapterFolder,
    adapter_settings,
    trained_config,
)
from zerofit.model.configuration import has_head, has_model, name_some
from zerofit.model.export import save_generation_settings, write_other_files
from zerofit.model.families import ALL_LINEAR, family_of
from zerofit.model.parameters import true_shape
from zerofit.model.pretrained_io import read_model
from zerofit.recipe.errors import UserError, first_line, nearest
from zerofit.recipe.model_options import LoraOptions, merge_command
from zerofit.recipe.options import TrainingRecipe
from zerofit.recipe.tasks import model_kind

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from zerofit.strategy.strategy import Strategy

ADAPTER_NAME = "default"  # peft's name for the only adapter
UNSHARDED_STRATEGY: Any = SimpleNamespace(  # for tools: nothing is sharded, and weights keep their precision
    deepspeed={},
    shards_parameters=False,
    fully_shards=False,
    gathered=lambda *args, **kwargs: nullcontext(),
    read_from_outside=lambda *args: None,
)


@dataclass
class Adapter:
    """The adapter of the model in training."""

    config: "LoraConfig"  # the configuration as it is saved
    saved: list[str]  # full names of the modules that are fully trained
    note: str  # for the log
    base: str | None = None  # folder or hub name of the base of an adapter that is trained on

    def save(
        self,
        model: "PreTrainedModel",
        state: dict[str, torch.Tensor],
        tokenizer: "PreTrainedTokenizerBase",
        folder: Path,
    ) -> dict[str, Exception]:
        """Write the adapter as peft does and, once it is on the disk, what describes it, the tokenizer and the model's
        configuration. Returns what of these could not be written: {file: why}. `model`: the model that the adapter is
        in; only its configuration and the names in it are used. `state`: every trained weight by its name in the
        model, full, on the CPU. Raises RuntimeError where a tensor is empty or missing; an incomplete adapter is never
        saved."""
        from peft import get_peft_model_state_dict

        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        broken = sorted(name for name in trained if name not in state or state[name].numel() == 0)
        if broken:
            raise RuntimeError(f"the gathered adapter is incomplete: {len(broken)} tensors, such as {broken[:3]}")
        tensors = get_peft_model_state_dict(model, state_dict=dict(state), save_embedding_layers=False)
        names_of = {id(parameter): name for name, parameter in trained.items()}
        for module in self.saved:  # under the name of every module that holds it, tied ones too
            for name, parameter in model.get_submodule(module).named_parameters():
                tensors[f"{module}.{name}"] = state[names_of[id(parameter)]]
        collected = {id(tensor) for tensor in tensors.values()}
        tensors |= {name: tensor for name, tensor in state.items() if id(tensor) not in collected}  # biases
        written = {ADAPTER_PREFIX + name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(written, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        description = copy.deepcopy(model.config)  # a classifier's configuration has the labels
        if hasattr(description, "quantization_config"):
            del description.quantization_config  # the quantization is only for this run
        description.use_cache = True
        files: dict[str, Callable[[], object]] = {
            "adapter_config.json": lambda: self.config.save_pretrained(str(folder)),
            "config.json": lambda: description.save_pretrained(folder),
        }
        if model.config.is_encoder_decoder:  # the settings of train/seq2seq.py
            files["generation_config.json"] = lambda: save_generation_settings(model, folder)
        files["the tokenizer"] = lambda: tokenizer.save_pretrained(folder)
        return write_other_files(files)


def add_adapter(model: "PreTrainedModel", recipe: TrainingRecipe, task: str, strategy: "Strategy") -> Adapter | None:
    """Freeze the model and inject LoRA layers into it, the same under every strategy; None without --lora. Weights
    that the pretrained model lacks (`initialized_weights`, a classifier's head) are fully trained and saved with the
    adapter. Raises UserError where a target matches nothing, or cannot have an adapter."""
    if not recipe.lora:
        return None
    # Fully trained are peft's heads, what has random weights, and what the recipe names.
    names = [name for name, _ in model.named_modules() if name]
    chosen = [name for name in PEFT_CLASSIFIER_HEADS if task == "cls" and name in names]
    chosen += [name.rpartition(".")[0] for name in getattr(model, "initialized_weights", ())]
    chosen += getattr(model, "resized_modules", ())  # their new rows are in no base
    for requested in _split_names(recipe.lora_modules_to_save):
        matching = [name for name in names if name == requested or name.endswith(f".{requested}")]
        if not matching:
            raise UserError(_no_match("lora_modules_to_save", requested, {name.rpartition(".")[2] for name in names}))
        chosen += matching
    saved = with_tied(model, chosen)
    targets = targets_of(model, recipe)
    modules, of_experts = split_targets(model, targets)
    if ALL_LINEAR in targets and len(targets) > 1:
        raise UserError(f"lora_target_modules = {' '.join(targets)}: name all-linear alone, or the others")
    for target in modules if ALL_LINEAR not in targets else ():
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise UserError(_no_match("lora_target_modules", target, _linear_names(model)))
    check_expert_targets(of_experts, strategy, recipe)
    torch.manual_seed(recipe.seed)
    kinds = [kind for kind, (script, _) in TASK_TYPES.items() if script == model_kind(task)]
    matching_kinds = [kind for kind in kinds if TASK_TYPES[kind][1] in type(model).__name__]
    config = inject_lora(
        model,
        recipe,
        task_type=(matching_kinds or kinds)[0],
        exclude_modules=inside_of(model, saved) or None,
        base_model_name_or_path=published_base(recipe.model_name_or_path),
    )
    mark_magnitudes(model, strategy)
    where = "lora_target_modules" if recipe.lora_target_modules else "the preset of this architecture"
    written = replace(config, exclude_modules=None)
    return make_trainable(model, written, saved, strategy, f": {', '.join(targets)} ({where})")


def targets_of(model: "PreTrainedModel", recipe: LoraOptions) -> tuple[str, ...]:
    """Return the names of what gets an adapter: those of the recipe, or the preset of the model's family."""
    return tuple(_split_names(recipe.lora_target_modules) or family_of(model.config).lora_targets)


def inject_lora(
    model: "PreTrainedModel", recipe: LoraOptions, pattern: str | None = None, **settings: Any
) -> "LoraConfig":
    """Inject the recipe's LoRA layers into a model, which freezes all of its own weights. Returns peft's settings.
    `pattern`: a regular expression of the targets' names, which wins; adapters of others have some. `settings`:
    further ones of peft. Raises UserError where peft can make no such layer."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = targets_of(model, recipe)
    modules, of_experts = split_targets(model, targets)
    option_names = ("lora_alpha", "lora_dropout", "use_dora", "use_rslora")
    settings |= {name: getattr(recipe, name) for name in option_names} | {"r": recipe.lora_r, "bias": recipe.lora_bias}
    ends = tuple(f".{target}" for target in targets)  # a Conv1D stores its weight transposed
    config = LoraConfig(
        target_modules=pattern or (ALL_LINEAR if targets == (ALL_LINEAR,) else modules),
        target_parameters=of_experts or None,
        fan_in_fan_out=any(isinstance(each, Conv1D) and name.endswith(ends) for name, each in model.named_modules()),
        **settings,
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        listed = ", ".join(_linear_names(model))
        raise UserError(f"lora_target_modules = {' '.join(targets)}: {error}. Linear modules: {listed}") from None
    return config


def mark_magnitudes(model: torch.nn.Module, strategy: "Strategy") -> None:
    """Tell the strategy that DoRA's magnitudes are read outside of the module that they are gathered for."""
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():
            strategy.read_from_outside(magnitude, layer.get_base_layer().weight)


def make_trainable(
    model: torch.nn.Module, config: "LoraConfig", saved: list[str], strategy: "Strategy", targets: str = ""
) -> Adapter:
    """Let these modules be trained in full besides an adapter's layers, which peft's `config` describes. Returns the
    adapter. `targets`: the end of the sentence for the log."""
    for name in saved:
        model.get_submodule(name).requires_grad_(True)
    if strategy.deepspeed is None:  # no optimizer has an fp32 copy of the trained weights: they are fp32 themselves
        for module in model.modules():
            parameters = list(module.parameters(recurse=False))
            # A LayerNorm whose bias alone is trained (--lora_bias all): the CPU's kernel wants both in one dtype.
            is_norm = isinstance(module, torch.nn.LayerNorm) and any(each.requires_grad for each in parameters)
            for parameter in parameters:
                if parameter.requires_grad or is_norm:
                    parameter.data = parameter.data.float()
    count = sum(hasattr(module, "lora_A") for module in model.modules())
    kind = "DoRA" if config.use_dora else "LoRA"
    scale = "rank-stabilised, " if config.use_rslora else ""
    fully_trained = f"; fully trained: {', '.join(saved)}" if saved else ""
    note = (
        f"{kind} of rank {config.r}, alpha {config.lora_alpha:g}, {scale}dropout {config.lora_dropout:g}, bias "
        f"{config.bias}, on {count} modules{targets}{fully_trained}"
    )
    written = replace(config, modules_to_save=sorted(saved) or None, inference_mode=True)
    return Adapter(written, saved, note)


def check_quantisation(recipe: LoraOptions, strategy: "Strategy") -> None:
    """Raises UserError if this machine or strategy cannot quantise the frozen weights as the recipe asks."""
    option = recipe.quantised
    if not torch.accelerator.is_available():
        raise UserError(f"{option} = true needs a GPU, and this machine has none. Remove the option")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"{option} = true needs bitsandbytes: pip install '.[qlora]', or remove it")
    check_quantised_sharding(recipe, strategy)


def check_quantised_sharding(recipe: LoraOptions, strategy: "Strategy") -> None:
    """Raises UserError if the recipe quantises the frozen weights, and the strategy shards them."""
    option = recipe.quantised
    if option and strategy.shards_parameters:
        raise UserError(f"{option} = true: not under ZeRO-3. Use zero2.yaml or ddp.yaml, or remove the option")


def quantisation(recipe: LoraOptions, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of from_pretrained that quantise the weights; none without load_in_4bit. Source: Dettmers
    et al. 2023, QLoRA: NF4 with double quantisation, products in half precision."""
    if recipe.quantised is None:
        return {}
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    return {"quantization_config": config, "device_map": {"": torch.accelerator.current_device_index()}}


def with_tied(model: torch.nn.Module, chosen: list[str]) -> list[str]:
    """Return the chosen modules, without those inside of others, and the modules that share a weight with them."""
    outer = [name for name in dict.fromkeys(chosen) if not any(name.startswith(f"{module}.") for module in chosen)]
    parameter_ids = {id(parameter) for name in outer for parameter in model.get_submodule(name).parameters()}
    tied = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if any(id(parameter) in parameter_ids for parameter in module.parameters(recurse=False))
    ]
    return outer + [name for name in tied if not any(f"{name}.".startswith(f"{outer_name}.") for outer_name in outer)]


def split_targets(model: torch.nn.Module, targets: Collection[str]) -> tuple[list[str], list[str]]:
    """Return (targets that name modules, targets that name weights of experts, which are not modules)."""
    experts = [name for name, parameter in model.named_parameters() if len(true_shape(parameter)) == 3]
    modules = [f".{name}" for name, _ in model.named_modules()]
    of_experts = []
    for target in targets:
        ending = f".{target}"
        if any(name.endswith(ending) for name in experts) and not any(name.endswith(ending) for name in modules):
            of_experts.append(target)
    return [target for target in targets if target not in of_experts], of_experts


def check_expert_targets(targets: list[str], strategy: "Strategy", recipe: LoraOptions | None = None) -> None:
    """Raises UserError if experts are to get an adapter that peft, or the strategy, cannot give them."""
    problems = []
    stated = f"lora_target_modules = {' '.join(targets)}: an adapter on experts"
    if targets and (strategy.shards_parameters or strategy.fully_shards):
        # peft reads its own weights, and the frozen one, outside of the modules that they are gathered for.
        problems.append(f"{stated} needs weights that are not sharded. Use zero2, ddp or single")
    for name in ("lora_dropout", "use_dora"):
        if targets and recipe and getattr(recipe, name):
            problems.append(f"{stated} does not go together with {name}. Remove one of them")
    if problems:
        raise UserError(problems)


def _split_names(option: list[str] | None) -> list[str]:
    """Split the names that an option lists at commas; all_linear becomes all-linear."""
    names = [name.strip() for item in option or () for name in item.split(",") if name.strip()]
    return [ALL_LINEAR if name == "all_linear" else name for name in names]


def _no_match(option: str, requested: str, candidates: Iterable[str]) -> str:
    candidates = sorted(set(candidates))
    close = nearest(requested, candidates)
    listed = ", ".join(name for name in candidates if not name.isdigit())
    return (
        f"{option} = {requested!r} matches no module. {f'Did you mean {close}? ' if close else ''}There are {listed}"
    )


def _linear_names(model: torch.nn.Module) -> list[str]:
    """Return the last parts of the names of all linear modules."""
    kinds = (torch.nn.Linear, Conv1D)
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)})


def inside_of(model: torch.nn.Module, saved: list[str]) -> list[str]:
    """Return the names of the modules that are fully trained and of all modules inside them, which get no adapter."""
    return [name for name, _ in model.named_modules() if any(f"{name}.".startswith(f"{outer}.") for outer in saved)]


def published_base(name: str | None) -> str | None:
    """Return the base's name for adapter_config.json: a hub name is unchanged; that of a folder begins with a dot, so
    that nobody takes it for a hub name, and has no absolute path."""
    path = Path(name or "").expanduser()
    if not name or not path.is_dir():
        return name
    local = path.resolve().name if path.is_absolute() else os.path.normpath(name)
    return local if local.startswith("..") else f"./{local}"


def load_with_adapter(
    folder: AdapterFolder,
    base: AdapterBase,
    *,
    precision: str | None = None,
    quantised: str = "refuse",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load the base, and the adapter onto it. Returns (their PeftModel, in evaluation mode; the class of transformers
    that loads the base). Raises UserError: the base cannot be loaded, or the adapter is for another one.
    `precision`: fp32, bf16 or fp16; None: that of the base. `quantised`: what to do with a quantised base: "refuse",
    "dequantize" or "keep"."""
    import transformers

    is_quantised = getattr(base.config, "quantization_config", None) is not None
    if is_quantised and quantised == "refuse":
        raise UserError(f"{base.option} = {base.name!r} is quantised. Name its original, or say --dequantize")
    config = trained_config(folder, base.config)
    task_type = folder.settings.get("task_type")
    if task_type is None:
        classifiers = [kind for kind in CLASSIFIER_TASK_TYPES if has_head(config, TASK_TYPES[kind][1])]
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
        try:
            model = model.dequantize()
        except (NotImplementedError, ValueError, ImportError) as error:
            why = first_line(error)
            raise UserError(f"--dequantize: {base.name!r} cannot be converted: {why}. Set --base") from None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        # The steps that read quantised weights cannot be reversed, and writing would try to.
        keep_conversions(model, _does_not_quantise, or_usual=True)
    for tied in separately_trained(folder, model):
        for weight in tied[1:]:
            owner, _, attribute = weight.rpartition(".")
            untied = torch.nn.Parameter(model.get_parameter(weight).detach().clone(), requires_grad=False)
            setattr(model.get_submodule(owner), attribute, untied)
        model.config.tie_word_embeddings = False
    adapted = inject_adapter(folder, model, base.name, UNSHARDED_STRATEGY, as_peft_model=True)
    return adapted.eval(), auto_class


def _does_not_quantise(step: Any) -> bool:
    return all("bitsandbytes" not in type(each).__module__ for each in getattr(step, "operations", ()))


def continue_adapter(
    folder: AdapterFolder, model: torch.nn.Module, recipe: TrainingRecipe, strategy: "Strategy"
) -> Adapter:
    """Inject an adapter that is trained on into a model of build_model: its layers, and the modules that it has in
    full, are trained further. Raises UserError where it is for another base."""
    original = adapter_settings(folder)
    settings = replace(original, inference_mode=False, init_lora_weights=True, lora_dropout=recipe.lora_dropout)
    drawn = [name for name in getattr(model, "initialized_weights", ()) if name not in folder.full_weights]
    fresh = [*(name.rpartition(".")[0] for name in drawn), *getattr(model, "resized_modules", ())]  # in no file yet
    saved = with_tied(model, [*_modules_in_full(folder, model, settings), *fresh])
    base = str(recipe.model_name_or_path)
    torch.manual_seed(recipe.seed)
    inject_adapter(folder, model, base, strategy, settings=settings, saved=saved)
    written = replace(original, base_model_name_or_path=published_base(base), lora_dropout=recipe.lora_dropout)
    adapter = make_trainable(model, written, saved, strategy)
    return replace(adapter, note=f"{folder.path}, trained on: {adapter.note}", base=base)


def _modules_in_full(folder: AdapterFolder, model: torch.nn.Module, settings: "LoraConfig") -> list[str]:
    """Return the modules that the adapter has in full: those in its settings, and embeddings that were resized."""
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
    settings: "LoraConfig | None" = None,
    saved: list[str] | None = None,
    as_peft_model: bool = False,
) -> Any:
    """Inject the adapter's layers into its base, and load all weights of its file into them and the modules that it
    has in full. Returns the model, or a PeftModel of it. `name`: the base's. `settings`, `saved`: by default the
    adapter's own. Raises UserError: the adapter is for another base."""
    from peft import PeftModel, get_peft_model_state_dict, inject_adapter_in_model

    settings = settings or adapter_settings(folder)
    saved = _modules_in_full(folder, model, settings) if saved is None else saved
    refusal = f"{folder.where} is for another base than {name!r}"
    inside = inside_of(model, saved)
    settings = replace(settings, modules_to_save=None, exclude_modules=inside or settings.exclude_modules)
    check_expert_targets(sorted(settings.target_parameters or ()), strategy)
    try:
        inject: Any = PeftModel if as_peft_model else inject_adapter_in_model
        adapted = inject(model=model, peft_config=settings, adapter_name=ADAPTER_NAME)
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
    for tied in separately_trained(folder, model):
        raise UserError(
            f"{folder.where}: {tied[0]} and {tied[-1]} are one weight in {name!r}, and the adapter trained them "
            f"apart. Make a full model of it: {merge_command(str(folder.path))}"
        )
    for key, tensor in tensors.items():
        parameter = adapter_parameters.get(key, parameters.get(key))
        if true_shape(parameter) != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, and that one takes {tuple(true_shape(parameter))}"
            raise UserError(f"{refusal}: {key} has the shape {shapes}")
        if strategy.deepspeed is None:  # the only copy of the weights, so in fp32 as in training
            parameter.data = parameter.data.float()
        with strategy.gathered(parameter), torch.no_grad():
            parameter.copy_(tensor)
    mark_magnitudes(model, strategy)
    return adapted


def separately_trained(folder: AdapterFolder, model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each weight that the base ties (embeddings and head) and the adapter trained separately."""
    tensors = {key.replace(".base_layer.", "."): tensor for key, tensor in folder.tensors.items()}  # below an adapter
    names: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(key.replace(".base_layer.", "."))
    separate = []
    for tied in names.values():
        trained = [tensors[key] for key in tied if key in tensors]
        is_partial = len(trained) != len(tied) and not folder.settings.get("ensure_weight_tying")
        if trained and (is_partial or any(not torch.equal(trained[0], other) for other in trained[1:])):
            separate.append(tied)
    return separate
