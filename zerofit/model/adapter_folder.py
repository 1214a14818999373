"""A LoRA adapter in its folder: its settings, its tensors, and the base model that it belongs to."""

import dataclasses
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zerofit.model.configuration import (
    STORED_ROWS,
    apply_overrides,
    check_quantiser,
    has_tokenizer,
    is_adapter,
    load_configuration,
    model_folder,
    name_some,
    read_config,
    read_json,
)
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import read_record
from zerofit.recipe.model_options import merge_command
from zerofit.recipe.paths import why_no_model
from zerofit.recipe.tasks import model_kind

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import PretrainedConfig

ADAPTER_FILE = "adapter_model.safetensors"
PICKLED_ADAPTER_FILE = "adapter_model.bin"  # written by an older peft
WRAPPER_PREFIXES = re.compile(  # DDP, torch.compile and peft put these before a name or into it
    r"^((base_model\.model|module|_orig_mod)\.)+"
    r"|(?<=\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|modules_to_save(\.default)?)\."
)
DEFAULT_ADAPTER_SUFFIX = re.compile(r"(?<=\.)(lora_\w+)\.default(?=\.|$)")  # peft's, of a state_dict
EMBEDDINGS = ("embed_tokens", "word_embeddings", "tok_embeddings", "wte", "shared", "embed_in", "embed_out", "lm_head")
ADAPTER_PREFIX = "base_model.model."  # begins every name in an adapter's file: peft's wrappers around the model
TASK_TYPES = {  # peft's names of tasks: the script of each, and what the model is called, AutoModelFor...
    "CAUSAL_LM": ("clm", "CausalLM"),
    "SEQ_CLS": ("cls", "SequenceClassification"),
    "TOKEN_CLS": ("cls", "TokenClassification"),
    "SEQ_2_SEQ_LM": ("seq2seq", "Seq2SeqLM"),
}
CLASSIFIER_TASK_TYPES = ("SEQ_CLS", "TOKEN_CLS")
PEFT_CLASSIFIER_HEADS = ("classifier", "score")  # peft itself saves these with the adapter of a classifier
CLASSIFIER_LAYERS = (*PEFT_CLASSIFIER_HEADS, "classifier.out_proj", "classification_head.out_proj")  # a row per label
MODEL_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of an adapter's folder."""

    path: Path
    option: str  # the option that names it
    settings: dict[str, Any]  # the contents of adapter_config.json
    tensors: dict[str, "torch.Tensor"]  # name in the base: tensor; a safetensors file is mapped

    @property
    def where(self) -> str:
        """The beginning of a message about the adapter: the option and the folder that it names."""
        return f"{self.option} = {str(self.path)!r}"

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.path)

    @property
    def classifies(self) -> bool:
        return self.settings.get("task_type") in CLASSIFIER_TASK_TYPES

    @property
    def full_weights(self) -> list[str]:
        """The names of the base's weights that the adapter's file holds in full."""
        return [name.replace(".base_layer.", ".") for name in self.tensors if "lora_" not in name]


