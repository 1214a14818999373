"""A LoRA adapter in its folder: its settings, the shapes of its tensors, and the base model that it belongs to.

The base is recognised by a few of its frozen weights, which are beside the adapter in base_weights.json: {"modules":
{"model.layers.0.self_attn.q_proj": [64 numbers], ...}}, of the first and the last module that has an adapter. The
adapters of two models of one architecture fit both without an error; only the weights tell the models apart.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.model.families import family_of
from zerofit.model.folders import has_tokenizer, is_adapter, model_folder, read_json
from zerofit.model.pretrained_io import read_config
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.parsing import read_yaml
from zerofit.recipe.paths import why_no_model

WEIGHTS = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."  # of every name in an adapter's file: peft's wrappers around the model
TASK_TYPES = {  # peft's names of tasks: the script of each, and what the model is called, AutoModelFor...
    "CAUSAL_LM": ("clm", "CausalLM"),
    "SEQ_CLS": ("cls", "SequenceClassification"),
    "TOKEN_CLS": ("cls", "TokenClassification"),
    "SEQ_2_SEQ_LM": ("seq2seq", "Seq2SeqLM"),
}
CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")
PEFT_CLASSIFIER_HEADS = ("classifier", "score")  # peft itself saves these with the adapter of a classifier
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True)
class AdapterFolder:
    """The contents of an adapter's folder.

    Args:
        settings: the contents of adapter_config.json.
        shapes: {name in the base model: shape} of its tensors.
    """

    path: Path
    settings: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.path)

    @property
    def classifies(self) -> bool:
        return self.settings.get("task_type") in CLASSIFIERS


def open_adapter(name: str, option: str = "adapter") -> AdapterFolder:
    """Read an adapter's folder: the settings, and the shapes of the weights.

    Raises:
        UserError: there is no such folder, it holds no LoRA adapter, or the weights are missing or empty.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UserError(f"{option} = {name!r}: there is no such folder. Name the folder of an adapter")
    if not is_adapter(str(path)):
        raise UserError(f"{option} = {name!r} has no adapter_config.json{_what_it_is(path)}")
    settings = read_json(path / "adapter_config.json")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{option} = {name!r} is a {settings.get('peft_type')} adapter; LoRA adapters are supported")
    task_type = settings.get("task_type")
    if task_type is not None and task_type not in TASK_TYPES:
        supported = ", ".join(TASK_TYPES)
        raise UserError(f"{option} = {name!r} was trained for the task {task_type}; supported are {supported}")
    return AdapterFolder(path, settings, _shapes(path, f"{option} = {name!r}"))


def _what_it_is(path: Path) -> str:
    if why := why_no_model(str(path)):
        return f": {why}"
    if is_adapter(str(path / "model")):
        return f": it is the folder of a run. Name {path / 'model'}"
    if (path / "config.json").is_file():
        return ": it is a full model, merged already or trained without --lora; it can be used as it is"
    return ". Name the folder that holds it, e.g. outputs/RUN/model"


def _shapes(path: Path, where: str) -> dict[str, tuple[int, ...]]:
    """{name in the base: shape} of the adapter's tensors, from the header of their file."""
    if not (path / WEIGHTS).is_file():
        raise UserError(f"{where} has no {WEIGHTS}: the adapter's weights are missing. Copy them into the folder")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / WEIGHTS, framework="pt") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: {WEIGHTS} is broken: {first_line(error)}. Copy it again") from None
    empty = [name for name, shape in shapes.items() if 0 in shape]
    if not shapes or empty:
        problem = f"{len(empty)} of its {len(shapes)} tensors are empty, such as {empty[0]}" if shapes else "no tensor"
        raise UserError(f"{where}: {WEIGHTS} holds an incomplete adapter: {problem}. Save it again")
    return {name.removeprefix(ADAPTER_PREFIX): shape for name, shape in shapes.items()}


def adapter_settings(folder: AdapterFolder, where: str):
    """peft's configuration of the adapter, for inference.

    Raises:
        UserError: a newer peft made it.
    """
    from peft import PeftConfig

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = PeftConfig.from_pretrained(str(folder.path))
    unknown = [str(warning.message) for warning in caught if "nexpected keyword" in str(warning.message)]
    if unknown:
        raise UserError(f"{where} was made by a newer peft than the one installed: {unknown[0].splitlines()[0]}")
    settings.inference_mode = True
    return settings


