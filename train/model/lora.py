"""LoRA: low-rank adapters inside a frozen model, through peft. What is trained, and what of it is written.

The layers are put into the transformers model itself (peft's injection), so that the loss, generation and the engine
go on to work with the model that they know. What is left behind is a folder that peft loads.
"""

import copy
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from train.model.adapters import TASK_TYPES
from train.model.base_weights import FILE, sample_weights
from train.model.export import make_consistent, write_card
from train.model.pretrained_io import ADAPTER_PREFIX
from train.recipe.errors import UserError, nearest
from train.recipe.model_options import LoraOptions
from train.recipe.options import TrainingRecipe

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED, BART, T5 = ("query_key_value",), ("q_proj", "k_proj", "v_proj", "out_proj"), ("q", "k", "v", "o")
PRESETS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2",
                     "granite", "smollm3"), LLAMA),
    **dict.fromkeys(("gpt_neox", "bloom", "falcon"), FUSED),
    "gpt2": ("c_attn",),
    "deberta": ("in_proj",),
    "deberta-v2": ("query_proj", "key_proj", "value_proj"),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "camembert"), ("query", "key", "value")),
    **dict.fromkeys(("blenderbot", "blenderbot-small", "bart", "mbart", "pegasus", "m2m_100", "opt"), BART),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), T5),
}  # fmt: skip
ALL_LINEAR = "all-linear"
HEADS_OF_CLASSIFIERS = ("classifier", "score")  # peft itself saves these with the adapter of a classifier


