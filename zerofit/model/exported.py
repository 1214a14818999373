"""An exported folder, read back and compared with the model that training began from.

What loads the base has to load the export too, so differences are told: names, shapes and types of weights, tied
weights, the tokenizer's files, the chat template, generation settings. Of weights, only the files' headers are read.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zerofit.model.folders import has_tokenizer, is_adapter, model_folder, read_json
from zerofit.recipe.errors import UserError

HEADS = ("lm_head.weight", "embed_out.weight")  # which may be tied to the embeddings
# In old files; transformers computes them.
BUFFERS = re.compile(r"\.(inv_freq|masked_bias|position_ids)$|\.(attn|attention)\.bias$|^final_logits_bias$")
LAYER = re.compile(r"((?:\w+\.)*?)\w+\.\d+\.")
NOT_SETTINGS = ("transformers_version", "_from_model_config", "use_cache")  # in generation_config.json
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What transformers 4 cannot read in tokenizer_config.json: (entry, whether a value is such a one, an issue about it).
NEW_IN_TOKENIZERS = (
    ("tokenizer_class", lambda value: value == "TokenizersBackend", "LlamaFactory#10310"),
    ("extra_special_tokens", lambda value: isinstance(value, list), "llama.cpp#24460"),
)
VLLM_RANK = 16  # vLLM's default of --max-lora-rank
MERGED = "`zerofit merge` makes a model that it loads"


@dataclass(frozen=True)
class StoredModel:
    """A folder with a model or an adapter; None: there is none. What is not in it is empty."""

    folder: Path | None

    def has(self, name: str) -> bool:
        return self.folder is not None and (self.folder / name).is_file()

    def json(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name) if self.has(name) else {}

    @cached_property
    def weights(self) -> dict[str, dict[str, Any]]:
        """{name: {"dtype": ..., "shape": ...}}, of the files that transformers and peft look for.

        Raises:
            RuntimeError: the files do not hold the weights that the index names.
        """
        index = self.json("model.safetensors.index.json").get("weight_map", {})
        names = set(index.values()) or {"model.safetensors", "adapter_model.safetensors"}
        files = [self.folder / name for name in sorted(names) if self.has(name)]
        found = {name: about for file in files for name, about in _header(file).items()}
        if index and found.keys() != index.keys():
            wrong = sorted(found.keys() ^ index.keys())
            raise RuntimeError(f"{self.folder}: the index does not name the weights in the files: {_some(wrong)}")
        return found

    @property
    def may_be_causal(self) -> bool:
        """Whether it continues texts, as a language model or an adapter of one, by what its configuration says."""
        of_adapter = self.json("adapter_config.json").get("task_type")
        named = [of_adapter] if of_adapter else self.config.get("architectures") or ()
        kinds = [str(name).lower().replace("_", "") for name in named]
        return not kinds or any("causallm" in kind or "lmhead" in kind for kind in kinds)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, with the entries of the text model where it is one of several."""
        config = self.json("config.json")
        return {**(config.get("text_config") or {}), **config}

    @property
    def dtype(self) -> str:
        """Of most matrices."""
        kinds = Counter(about["dtype"] for about in self.weights.values() if len(about["shape"]) > 1)
        most = max(kinds, key=kinds.__getitem__, default="")
        return DTYPES.get(most, most)

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        return self.json("tokenizer_config.json")

    @property
    def chat_template(self) -> Any:
        if self.has("chat_template.jinja"):
            return (self.folder / "chat_template.jinja").read_text(encoding="utf-8")
        return self.tokenizer.get("chat_template")


def review_export(folder: Path, base: str | None) -> list[str]:
    """Read the export back. Returns a line for each difference, and a first line that says what was read.

    Args:
        base: the folder or hub name of the model that training began from; None: there is none.

    Raises:
        RuntimeError: weights are missing, and nothing can load the folder.
    """
    ours, theirs = StoredModel(folder), _base(base)
    if not ours.weights:
        raise RuntimeError(f"{folder} holds no weights")
    if is_adapter(str(folder)):
        found = [*_adapter(ours), *_tokenizer(ours, theirs)]
    else:
        found = [*_names(ours, theirs), *_types(ours, theirs), *_config(ours, theirs), *_tokenizer(ours, theirs)]
        found += _generation(ours, theirs)
    if not ours.may_be_causal:  # what serves language models is no matter of a classifier or a translation model
        found = [line for line in found if not re.search(r"vLLM|llama\.cpp", line)]
    compared = f"compared with {base}" if theirs.weights else "no safetensors of a base to compare them with"
    return [f"{len(ours.weights):,} weights, {ours.dtype}, read back, {compared}", *found]


def _base(name: str | None) -> StoredModel:
    """What of it cannot be read is not compared: a trained model must not be lost for it."""
    found = StoredModel(_local(name))
    try:
        found.weights, found.config, found.tokenizer, found.chat_template, found.json("generation_config.json")
    except (OSError, ValueError, RuntimeError, UserError):
        return StoredModel(None)
    return found


