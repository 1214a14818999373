"""LoRA adapters in their folders, put back on the base that they were trained on, or refused.

peft itself leaves out adapter weights that find no place in the base without a word, and draws at random those that a
file lacks with a warning only. Here either is an error, and so is a base that merely has the right shapes.
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from train.model.pretrained_io import (
    ADAPTER_PREFIX,
    has_tokenizer,
    is_adapter,
    model_folder,
    read_config,
    read_json,
    read_model,
)
from train.recipe.errors import UserError, first_line

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
NAME = "default"  # peft's name for the only adapter
AUTO_CLASSES = {"CAUSAL_LM": "AutoModelForCausalLM", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
                "SEQ_CLS": "AutoModelForSequenceClassification"}  # fmt: skip
TASK_TYPES = {"clm": "CAUSAL_LM", "cls": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM"}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter as it lies in its folder.

    Args:
        settings: what adapter_config.json holds.
        shapes: {name in the base model: shape} of its tensors.
    """

    path: Path
    settings: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.path)


@dataclass
class Adapted:
    """A base with its adapter on it, in evaluation mode.

    Args:
        model: the PeftModel; `model.get_base_model()` is the transformers model with the adapter's layers in it.
        base: the base's folder or hub name.
    """

    model: Any
    base: str
    auto_class: Any
    notes: list[str] = field(default_factory=list)