@dataclass
class Adapter:
    """What was put into a model.

    Args:
        config: peft's description of it, as it is written.
        targets: full names of the modules that have an adapter.
        saved: full names of the modules that are trained whole.
        base_sample: some of the frozen weights, by module, by which the base is known again; empty if quantised.
        note: a sentence for the log.
    """

    config: object
    targets: list[str]
    saved: list[str]
    base_sample: dict[str, list[float]]
    note: str

    def save(self, model: torch.nn.Module, state: dict[str, torch.Tensor], tokenizer, folder: Path, card: str) -> None:
        """Write the adapter as peft does, with the tokenizer, the model's configuration and a model card beside it.

        Args:
            model: the model that the adapter is in; only its configuration and the names in it are used.
            state: every trained weight by its name in the model, whole, on the CPU.

        Raises:
            RuntimeError: a tensor is empty or missing. Half an adapter is never written.
        """
        from safetensors.torch import save_file

        tensors = self._tensors(model, state)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.config.save_pretrained(folder)
        description = copy.deepcopy(model.config)  # of a classifier it has the labels
        if hasattr(description, "quantization_config"):
            del description.quantization_config  # how the base was held here; it may be loaded otherwise
        description.use_cache = True
        description.save_pretrained(folder)
        if model.config.is_encoder_decoder:  # how it was told to answer (train/seq2seq.py)
            settings = copy.deepcopy(model.generation_config)
            make_consistent(settings)
            settings.save_pretrained(folder)
        if self.base_sample:
            (folder / FILE).write_text(json.dumps({"modules": self.base_sample}) + "\n")
        tokenizer.save_pretrained(folder)
        write_card(folder, card)

    def _tensors(self, model: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from peft import get_peft_model_state_dict

        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        broken = sorted(name for name in trained if name not in state or state[name].numel() == 0)
        if broken:
            raise RuntimeError(f"the gathered adapter is not whole: {len(broken)} tensors, such as {broken[:3]}")
        named = get_peft_model_state_dict(model, state_dict=dict(state), save_embedding_layers=False)
        names_of = {id(parameter): name for name, parameter in trained.items()}
        for module in self.saved:  # under the name of every module that holds it, tied ones too
            for name, parameter in model.get_submodule(module).named_parameters():
                named[f"{module}.{name}"] = state[names_of[id(parameter)]]
        taken = {id(tensor) for tensor in named.values()}
        named |= {name: tensor for name, tensor in state.items() if id(tensor) not in taken}  # biases
        return {ADAPTER_PREFIX + name: tensor.clone().contiguous() for name, tensor in named.items()}


def add_adapter(model: torch.nn.Module, recipe: TrainingRecipe, task: str, strategy) -> Adapter | None:
    """Freeze the model and put LoRA layers into it, the same under every strategy; None without --lora.

    Weights that the pretrained model lacked (a classifier's head) are random: they are trained whole and saved with
    the adapter, which would otherwise come back with other random ones.

    Args:
        model: of build_model, which says in `drawn_weights` what the pretrained weights lacked.

    Raises:
        UserError: a target or a module to save matches nothing in the model, or cannot have an adapter.
    """
    if not recipe.lora:
        return None
    from peft import LoraConfig, inject_adapter_in_model

    saved = _saved_modules(model, recipe, task)
    preset = PRESETS.get(model.config.model_type, (ALL_LINEAR,))
    wanted = tuple(_names(recipe.lora_target_modules) or preset)
    _check_targets(model, wanted)
    config = LoraConfig(
        task_type=TASK_TYPES[task], r=recipe.lora_r, lora_alpha=recipe.lora_alpha, lora_dropout=recipe.lora_dropout,
        bias=recipe.lora_bias, use_dora=recipe.use_dora, use_rslora=recipe.use_rslora,
        target_modules=ALL_LINEAR if wanted == (ALL_LINEAR,) else list(wanted),
        exclude_modules=_inside(model, saved) or None,
        base_model_name_or_path=_origin(recipe.model_name_or_path), fan_in_fan_out=_is_conv1d(model, wanted),
    )  # fmt: skip
    torch.manual_seed(recipe.seed)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        listed = ", ".join(_linear_names(model))
        raise UserError(f"lora_target_modules = {' '.join(wanted)}: {error}. Linear are {listed}") from None
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for module in saved:
        model.get_submodule(module).requires_grad_(True)
    if strategy.deepspeed is None:  # where nobody keeps a copy in fp32 for the optimizer, the trained weights are it
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    for layer in layers.values():
        for dora in layer.lora_magnitude_vector.values():
            strategy.read_from_outside(dora, layer.get_base_layer().weight)
    written = replace(config, modules_to_save=sorted(saved) or None, exclude_modules=None, inference_mode=True)
    return Adapter(written, list(layers), saved, _base_sample(layers, strategy), _note(recipe, wanted, layers, saved))


def check_quantisation(recipe: LoraOptions, strategy) -> None:
    """Raises UserError where the frozen weights are to be quantised and this machine or strategy cannot."""
    option = recipe.quantised
    if option is None:
        return
    if not torch.accelerator.is_available():
        raise UserError(f"{option} = true needs a GPU, and this machine has none. Leave the option out")
    try:
        version("bitsandbytes")
    except PackageNotFoundError:
        raise UserError(
            f"{option} = true needs bitsandbytes, which is not installed: pip install '.[qlora]' (or bitsandbytes), "
            "or leave the option out"
        ) from None
    if strategy.shards_parameters:
        raise UserError(
            f"{option} = true: quantised weights cannot be shared out by ZeRO-3. Use zero2.yaml or ddp.yaml, or leave "
            "the option out"
        )


def quantisation(recipe: LoraOptions, dtype: torch.dtype) -> dict:
    """The arguments of from_pretrained that quantise; none where the recipe asks for none.

    Source: Dettmers et al. 2023, QLoRA: NF4 with double quantisation, products in half precision.
    """
    option = recipe.quantised
    if option is None:
        return {}
    from transformers import BitsAndBytesConfig

    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(**{option: True}, **(four if option == "load_in_4bit" else {}))
    return {"quantization_config": config, "device_map": {"": torch.accelerator.current_device_index()}}


def _saved_modules(model: torch.nn.Module, recipe: LoraOptions, task: str) -> list[str]:
    """Full names of the modules that are trained whole: peft's heads, those that were drawn, those asked for."""
    names = [name for name, _ in model.named_modules() if name]
    chosen = [name for name in HEADS_OF_CLASSIFIERS if task == "cls" and name in names]
    chosen += [name.rpartition(".")[0] for name in getattr(model, "drawn_weights", ())]
    for wanted in _names(recipe.lora_modules_to_save):
        matching = [name for name in names if name == wanted or name.endswith(f".{wanted}")]
        if not matching:
            raise UserError(_no_match("lora_modules_to_save", wanted, {name.rpartition(".")[2] for name in names}))
        chosen += matching
    outer = [name for name in dict.fromkeys(chosen) if not any(name.startswith(f"{other}.") for other in chosen)]
    held = {id(parameter) for name in outer for parameter in model.get_submodule(name).parameters()}
    tied = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if any(id(parameter) in held for parameter in module.parameters(recurse=False))
    ]
    return outer + [name for name in tied if not any(f"{name}.".startswith(f"{other}.") for other in outer)]