def open_adapter(name: str, option: str = "adapter", task: str | None = None) -> AdapterFolder:
    """Read an adapter's settings and weights. `task`: the name of a script of train/ that it is for; None: any. Raises
    UserError where the folder holds no whole LoRA adapter, or one for another script."""
    path = Path(model_folder(name))
    where = f"{option} = {name!r}"
    if not is_adapter(str(path)):
        why = why_no_model(str(path)) or "it is no adapter. Name the folder that holds one, e.g. outputs/RUN/model"
        raise UserError(f"{where} has no adapter_config.json: {why}")
    settings = read_json(path / "adapter_config.json")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{where} is a {settings.get('peft_type')} adapter; LoRA adapters are supported")
    task_type = settings.get("task_type")
    if task_type is not None and task_type not in TASK_TYPES:
        raise UserError(f"{where} is for the task {task_type}; supported are {', '.join(TASK_TYPES)}")
    if task_type and task and TASK_TYPES[task_type][0] != model_kind(task):
        raise UserError(f"{where} is an adapter of train/{TASK_TYPES[task_type][0]}.py: use that")
    file = next((name for name in (ADAPTER_FILE, PICKLED_ADAPTER_FILE) if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{where} has no {ADAPTER_FILE}: the adapter's weights are missing. Copy them into the folder")
    import torch
    from peft import load_peft_weights
    from safetensors import SafetensorError

    try:
        tensors = load_peft_weights(str(path), device="cpu")  # no code in a pickle is run
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        problem = f"is broken, or holds more than tensors: {first_line(error)}"
        raise UserError(f"{where}: {file} {problem}. Save the adapter again, as {ADAPTER_FILE}") from None
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise UserError(f"{where}: {file} holds more than tensors by name. Save the adapter again, as {ADAPTER_FILE}")
    num_filled = sum(tensor.numel() > 0 for tensor in tensors.values())
    if not tensors or num_filled < len(tensors):
        stated = f"{where}: {file} is an incomplete adapter"
        raise UserError(f"{stated}: {num_filled} of its {len(tensors)} tensors hold numbers. Save it again")
    # By their names in the base, without the wrappers that the model had as it was saved. Of embeddings that were
    # resized peft writes the base's own as well (original_module), and the trained ones twice.
    by_base_name: dict[str, torch.Tensor] = {}
    for key in sorted(tensors, key=lambda each: ".modules_to_save." in each):
        base_name = DEFAULT_ADAPTER_SUFFIX.sub(r"\1", WRAPPER_PREFIXES.sub("", key))
        base_name = base_name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
        if base_name in by_base_name and ".modules_to_save." not in key:
            raise UserError(f"{where}: two of its tensors have the name {base_name}. Save one adapter alone")
        if ".original_module." not in key:
            by_base_name.setdefault(base_name, tensors[key])
    return AdapterFolder(path, option, settings, by_base_name)


def adapter_settings(folder: AdapterFolder) -> "LoraConfig":
    """Return peft's configuration of the adapter, for inference. Raises UserError where a newer peft made it."""
    from peft import LoraConfig

    if unknown := folder.settings.keys() - {field.name for field in dataclasses.fields(LoraConfig)}:
        newer = f"{folder.where} has {name_some(sorted(unknown))} of a newer peft than the one installed"
        raise UserError(f"{newer}: pip install -U peft")
    settings: LoraConfig = LoraConfig.from_pretrained(str(folder.path))
    settings.inference_mode = True
    return settings


# What LoRA adapters may say and still be trained on: the rest changes the base, or is not a weight of a layer.
TRAINABLE_LORA_FIELDS = set(
    (
        "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r "
        "target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save "
        "layers_to_transform layers_pattern rank_pattern alpha_pattern use_dora target_parameters ensure_weight_tying "
        "megatron_core qalora_group_size runtime_config lora_bias"
    ).split()
)
BASE_PRESERVING_INITS = (True, False, "gaussian", "eva", "orthogonal")  # of init_lora_weights; they keep the base


def adapter_to_train_on(recipe: Any, task: str | None) -> AdapterFolder | None:
    """Return the adapter that a recipe trains on; None if its model is not an adapter. From now on the recipe names
    the base (what it records is still the adapter), and the adapter's tokenizer. `task`: the name of a script of
    train/; None: any. Raises UserError, with the command that merges it, where the adapter cannot be trained on."""
    name = recipe.model_name_or_path
    if not (recipe.trains and name and is_adapter(name)):
        return None
    if contradictions := recipe.adopt_adapter():
        raise UserError(contradictions)
    try:
        folder = open_adapter(name, "model_name_or_path", task)
        settings = adapter_settings(folder)
        names = {field.name for field in dataclasses.fields(settings)} - TRAINABLE_LORA_FIELDS - {"init_lora_weights"}
        refused = [name for name in sorted(names) if getattr(settings, name) != getattr(type(settings)(), name)]
        if settings.init_lora_weights not in BASE_PRESERVING_INITS:
            refused.append(f"init_lora_weights = {settings.init_lora_weights!r}")
        if below := [name for name in folder.tensors if ".base_layer." in name and name.endswith(".weight")]:
            refused.append(f"a full weight below its adapter ({name_some(below)})")
        if refused:
            raise UserError(f"{folder.where} has {', '.join(refused)}: it is not trained on here")
        base = find_base(folder, trust_remote_code=recipe.trust_remote_code)
        check_quantiser(base.option, base.name, base.config, on_gpu=True)
    except UserError as error:
        remedy = f"To train on base and adapter as one model: {merge_command(name)}"
        raise UserError([*error.problems[:-1], f"{error.problems[-1].rstrip('.')}. {remedy}"]) from None
    if folder.has_tokenizer and not (recipe.tokenizer_name or getattr(recipe, "vocab_file", None)):
        recipe.stand_in("tokenizer_name", name)
    recipe.stand_in("model_name_or_path", base.name)
    return folder


def with_base_configuration(recipe: Any, task: str | None = None, auto_class: Any = None) -> tuple[Any, Any]:
    """Return (the recipe, which names the base where its model is an adapter; the configuration of the model)."""
    recipe = recipe.draft()
    adapter = adapter_to_train_on(recipe, task)
    config = load_configuration(recipe, auto_class)
    return recipe, config if adapter is None else trained_config(adapter, config, recipe.config_overrides)


def check_resized(folder: AdapterFolder, config: Any) -> None:
    """Raises UserError if embeddings are to get more rows, and the adapter has these embeddings in full."""
    if hasattr(config, STORED_ROWS) and _num_rows(folder):
        raise UserError(
            f"resize_embeddings: the adapter {str(folder.path)!r} has embeddings of its own, of {_num_rows(folder):,} "
            f"rows. Make a full model of it, and train that: {merge_command(str(folder.path))}"
        )


class AdapterBase(NamedTuple):
    """The base model of an adapter."""

    option: str  # the option that names it
    name: str  # folder or hub name
    config: Any
    revision: str | None = None  # on the hub, where the adapter names one


def find_base(
    folder: AdapterFolder, base: str | None = None, option: str = "base", trust_remote_code: bool = False
) -> AdapterBase:
    """Return the base model of an adapter. `base`: its folder or hub name, from `option`; None: the one that the
    adapter names. Raises UserError where the adapter names no base, or the base cannot be read."""
    file = folder.path / "adapter_config.json"
    name = base
    revision = None
    if not base:
        option = f"base_model_name_or_path in {file}"
        name = recorded_base(folder)
        revision = folder.settings.get("revision") or None
    if not name:
        raise UserError(f"{file} names no base. Write its folder or hub name there, as base_model_name_or_path")
    name = model_folder(name)
    if is_adapter(name):
        raise UserError(f"{option} = {name!r} is an adapter itself: merge that first, and name the merged model here")
    try:
        return AdapterBase(option, name, read_config(option, name, trust_remote_code, revision), revision)
    except UserError as error:
        raise UserError(f"{error}. It is the base of {str(folder.path)!r}: name it there (merge: --base)") from None


def recorded_base(folder: AdapterFolder) -> str | None:
    """Return the base that an adapter names: a hub name, or a folder. If the adapter has only the last name of a
    folder (published_base), the path is in the recipe.yaml of the run that made the adapter."""
    name = folder.settings.get("base_model_name_or_path")
    if not name or not name.startswith("./") or Path(name).is_dir():
        return name
    for run in list(folder.path.resolve().parents)[:3]:
        recorded = read_record(run / "recipe.yaml").get("model_name_or_path")
        if not isinstance(recorded, str):
            continue
        trained_on = model_folder(recorded)
        if is_adapter(trained_on):  # this one was trained on, and has the same base
            settings = read_json(Path(trained_on) / "adapter_config.json")
            return recorded_base(dataclasses.replace(folder, path=Path(trained_on), settings=settings))
        if Path(trained_on).is_dir():
            return trained_on
    return name


def trained_config(folder: AdapterFolder, base: "PretrainedConfig", overrides: str | None = None) -> Any:
    """Return the configuration that the adapter was trained with: the config.json in its folder, else the base's with
    the labels and tokens that the adapter has. Raises UserError where the sizes of the two differ."""
    config: Any = base
    if (folder.path / "config.json").is_file():
        if not hasattr(base, "auto_map"):  # with it, the configuration's class comes with the base
            config = read_config("adapter", str(folder.path))
        refusal = f"{folder.where} is for another base than {base.name_or_path!r}"
        for size in ("model_type", *MODEL_SIZES):
            of_adapter = getattr(config, size, None)
            of_base = getattr(base, size, None)
            if of_adapter != of_base:
                raise UserError(f"{refusal}: for one with {size} = {of_adapter}, and this one has {of_base}")
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if getattr(base, "quantization_config", None) is not None:
            config.quantization_config = base.quantization_config
        config.dtype = base.dtype
        config.use_cache = getattr(base, "use_cache", True)
        apply_overrides(config, overrides)
    elif folder.classifies:
        endings = tuple(f".{head}.weight" for head in CLASSIFIER_LAYERS)
        num_labels = [len(tensor) for name, tensor in folder.tensors.items() if f".{name}".endswith(endings)]
        if num_labels and num_labels[0] != config.num_labels:
            config.num_labels = num_labels[0]
    if num_rows := _num_rows(folder):
        config.get_text_config().vocab_size = num_rows
    if folder.classifies:
        config.architectures = [f"AutoModelFor{TASK_TYPES[folder.settings['task_type']][1]}"]
    return config


def _num_rows(folder: AdapterFolder) -> int | None:
    """Return the number of rows of embeddings that the adapter has in full; the base may have others. None: it has
    none."""
    row_counts = {
        len(tensor)
        for name, tensor in folder.tensors.items()
        if tensor.dim() == 2 and name.removesuffix(".weight").removesuffix(".base_layer").endswith(EMBEDDINGS)
    }
    return row_counts.pop() if len(row_counts) == 1 else None