def open_adapter(name: str, option: str = "adapter") -> AdapterFolder:
    """Read what an adapter's folder says of itself; its weights are only looked at.

    Raises:
        UserError: it is no folder, not an adapter's, not a LoRA adapter's, or its weights are missing or empty.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UserError(f"{option} = {name!r}: there is no such folder. Name the folder of an adapter")
    if not is_adapter(str(path)):
        raise UserError(f"{option} = {name!r} has no adapter_config.json{_what_it_is(path)}")
    settings = read_json(path / "adapter_config.json")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{option} = {name!r} is a {settings.get('peft_type')} adapter; LoRA adapters are understood")
    task_type = settings.get("task_type")
    if task_type is not None and task_type not in AUTO_CLASSES:
        known = ", ".join(AUTO_CLASSES)
        raise UserError(f"{option} = {name!r} was trained for the task {task_type}; those understood are {known}")
    return AdapterFolder(path, settings, _shapes(path, f"{option} = {name!r}"))


def _what_it_is(path: Path) -> str:
    if is_adapter(str(path / "model")):
        return f": it is the folder of a run. Name {path / 'model'}"
    if (path / "config.json").is_file():
        return ": it is a whole model, merged already or trained without --lora; it can be used as it is"
    return ". Name the folder that holds it, e.g. outputs/RUN/model"


def _shapes(path: Path, where: str) -> dict[str, tuple[int, ...]]:
    """{name in the base: shape} of the adapter's tensors, from the header of their file."""
    file = next((path / name for name in WEIGHTS if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{where} has no {WEIGHTS[0]}: the adapter's weights are missing. Copy them into the folder")
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".bin":
            import torch

            tensors = torch.load(file, map_location="cpu", weights_only=True)
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        else:
            with safe_open(file, framework="pt") as tensors:
                shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, EOFError) as error:
        raise UserError(f"{where}: {file.name} is broken: {first_line(error)}. Copy it again") from None
    except Exception as error:  # an unpickler has no end of ways to fail
        raise UserError(f"{where}: {file.name} is no file of tensors: {first_line(error)}") from None
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if not shapes or empty:
        some = f"{len(empty)} of its {len(shapes)} tensors are empty, such as {empty[0]}" if shapes else "no tensor"
        raise UserError(
            f"{where}: {file.name} holds no whole adapter: {some}. It was saved under ZeRO-3 without gathering, or "
            "half; save it again from the training program"
        )
    return {name.removeprefix(ADAPTER_PREFIX): shape for name, shape in shapes.items()}


def load_with_adapter(
    folder: AdapterFolder, base: str | None = None, *, base_option: str = "base", named_with: str = "--base",
    precision: str | None = None, quantised: str = "refuse", trust_remote_code: bool = False,
) -> Adapted:  # fmt: skip
    """Load the base and put the adapter on it.

    Args:
        base: the base's folder or hub name; None: the one that the adapter names.
        base_option: the option that gives it, and
        named_with: how another one is named, both for messages.
        precision: fp32, bf16 or fp16; None: that of the base.
        quantised: what to do with a quantised base: "refuse", "dequantize" or "keep".

    Raises:
        UserError: the base cannot be had, or the adapter is for another one.
    """
    import transformers

    where = f"adapter = {str(folder.path)!r}"
    option, name, config = find_base(folder, base, base_option, named_with, trust_remote_code)
    stored_quantised = getattr(config, "quantization_config", None) is not None
    if stored_quantised and quantised == "refuse":
        raise UserError(
            f"{option} = {name!r} is quantised, and an adapter is not merged into rounded weights. Name the model "
            f"that was quantised with {named_with}, or pass --dequantize to turn its weights back to floats first"
        )
    config, notes = as_trained(folder, config, where, name)
    auto_class = getattr(transformers, AUTO_CLASSES[folder.settings.get("task_type") or _task_type(config)])
    if type(config) not in auto_class._model_mapping and not hasattr(config, "auto_map"):
        raise UserError(f"{where}: {name!r} is a {config.model_type}, and there is no {auto_class.__name__} for it")
    model, missing = read_model(
        auto_class, option, name, config, precision=precision, trust_remote_code=trust_remote_code,
        **_revision(folder, base),
    )  # fmt: skip
    _check_whole(model, missing, folder, where, name)
    if stored_quantised and quantised == "dequantize":
        model = _dequantized(model, option, name)
    adapted = _attach(model, folder, where, name)
    notes += check_base_weights(adapted.get_base_model(), folder, where, name, stored_quantised)
    return Adapted(adapted.eval(), name, auto_class, notes)


def find_base(
    folder: AdapterFolder, base: str | None = None, base_option: str = "base", named_with: str = "--base",
    trust_remote_code: bool = False,
) -> tuple[str, str, Any]:  # fmt: skip
    """(the option that names the base, its name, its configuration); the arguments are those of load_with_adapter."""
    file = folder.path / "adapter_config.json"
    option, name = base_option, base
    if not base:
        option, name = f"base_model_name_or_path in {file}", _named_base(folder)
    if not name:
        raise UserError(
            f"{file} names no base (base_model_name_or_path is empty): name it with {named_with}. "
            "There is none if the adapter was trained on random weights (config_name)"
        )
    name = model_folder(name)
    if is_adapter(name):
        raise UserError(f"{option} = {name!r} is an adapter itself: merge that first, and name the merged model here")
    try:
        return option, name, read_config(option, name, trust_remote_code, **_revision(folder, base))
    except UserError as error:
        raise UserError(f"{error}. It is the base of {str(folder.path)!r}: name it with {named_with}") from None


def _named_base(folder: AdapterFolder) -> str | None:
    """The base that an adapter names: a hub name, or a folder. One of which only the name is left (lora.py, _origin)
    is looked for in the recipe.yaml of the run that made the adapter."""
    name = folder.settings.get("base_model_name_or_path")
    if not name or not name.startswith("./") or Path(name).is_dir():
        return name
    for run in list(folder.path.resolve().parents)[:3]:
        if (run / "recipe.yaml").is_file():
            trained_on = (yaml.safe_load((run / "recipe.yaml").read_text()) or {}).get("model_name_or_path")
            if trained_on and Path(trained_on).expanduser().is_dir():
                return trained_on
    return name


def _revision(folder: AdapterFolder, base: str | None) -> dict[str, str]:
    """The revision of the base that the adapter names, where it names the base too."""
    revision = folder.settings.get("revision")
    return {"revision": revision} if revision and not base else {}


def as_trained(folder: AdapterFolder, config, where: str, name: str) -> tuple[Any, list[str]]:
    """The configuration that the adapter was trained with, where it lies beside it, else the base's with as many
    labels as the adapter's head has; and what there is to say about it."""
    if not (folder.path / "config.json").is_file():
        labels = _labels(folder)
        if labels and labels != config.num_labels:
            config.num_labels = labels
        return config, []
    trained = read_config("adapter", str(folder.path), trust_remote_code=False) if _is_plain(config) else config
    for size in ("model_type", *SIZES):
        then, now = getattr(trained, size, None), getattr(config, size, None)
        if then != now:
            raise UserError(
                f"{where} is for another base: it was trained on a model with {size} = {then}, and {name!r} has {now}"
            )
    notes = []
    quantisation = getattr(config, "quantization_config", None)
    if getattr(trained, "quantization_config", None) is not None:
        if quantisation is None:
            notes.append(
                "note: the adapter was trained on quantised weights and is put on those that were quantised; the "
                "difference is that of rounding to fewer bits"
            )
        del trained.quantization_config
    if quantisation is not None:
        trained.quantization_config = quantisation
    trained.dtype, trained.use_cache = config.dtype, True
    return trained, notes


def _is_plain(config) -> bool:
    """Whether transformers itself knows the architecture; of others the base's own code has the configuration."""
    return not hasattr(config, "auto_map")


def _labels(folder: AdapterFolder) -> int | None:
    """The number of labels of the head in a classifier's adapter."""
    if folder.settings.get("task_type") != "SEQ_CLS":
        return None
    heads = ("score.weight", "classifier.weight", "classifier.out_proj.weight", "classification_head.out_proj.weight")
    return next((shape[0] for name, shape in folder.shapes.items() if name.endswith(heads)), None)


def _task_type(config) -> str:
    """The task of a model, where its adapter does not say."""
    if config.is_encoder_decoder:
        return "SEQ_2_SEQ_LM"
    classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    return "SEQ_CLS" if classifier else "CAUSAL_LM"


def _check_whole(model, missing: list[str], folder: AdapterFolder, where: str, name: str) -> None:
    """Raises UserError if the base lacks weights, or has them in another shape, that the adapter does not bring."""
    lacking = [weight for weight in missing if weight not in folder.shapes]
    if lacking:
        raise UserError(
            f"{where} and {name!r} make no whole model: neither has {some(lacking)} in the right shape. Name the "
            "base that the adapter was trained on; a head that was random when training began must be among the "
            "adapter's modules_to_save"
        )


def _dequantized(model, option: str, name: str):
    try:
        model = model.dequantize()
    except (NotImplementedError, ValueError, ImportError) as error:
        raise UserError(
            f"--dequantize: {option} = {name!r} cannot be turned back to floats: {first_line(error)}. Name the model "
            "that was quantised with --base"
        ) from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # What the quantised weights were read with cannot be turned round, and has no place in what is written.
    reading = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [step for step in reading if not _quantises(step)] or None
    return model


def _quantises(step) -> bool:
    """Whether a step of reading weights (of transformers) makes quantised ones."""
    return any("bitsandbytes" in type(operation).__module__ for operation in getattr(step, "operations", ()))


def adapter_settings(folder: AdapterFolder, where: str):
    """peft's configuration of the adapter, for use and not for training.

    Raises:
        UserError: a newer peft has made it.
    """
    from peft import PeftConfig

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        settings = PeftConfig.from_pretrained(str(folder.path))
    unknown = [str(warning.message) for warning in said if "nexpected keyword" in str(warning.message)]
    if unknown:
        raise UserError(f"{where} was made by a newer peft than the one installed: {unknown[0].splitlines()[0]}")
    settings.inference_mode = True
    return settings


def _attach(model, folder: AdapterFolder, where: str, name: str):
    """The PeftModel of base and adapter, every weight of the file in its place and none left at random."""
    from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel

    another, settings = f"{where} is for another base than {name!r}", adapter_settings(folder, where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on tied embeddings; merging knows of them
        try:
            kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(settings.task_type, PeftModel)
            adapted = kind(model, settings, NAME)
        except ValueError as error:  # nothing matches target_modules
            raise UserError(f"{another}: {first_line(error)}") from None
        try:
            result = adapted.load_adapter(str(folder.path), NAME, torch_device="cpu")
        except (KeyError, RuntimeError) as error:
            raise UserError(f"{another}{_unplaced(adapted, folder) or f': {first_line(error)}'}") from None
    left = [*result.missing_keys, *result.unexpected_keys]
    if left:
        raise UserError(f"{another}{_unplaced(adapted, folder) or f': no place for {some(left)}'}")
    return adapted


def _unplaced(adapted, folder: AdapterFolder) -> str | None:
    """In what the adapter's tensors differ from the places that peft has made in the base for them, in words."""
    from peft import get_peft_model_state_dict

    made = get_peft_model_state_dict(adapted, adapter_name=NAME, save_embedding_layers=False)
    places = {key.removeprefix(ADAPTER_PREFIX): tuple(tensor.shape) for key, tensor in made.items()}
    own = {key: tuple(tensor.shape) for key, tensor in adapted.get_base_model().state_dict().items()}
    homeless = [key for key in folder.shapes if key not in places and own.get(key) != folder.shapes[key]]
    if homeless:
        return f", which has no place for {some(homeless)}"
    empty = [key for key in places if key not in folder.shapes]
    if empty:
        return f": that one has modules for which the adapter has no weights: {some(empty)}"
    for key, shape in places.items():
        if folder.shapes[key] != shape:
            return f": {key} has the shape {folder.shapes[key]}, and that one takes {shape}"
    return None


def some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def check_base_weights(
    base, folder: AdapterFolder, where: str, name: str, quantised: bool, gathered=lambda weight: nullcontext()
) -> list[str]:
    """Compare the frozen weights with those noted in training. Returns a note if that was not possible.

    Args:
        base: the model that has the adapter's layers in it.
        gathered: (weight) -> the context in which it is whole.
    """
    from train.model.base_weights import FILE, differs, sample_weights

    file = folder.path / FILE
    if not file.is_file():
        return []
    if quantised:
        return [f"note: {name!r} is quantised, so its weights are not compared with those noted in {file}"]
    modules = dict(base.named_modules())
    for module, recorded in read_json(file).get("modules", {}).items():
        layer = getattr(modules.get(module), "base_layer", None)
        if layer is None:
            raise UserError(f"{where} is for another base than {name!r}, where {module} has no adapter")
        with gathered(layer.weight):
            found = sample_weights(layer.weight)
        if differs(recorded, found):
            raise UserError(
                f"{where} is for another base: the weights of {module} in {name!r} are not those that it was trained "
                "on. Name the base that it was trained on"
            )
    return []