def _check_targets(model: torch.nn.Module, wanted: Iterable[str]) -> None:
    if ALL_LINEAR in wanted and len(wanted) > 1:
        raise UserError(f"lora_target_modules = {' '.join(wanted)}: all-linear stands alone. Keep it, or the others")
    for target in wanted if ALL_LINEAR not in wanted else ():
        matching = [module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not matching:
            raise UserError(_no_match("lora_target_modules", target, _linear_names(model)))
        unfit = next((module for module in matching if not isinstance(module, _adaptable())), None)
        if unfit is not None:
            raise UserError(
                f"lora_target_modules = {target!r} is a {type(unfit).__name__}, which cannot have an adapter itself. "
                f"Name linear modules: there are {', '.join(_linear_names(model))}"
            )


def _adaptable() -> tuple[type, ...]:
    from transformers.pytorch_utils import Conv1D

    return torch.nn.Linear, Conv1D, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d


def _names(option: list[str] | None) -> list[str]:
    """The names that an option lists, also where they are separated by commas; all_linear is all-linear."""
    names = [name.strip() for item in option or () for name in item.split(",") if name.strip()]
    return [ALL_LINEAR if name == "all_linear" else name for name in names]


def _no_match(option: str, wanted: str, known: Iterable[str]) -> str:
    known = sorted(set(known))
    close = nearest(wanted, known)
    listed = ", ".join(name for name in known if not name.isdigit())
    return f"{option} = {wanted!r} matches no module. {f'Did you mean {close}? ' if close else ''}There are {listed}"


def _linear_names(model: torch.nn.Module) -> list[str]:
    """The last parts of the names of all linear modules."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D)
    return sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kinds)})


def _is_conv1d(model: torch.nn.Module, wanted: tuple[str, ...]) -> bool:
    """Whether the targets keep their weights transposed, as GPT-2 does."""
    from transformers.pytorch_utils import Conv1D

    ends = tuple(f".{target}" for target in wanted)
    return any(isinstance(module, Conv1D) and name.endswith(ends) for name, module in model.named_modules())


def _inside(model: torch.nn.Module, saved: list[str]) -> list[str]:
    """The modules to save and all within them: no adapter goes where everything is trained."""
    return [name for name, _ in model.named_modules() if any(f"{name}.".startswith(f"{each}.") for each in saved)]


def _origin(name: str | None) -> str | None:
    """The base as others will find it: a hub name as it is. A folder is no hub name, so it begins with a dot, and an
    absolute path is left out (train/model/adapters.py finds it again in the run's recipe.yaml)."""
    path = Path(name or "").expanduser()
    if not name or not path.is_dir():
        return name
    local = path.resolve().name if path.is_absolute() else os.path.normpath(name)
    return local if local.startswith("..") else f"./{local}"


def _base_sample(layers: dict[str, torch.nn.Module], strategy) -> dict[str, list[float]]:
    """Some frozen weights of the first and the last adapted module."""
    sample = {}
    names = list(layers)
    for name in (names[0], names[-1]):
        weight = layers[name].get_base_layer().weight
        if not weight.is_floating_point():
            return {}
        with strategy.gathered(weight, written=False):
            sample[name] = sample_weights(weight.detach())
    return sample


def _note(recipe: TrainingRecipe, wanted: tuple[str, ...], layers: dict, saved: list[str]) -> str:
    kind = "DoRA" if recipe.use_dora else "LoRA"
    scale = "rank-stabilised, " if recipe.use_rslora else ""
    where = "as asked for" if recipe.lora_target_modules else "the preset of this architecture"
    whole = f"; trained whole: {', '.join(saved)}" if saved else ""
    return (
        f"{kind} of rank {recipe.lora_r}, alpha {recipe.lora_alpha}, {scale}dropout {recipe.lora_dropout:g}, bias "
        f"{recipe.lora_bias}, on {len(layers)} modules: {', '.join(wanted)} ({where}){whole}"
    )
