"""The model's configuration, from pretrained weights, the architectures in this tree, a folder or the hub."""

import copy
import json
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from zerofit.compat import UNTIL_THE_RUN_ENDS
from zerofit.compat.huggingface_hub import work_offline
from zerofit.compat.transformers import attention_of
from zerofit.model.families import family_of
from zerofit.recipe.errors import UserError, first_line, nearest
from zerofit.recipe.files import parse_json
from zerofit.recipe.model_options import ModelOptions
from zerofit.recipe.paths import LFS_POINTER, is_missing_folder, is_pointer, is_run, why_no_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TRAINED_WITH = "trained_with"  # in tokenizer_config.json: the options that shaped the inputs in training
WEIGHT_FILE_PATTERNS = ("*.safetensors", "*.bin", "*.json")
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json tokenizer.model vocab.json vocab.txt spiece.model spm.model "
    "sentencepiece.bpe.model source.spm"
).split()


def model_folder(name: str) -> str:
    """Return the folder of a named model: for a run's folder its model/; a hub name is unchanged."""
    path = Path(name).expanduser()
    if is_run(path) and not is_adapter(str(path)):
        return str(path / "model")
    return str(path) if path.exists() else name


def weights_key(name: str) -> Any:
    """Return a cache key for a model's weights: names, sizes and times of the files in its folder; for a hub name its
    commit in the hub's cache, from which its configuration was read."""
    if not (folder := Path(model_folder(name))).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")  # .../snapshots/COMMIT/config.json
        return name, Path(cached).parent.name if isinstance(cached, str) else None
    stats = ((file.name, file.stat()) for pattern in WEIGHT_FILE_PATTERNS for file in folder.glob(pattern))
    return sorted((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def is_adapter(name: str) -> bool:
    return (Path(name) / "adapter_config.json").is_file()


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises UserError if it holds anything else."""
    try:
        contents = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(contents, dict):
        raise UserError(f"{path} holds no JSON object")
    return contents


def name_some(names: Iterable[str]) -> str:
    """Return the first three names, and the number of the others."""
    all_names = list(names)
    other_names = f" and {len(all_names) - 3} more" if len(all_names) > 3 else ""
    return ", ".join(all_names[:3]) + other_names


# The errors that transformers raises for files that are not as it expects.
FILE_ERRORS = (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, NotImplementedError)
PER_LAYER_FIELD = re.compile("layer|_types$|pattern")  # names of lists with an entry for each layer
ARCHITECTURES = Path(__file__).parent / "architectures"
STORED_ROWS = "stored_vocab_size"  # configuration field: rows of the stored embeddings, before they are resized
AUTO_CLASSES = {  # AutoModelFor...: what transformers calls the task in the name of its table of models
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "SequenceClassification": "SEQUENCE_CLASSIFICATION",
    "TokenClassification": "TOKEN_CLASSIFICATION",
    "MultipleChoice": "MULTIPLE_CHOICE",
}
# What a config.json may name: other names are repositories of the hub, whose code transformers would run.
KERNEL_NAMES = {None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}


@cache
def known_architectures() -> dict[str, dict[str, Any]]:
    """Return {name or alias, lower case: fields of its configuration} of the architectures in this tree. A file has
    one architecture, or under `_sizes` several by name, with what differs from its other fields."""
    known_fields: dict[str, dict[str, Any]] = {}
    for path in sorted(ARCHITECTURES.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for name, of_size in content.get("_sizes", {path.stem: {}}).items():
            fields = {**content, **of_size}
            aliases = fields.get("_aliases", [])
            fields = {key: value for key, value in fields.items() if key[0] != "_"}
            known_fields |= {each.lower(): fields for each in (name, *aliases)}
    return known_fields


def load_configuration(recipe: ModelOptions, auto_class: Any = None) -> "PretrainedConfig":
    """Return the transformers configuration that the recipe names, with its overrides: from a folder with a
    config.json, else from the architectures in this tree (`config_name` only), else from the hub. `auto_class`: the
    class that the task needs; None: any. Raises UserError where there is none, or an override names no field of it."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    from zerofit.model.attention import check_attention_installed  # imports torch, which tokenizers do not need

    check_attention_installed(recipe.attn_implementation)
    if recipe.model_type and not recipe.config_name:
        if recipe.model_type not in CONFIG_MAPPING:
            close = nearest(recipe.model_type, CONFIG_MAPPING.keys())
            remedy = f"Did you mean {close}? Else: " if close else ""
            unknown = f"model_type = {recipe.model_type!r}: transformers {__version__} does not know it"
            raise UserError(f"{unknown}. {remedy}pip install -U transformers")
        config = CONFIG_MAPPING[recipe.model_type]()
    else:
        option = "model_name_or_path" if recipe.model_name_or_path else "config_name"
        name = getattr(recipe, option)
        published = known_architectures().get(name.lower()) if option == "config_name" else None
        if published and not (Path(name) / "config.json").is_file():
            config = AutoConfig.for_model(**copy.deepcopy(published))
        else:
            config = read_config(option, name, recipe.trust_remote_code)
    if not recipe.model_name_or_path and hasattr(config, "quantization_config"):
        del config.quantization_config  # it is of weights that are not read
    apply_overrides(config, recipe.config_overrides)
    if auto_class is not None:
        check_task(recipe, config, auto_class)
        if getattr(config, "output_router_logits", False) and not family_of(config).has_experts:
            raise UserError("output_router_logits = true: set --config_overrides output_router_logits=false")
    padding, rows = (getattr(config, name, None) for name in ("pad_token_id", "vocab_size"))
    if padding is not None and rows and not 0 <= padding < rows:
        config.pad_token_id = None  # -1 says so, too; torch would refuse 32000 of 32000 rows
    config.use_cache = False
    return config


def check_task(recipe: ModelOptions, config: "PretrainedConfig", auto_class: Any) -> None:
    """Raises UserError if transformers has no model of this architecture for the task."""
    if not has_model(auto_class, config):
        option = next(name for name in ("model_name_or_path", "config_name", "model_type") if getattr(recipe, name))
        raise UserError(
            f"{option} = {getattr(recipe, option)!r}: a {config.model_type} has no {auto_class.__name__}. For text "
            "use train/clm.py, for classes train/cls.py, for encoder-decoders train/seq2seq.py"
        )


def has_model(auto_class: Any, config: "PretrainedConfig") -> bool:
    """Return whether transformers has a model of this architecture for the task, as far as is known: one with its own
    code may be one."""
    import transformers

    task = AUTO_CLASSES.get(auto_class.__name__.removeprefix("AutoModelFor"))
    is_known = task is None or type(config) in getattr(transformers, f"MODEL_FOR_{task}_MAPPING")
    return is_known or hasattr(config, "auto_map")


def from_hub_or_folder(option: str, name: str, load: Callable[..., Any], **kwargs: Any) -> Any:
    """Call a `from_pretrained`, and replace its many errors by a UserError of one sentence each."""
    if is_missing_folder(name):
        raise UserError(f"{option} = {name!r}: there is no such folder")
    if why := why_no_model(name):
        raise UserError(f"{option} = {name!r}: {why}")
    if not Path(name).is_dir():
        work_offline_without_network()
    try:
        loaded = load(name, **kwargs)
    except ImportError as error:
        raise UserError(f"{option} = {name!r} {missing_package(error)}") from None
    except (*FILE_ERRORS, StrictDataclassError, SafetensorError, pickle.UnpicklingError) as error:
        first = first_line(error)
        if pointer := next((file.name for file in Path(name).glob("*") if is_pointer(file)), None):
            raise UserError(f"{option} = {name!r}: {pointer} {LFS_POINTER}") from None
        if isinstance(error, pickle.UnpicklingError):
            raise UserError(f"{option} = {name!r}: a file holds more than tensors. Name safetensors") from None
        if "trust_remote_code" in str(error):
            raise UserError(f"{option} = {name!r} has its own code: read it, add --trust_remote_code") from None
        if not isinstance(error, (OSError, ValueError, RecursionError)):
            first = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if Path(name).is_dir() or not isinstance(error, (OSError, ValueError)):
            noun = "the folder" if Path(name).is_dir() else "it"
            raise UserError(f"{option} = {name!r}: {noun} cannot be loaded: {first}") from None
        reason = "no connection" if "connect to" in first else first.rstrip(".")
        remedy = "name a local folder, or run once where the hub can be reached"
        if option == "config_name":
            remedy += ", or name an architecture that needs no network, such as llama-3.1-8b"
        raise UserError(f"{option} = {name!r} is neither a folder nor on the hub ({reason}); {remedy}") from None
    for part in (loaded, *(getattr(loaded, name, None) for name in getattr(loaded, "sub_configs", ()))):
        if attention_of(part) not in KERNEL_NAMES:  # the code of a repository
            raise UserError(f"{option} = {name!r}: remove the code {attention_of(part)!r} from its config.json")
    return loaded


def read_config(
    option: str, name: str, trust_remote_code: bool = False, revision: str | None = None
) -> "PretrainedConfig":
    """Return the transformers configuration of a stored model."""
    from transformers import AutoConfig

    folder = Path(name)
    load = AutoConfig.from_pretrained
    if folder.is_dir() and not (folder / "config.json").is_file() and not why_no_model(name):
        within = [file for kind in ("", "adapter_") for file in folder.glob(f"*/{kind}config.json")]
        latest = f". Name {max(within, key=os.path.getmtime).parent}" if within else ""
        raise UserError(f"{option} = {name!r} has no config.json, and is not a model's folder{latest}")
    return from_hub_or_folder(option, name, load, trust_remote_code=trust_remote_code, revision=revision)


def missing_package(error: ImportError) -> str:
    """Return the end of a sentence about an ImportError of a `from_pretrained`: its reason, and what to install."""
    reason = " ".join(str(error).split())[:300].rstrip(".")
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    remedy = f": pip install {package}" if package and "pip install" not in reason else ""
    return f"needs what is not installed here: {reason}{remedy}"


def check_quantiser(option: str, name: str, config: Any, on_gpu: bool = False) -> None:
    """Raises UserError where quantised weights cannot be read here: an unknown method, a package that is missing, or
    another device. `on_gpu`: they are trained on, which is done on a GPU alone."""
    import torch
    from transformers.quantizers import AutoHfQuantizer

    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    beginning = f"{option} = {name!r} is quantised (quant_method {getattr(method, 'value', method)})"
    if on_gpu and not torch.accelerator.is_available():
        raise UserError(f"{beginning}, which needs a GPU. Name weights that are not quantised")
    try:
        quantiser = AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True)
        quantiser.validate_environment(device_map=None)
    except (*FILE_ERRORS, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"{beginning}: {reason}. Name weights that are not quantised") from None


@cache
def work_offline_without_network() -> None:
    """Set the hub's libraries offline if the hub's host has no address. Else they request each file six times and wait
    23 s in all; huggingface_hub 1.x has no setting for that."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    for attempt in range(3):
        time.sleep(attempt)  # a name server may be slow at first
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
            return
        except OSError:
            continue
    work_offline()
    UNTIL_THE_RUN_ENDS.callback(work_offline_without_network.cache_clear)


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Parse `n_layer=4,resid_pdrop=0.0` to a dict; values that are no JSON are texts."""
    overrides: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        name, value = (word.strip() for word in part.split("=", 1))
        overrides[name] = None if value == "None" else value
        with suppress(json.JSONDecodeError):
            overrides[name] = json.loads(value.lower() if value in ("True", "False") else value)
    return overrides


def apply_overrides(config: "PretrainedConfig", text: str | None) -> None:
    """Apply `config_overrides`, and update the fields that the configuration's class derives from the changed ones,
    such as layer_types from num_hidden_layers. Raises UserError where a name is unknown to the configuration, or a
    value has the wrong type."""
    overrides = parse_overrides(text)
    if not overrides:
        return
    problems = []
    head_size = _head_size(config)
    before = config.to_dict()
    for name, value in overrides.items():
        rope = getattr(config, "rope_parameters", None) or {}
        in_rope = name in rope and not hasattr(config, name)
        if not in_rope and not hasattr(config, name):
            close = nearest(name, [*config.to_dict(), *config.attribute_map])
            remedy = f"Did you mean {close}?" if close else "Its names: " + ", ".join(sorted(config.to_dict()))
            problems.append(f"config_overrides: {config.model_type} has no {name}. {remedy}")
            continue
        current = rope[name] if in_rope else getattr(config, name)
        if (in_rope or value is not None) and isinstance(current, (bool, int, float)) and not _is_like(value, current):
            problems.append(f"config_overrides: {name} = {value!r}; expected as in {name}={current}")
            continue
        if in_rope:
            config.rope_parameters = {**rope, name: value}
            continue
        try:
            setattr(config, name, value)
        except StrictDataclassError as error:
            why = str(error).strip().splitlines()[-1].strip()
            problems.append(f"config_overrides: {name} = {value!r}: {why.removeprefix('TypeError: ')}")
    if problems:
        raise UserError(problems)
    _update_derived(config, before, {config.attribute_map.get(name, name) for name in overrides})
    for name in ("head_dim", "attention_head_size"):  # a constant in some configurations
        if head_size and head_size == getattr(config, name, None) and name not in overrides:
            setattr(config, name, _head_size(config))
    try:
        type(config).from_dict(config.to_dict())
    except (*FILE_ERRORS, StrictDataclassError) as error:  # transformers would refuse to store the trained model
        raise UserError(f"config_overrides = {text!r}: {str(error).strip().splitlines()[-1].strip()}") from None


def _update_derived(config: "PretrainedConfig", before: dict[str, Any], changed: set[str]) -> None:
    """Update the fields that the configuration derives from others. `changed`: the fields that the overrides set."""
    from transformers.utils import logging as of_transformers

    kind = type(config)
    layers = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")

    def gives_all(fields: dict[str, Any]) -> bool:
        try:
            return bool(kind.from_dict(fields).to_dict() == before)
        except (*FILE_ERRORS, StrictDataclassError):
            return False

    verbosity = of_transformers.get_verbosity()
    of_transformers.set_verbosity_error()  # it warns of what these trials lack
    try:
        without_one = {name: {key: value for key, value in before.items() if key != name} for name in before}
        necessary = {name: before[name] for name in before if not gives_all(without_one[name])}
        if not gives_all(necessary):
            return
    finally:
        of_transformers.set_verbosity(verbosity)
    for name, value in necessary.items():
        is_by_layer = isinstance(value, list) and len(value) == before.get(layers) and PER_LAYER_FIELD.search(name)
        if is_by_layer and name not in changed:
            necessary[name] = value[: getattr(config, layers)]
    try:
        derived = kind.from_dict({**necessary, **{name: getattr(config, name) for name in changed if name in before}})
    except (*FILE_ERRORS, StrictDataclassError):  # contradictions are reported where all values are set
        return
    for name, value in derived.to_dict().items():
        if name in before and name not in changed and not isinstance(value, dict) and value != before[name]:
            setattr(config, name, value)


def _head_size(config: "PretrainedConfig") -> int | None:
    hidden = getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    return hidden // heads if hidden and heads else None


def _is_like(value: Any, current: bool | int | float) -> bool:
    if isinstance(current, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(current, bool)
    return isinstance(value, int) or (isinstance(current, float) and isinstance(value, float))


def usable_positions(config: "PretrainedConfig") -> int | None:
    """Return the longest row, in tokens, that the model has positions for; None: only memory limits it."""
    positions = family_of(config).usable_positions(config)
    return positions if positions and positions > 0 else None  # an XLNet's are -1


def has_head(config: Any, head: str) -> bool:
    """Return whether the weights have this head: SequenceClassification, TokenClassification, MultipleChoice."""
    return any(head in name for name in config.architectures or ())