def name_some(names: list[str]) -> str:
    """The first name, and the number of the others."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


# ------------------------------------------------------------------------------------------------------------ its base


def find_base(
    folder: AdapterFolder,
    base: str | None = None,
    base_option: str = "base",
    named_with: str = "--base",
    trust_remote_code: bool = False,
) -> tuple[str, str, Any]:
    """(the option that names the base, its name, its configuration).

    Args:
        base: the base's folder or hub name; None: the one that the adapter names.
        base_option: the option that gives it, and
        named_with: how a user names another one, both for messages.

    Raises:
        UserError: the adapter names no base, or the base cannot be read.
    """
    file = folder.path / "adapter_config.json"
    option, name = base_option, base
    if not base:
        option, name = f"base_model_name_or_path in {file}", _recorded_base(folder)
    if not name:
        raise UserError(f"{file} names no base (base_model_name_or_path): name it with {named_with}")
    name = model_folder(name)
    if is_adapter(name):
        raise UserError(f"{option} = {name!r} is an adapter itself: merge that first, and name the merged model here")
    try:
        return option, name, read_config(option, name, trust_remote_code, **base_revision(folder, base))
    except UserError as error:
        raise UserError(f"{error}. It is the base of {str(folder.path)!r}: name it with {named_with}") from None


def _recorded_base(folder: AdapterFolder) -> str | None:
    """The base that an adapter names: a hub name, or a folder. If a folder's name has no path (zerofit/model/lora.py,
    _published_base), the path is in the recipe.yaml of the run that made the adapter."""
    name = folder.settings.get("base_model_name_or_path")
    if not name or not name.startswith("./") or Path(name).is_dir():
        return name
    for run in list(folder.path.resolve().parents)[:3]:
        if (run / "recipe.yaml").is_file():
            recorded = read_yaml(run / "recipe.yaml")
            trained_on = recorded.get("model_name_or_path") if isinstance(recorded, dict) else None
            if isinstance(trained_on, str) and Path(trained_on).expanduser().is_dir():
                return trained_on
    return name


def base_revision(folder: AdapterFolder, base: str | None) -> dict[str, str]:
    """The revision of the base that the adapter names, where it names the base too."""
    revision = folder.settings.get("revision")
    return {"revision": revision} if revision and not base else {}


def trained_config(folder: AdapterFolder, config, where: str, name: str) -> tuple[Any, list[str]]:
    """The configuration that the adapter was trained with, and notes on it.

    It is beside the adapter; if not, it is the base's with the number of labels of the adapter's head.

    Raises:
        UserError: the two configurations have other sizes.
    """
    if not (folder.path / "config.json").is_file():
        num_labels = _num_labels(folder, config)
        if num_labels and num_labels != config.num_labels:
            config.num_labels = num_labels
        return _headed(config, folder), []
    has_own_code = hasattr(config, "auto_map")  # then the configuration's class comes with the base
    trained = config if has_own_code else read_config("adapter", str(folder.path), trust_remote_code=False)
    for size in ("model_type", *SIZES):
        in_training, in_base = getattr(trained, size, None), getattr(config, size, None)
        if in_training != in_base:
            raise UserError(f"{where} is for a model with {size} = {in_training}, and {name!r} has {in_base}")
    notes = []
    quantization = getattr(config, "quantization_config", None)
    if getattr(trained, "quantization_config", None) is not None:
        if quantization is None:
            notes.append("note: the adapter was trained on quantised weights; these differ by the rounding")
        del trained.quantization_config
    if quantization is not None:
        trained.quantization_config = quantization
    trained.dtype, trained.use_cache = config.dtype, True
    return _headed(trained, folder), notes


def _num_labels(folder: AdapterFolder, config) -> int | None:
    """The number of labels of the head in a classifier's adapter."""
    if not folder.classifies:
        return None
    of_words = folder.settings["task_type"] == "TOKEN_CLS"
    heads = PEFT_CLASSIFIER_HEADS if of_words else family_of(config).classifier_heads
    endings = tuple(f"{head}.weight" for head in heads)
    return next((shape[0] for name, shape in folder.shapes.items() if name.endswith(endings)), None)


def _headed(config, folder: AdapterFolder):
    """The configuration, which says of a classifier what head it has; the base's may be another, or none."""
    if folder.classifies:
        config.architectures = [f"AutoModelFor{TASK_TYPES[folder.settings['task_type']][1]}"]
    return config


if TYPE_CHECKING:
    import torch

BASE_SAMPLE = "base_weights.json"
NUM_VALUES = 64
RELATIVE, ABSOLUTE = 1e-2, 1e-6  # bf16 rounds by 2^-9 of a value, fp16 by 2^-25 where values are tiny
MAX_DIFFERING = 0.05  # fraction of the values that may differ in the same base


def sample_weights(weight: "torch.Tensor") -> list[float]:
    """64 values, evenly strided over the flattened weight, from the first on.

    Args:
        weight: of any shape, full (under ZeRO-3 gathered), not empty and not quantised.
    """
    import torch

    indices = torch.arange(NUM_VALUES, device=weight.device) * weight.numel() // NUM_VALUES
    return weight.detach().flatten()[indices].float().tolist()


def adapted_weight(layer) -> "torch.Tensor":
    """The frozen weight that a layer of peft adapts; of experts a weight of all of them."""
    return layer.get_param() if hasattr(layer, "parameter_name") else layer.get_base_layer().weight


def differs(recorded: Sequence[float], sample: Sequence[float]) -> bool:
    """Whether the two samples come from different weights; each may have been rounded to bf16 or fp16."""
    if len(recorded) != len(sample):
        return True
    differing = sum(not math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in zip(recorded, sample))
    return differing > MAX_DIFFERING * len(recorded)


def check_base_weights(
    base, folder: Path, where: str, name: str, quantised: bool, gathered=lambda weight: nullcontext()
) -> list[str]:
    """Compare the frozen weights with those recorded in training. Returns a note if that is not possible.

    Args:
        base: the model that has the adapter's layers in it.
        folder: of the adapter.
        where: the option that names the adapter, and
        name: the base's name, both for messages.
        gathered: (weight) -> the context in which it is full.

    Raises:
        UserError: it is another base.
    """
    file = folder / BASE_SAMPLE
    if not file.is_file():
        return []
    if quantised:
        return [f"note: {name!r} is quantised, so its weights are not compared with those recorded in {file}"]
    modules = dict(base.named_modules())
    for module, recorded in read_json(file).get("modules", {}).items():
        layer = modules.get(module)
        if not hasattr(layer, "base_layer"):
            raise UserError(f"{where} is for another base than {name!r}, where {module} has no adapter")
        weight = adapted_weight(layer)
        with gathered(weight):
            sample = sample_weights(weight)
        if differs(recorded, sample):
            raise UserError(f"{where} is for another base: {module} in {name!r} has other weights. Name its own base")
    return []