def _local(base: str | None) -> Path | None:
    """The folder of the base, which is in the hub's cache if it is not local."""
    name = model_folder(base or "")
    if not base or Path(name).is_dir():
        return Path(name) if base else None
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """Of a .safetensors: its first 8 bytes are the length of the JSON behind them."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return header


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _prefix(names: set[str]) -> list[str]:
    """The parts in front of most layers: of model.layers.0.mlp.weight it is model."""
    found = Counter(match[1] for name in names if (match := LAYER.match(name)))
    return found.most_common(1)[0][0].split(".")[:-1] if found else []


def _renamed(missing: set[str], new: set[str]) -> dict[str, str]:
    """{missing name: new name} of those that differ in the prefix of layers."""
    old, now = _prefix(missing), _prefix(new)
    while old and now and old[-1] == now[-1]:
        old, now = old[:-1], now[:-1]
    before, after = (".".join([*parts, ""]) for parts in (old, now))
    pairs = {name: after + name[len(before) :] for name in missing if name.startswith(before)}
    return {name: other for name, other in pairs.items() if other in new}


def _names(ours: StoredModel, theirs: StoredModel) -> list[str]:
    lines = []
    head = next((name for name in HEADS if name in ours.weights or name in theirs.weights), "")
    tied = ours.config.get("tie_word_embeddings")
    if head in ours.weights and tied:
        lines.append(f"{head} is stored, and config.json ties it to the embeddings: it is not read")
    if head in theirs.weights and head not in ours.weights and tied is False:
        lines.append(f"{head} is missing, and config.json does not tie it to the embeddings")
    if not theirs.weights:
        return lines
    missing = {name for name in theirs.weights.keys() - ours.weights if name != head and not BUFFERS.search(name)}
    new = ours.weights.keys() - theirs.weights - {head}
    renamed = _renamed(missing, new)
    if renamed:
        name, other = min(renamed.items())
        lines.append(
            f"{len(renamed)} names differ from the base's ({name}: {other}): vLLM may skip them (ms-swift#9172)"
        )
    without, more = missing - renamed.keys(), new - set(renamed.values())
    lines += [f"weights of the base that are not here: {_some(without)}"] if without else []
    return lines + ([f"weights that the base has not: {_some(more)}"] if more else [])


def _types(ours: StoredModel, theirs: StoredModel) -> list[str]:
    lines = []
    common = ours.weights.keys() & theirs.weights
    shapes = [name for name in common if ours.weights[name]["shape"] != theirs.weights[name]["shape"]]
    if shapes:
        lines.append(f"weights of another shape than in the base: {_some(shapes)}")
    if theirs.dtype and ours.dtype != theirs.dtype:
        rounded = "; vLLM rounds them to 16 bits without --dtype float32" if ours.dtype == "float32" else ""
        lines.append(f"weights are {ours.dtype}, and the base's {theirs.dtype}{rounded}")
    stated = ours.config.get("dtype") or ours.config.get("torch_dtype")
    if stated and stated != ours.dtype:
        lines.append(f"config.json says {stated}, and the weights are {ours.dtype}")
    return lines


def _config(ours: StoredModel, theirs: StoredModel) -> list[str]:
    """What the base says in the form of transformers 4, and the export in that of 5."""
    rope, old = ours.config.get("rope_parameters") or {}, theirs.config.get("rope_theta")
    if old and "rope_theta" not in ours.config and old != 10_000 and rope:
        return [
            f"rope_theta = {old:g} is in config.json's rope_parameters, where transformers 4 does not look: vLLM with "
            "it computes with 10000 in silence (vllm#42624)"
        ]
    return []


def _tokenizer(ours: StoredModel, theirs: StoredModel) -> list[str]:
    lines = []
    if not has_tokenizer(ours.folder or Path()):
        return ["there is no tokenizer"]
    if theirs.has("tokenizer.model") and not ours.has("tokenizer.model"):
        lines.append("the base's tokenizer.model is not here: llama.cpp's converter may need it (llama.cpp#19152)")
    for name, is_new, issue in NEW_IN_TOKENIZERS if theirs.tokenizer else ():
        if is_new(ours.tokenizer.get(name)) and not is_new(theirs.tokenizer.get(name)):
            lines.append(f"{name} is in the form of transformers 5, which vLLM and llama.cpp then need ({issue})")
    if theirs.chat_template and not ours.chat_template:
        lines.append("the base has a chat template, and this tokenizer has none")
    elif theirs.chat_template and theirs.chat_template != ours.chat_template:
        lines.append("the chat template is not the base's")
    return lines


def _generation(ours: StoredModel, theirs: StoredModel) -> list[str]:
    settings, of_base = ours.json("generation_config.json"), theirs.json("generation_config.json")
    changed = [
        f"{name} {of_base.get(name)} -> {settings.get(name)}"
        for name in sorted(settings.keys() | of_base)
        if name not in NOT_SETTINGS and settings.get(name) != of_base.get(name)
    ]
    return [f"generation settings that are not the base's: {', '.join(changed)}"] if of_base and changed else []


def _adapter(ours: StoredModel) -> list[str]:
    """What vLLM (vllm/lora/peft_helper.py) and llama.cpp (convert_lora_to_gguf.py) do not take."""
    settings, lines = ours.json("adapter_config.json"), []
    refused = [f"{name} = {settings[name]}" for name in ("use_dora", "modules_to_save") if settings.get(name)]
    if refused:
        lines.append(f"vLLM refuses adapters with {' and '.join(refused)}: {MERGED}")
    if settings.get("target_parameters"):
        lines.append(f"vLLM drops the adapters on some models' experts in silence (vllm#41384, #41754): {MERGED}")
    if settings.get("r", 0) > VLLM_RANK:
        lines.append(f"vLLM needs --max-lora-rank {settings['r']}")
    others = [name for name in ours.weights if not re.search(r"\.lora_(embedding_)?[AB]\b", name)]
    if others:
        lines.append(f"llama.cpp's converter refuses {_some(others)}: {MERGED}")
    return lines
