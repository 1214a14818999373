"""The exported model: a folder that transformers loads, loaded back and compared."""

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from zerofit.compat.transformers import weights_alone
from zerofit.model.configuration import has_tokenizer, is_adapter, name_some, read_json, usable_positions
from zerofit.model.families import family_of

LORA_MATRIX = re.compile(r"\.lora_(embedding_)?[AB]\b")
MERGED = "`zerofit merge` makes a model that it loads"


def review_export(folder: Path, model_class: Any) -> list[str]:
    """Read an export back. Returns a line about what was read, and one for each problem that other programs have with
    it. `model_class`: the class of the trained model in transformers. Raises RuntimeError: weights are missing."""
    adapter = is_adapter(str(folder))
    stored = read_weight_headers(folder, "adapter_model" if adapter else "model")
    if not stored:
        raise RuntimeError(f"{folder} holds no weights")
    dtypes = Counter(str(dtype) for shape, dtype in stored.values() if len(shape) > 1)
    dtype = dtypes.most_common(1)[0][0] if dtypes else "no matrix"
    lines = [f"{len(stored):,} weights, {dtype}, read back"]
    if adapter:
        if read_json(folder / "adapter_config.json").get("target_parameters"):
            lines.append(f"vLLM drops the adapters on some models' experts in silence (vllm#41384, #41754): {MERGED}")
        if other_weights := sorted(name for name in stored if not LORA_MATRIX.search(name)):
            lines.append(f"vLLM and llama.cpp take pairs of A and B only, not {name_some(other_weights)}: {MERGED}")
    else:
        model, info = model_class.from_pretrained(
            folder, device_map="meta", dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
        )
        if wrong := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
            raise RuntimeError(
                f"{folder} lacks weights of its model, or has them in another shape: {name_some(wrong)}"
            )
        if extra := sorted(info["unexpected_keys"]):
            lines.append(f"weights that its model does not have: {name_some(extra)}")
        head = model.get_output_embeddings()
        names = [name for name, module in model.named_modules() if module is head]
        if names and f"{names[0]}.weight" in stored and model.config.get_text_config().tie_word_embeddings:
            lines.append(f"{names[0]}.weight is stored, and config.json ties it to the embeddings: it may not be read")
    return lines if has_tokenizer(folder) else [*lines, "there is no tokenizer"]


def read_weight_headers(folder: Path, name: str = "model") -> dict[str, tuple[list[int], str]]:
    """Return {name: (shape, dtype)} of the weights in the files that transformers and peft look for."""
    index = folder / f"{name}.safetensors.index.json"
    files = {f"{name}.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
    headers: dict[str, tuple[list[int], str]] = {}
    for file in sorted(folder / each for each in files if (folder / each).is_file()):
        with safe_open(file, "pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            headers |= {key: (each.get_shape(), each.get_dtype()) for key, each in slices.items()}
    return headers


MAX_FILE_BYTES = 5 * 10**9  # about: of a model that is written in several files, this is in memory at once

NamedWeights = Iterable[tuple[str, torch.Tensor]]  # (name, full weight on the CPU)


def export_model(
    model: Any, weights: NamedWeights, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Exception]:
    """Write weights (safetensors) and, once they are on the disk, configuration, code and tokenizer. Returns what of
    these could not be written: {file: why}. None of them costs the weights. `model`: the unwrapped transformers model;
    only its configuration and its class are used. `weights`: one after another; what is written is not kept. Raises
    RuntimeError where a weight is empty or is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    written = copy.copy(model)  # the model may still be training, and depends on its configuration
    for name in ("config", "generation_config"):
        if getattr(model, name, None) is not None:
            setattr(written, name, copy.deepcopy(getattr(model, name)))
            getattr(written, name).use_cache = True
    _write_weights(written, weights, folder)
    files = {"config.json": lambda: written.config.save_pretrained(folder)}
    if written.is_remote_code():
        files = {"the model's code": lambda: custom_object_save(written, folder, config=written.config), **files}
    if written.can_generate():
        files["generation_config.json"] = lambda: save_generation_settings(written, folder)
    # Without a limit of its own the tokenizer gets the model's: with none truncation=True would cut nothing.
    if (positions := usable_positions(model.config)) and tokenizer.model_max_length > 10**9:
        tokenizer.model_max_length = positions
    files["the tokenizer"] = lambda: tokenizer.save_pretrained(folder)
    files["tokenizer.model"] = lambda: _copy_sentencepiece_model(Path(tokenizer.name_or_path), folder)
    return write_other_files(files)


def write_other_files(files: dict[str, Callable[[], object]]) -> dict[str, Exception]:
    """Write the files next to the weights; one that fails does not stop the others. Returns {file: why it failed}."""
    failed = {}
    for name, write in files.items():
        try:
            write()
        except Exception as error:
            failed[name] = error
    return failed


def _write_weights(model: Any, weights: NamedWeights, folder: Path) -> None:
    """Write the weights in one file, or in several if the family's weights have the same names on the disk as in
    memory, except for renaming. `model.config` gets what transformers adds when it saves a model."""
    expected = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - expected
    in_parts = family_of(model.config).stage_plan is not None
    rows = model.config.__dict__.pop("unpadded_vocab_size", None)
    padded: set[int] = set()
    if rows is not None:  # a padded vocabulary's extra rows are not written
        model.config.vocab_size = rows
        over_tokens = (model.get_input_embeddings(), model.get_output_embeddings())
        padded = {id(parameter) for module in over_tokens for parameter in module.parameters(recurse=False)}
    padded_names = {name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in padded}
    part: dict[str, torch.Tensor] = {}
    files: list[Path] = []
    size = 0
    for name, tensor in weights:
        if name in tied:  # each weight once
            continue
        if tensor.numel() == 0:
            raise RuntimeError(f"the gathered weights are incomplete: {name} is empty")
        if in_parts and part and size + tensor.nbytes > MAX_FILE_BYTES:
            _save_weights_alone(model, part, folder)
            files.append((folder / "model.safetensors").rename(folder / f"part_{len(files)}.safetensors"))
            part = {}
            size = 0
        part[name] = tensor[:rows].contiguous() if name in padded_names else tensor
        expected.discard(name)
        size += part[name].nbytes
    if expected:
        raise RuntimeError(f"the gathered weights are incomplete: missing {sorted(expected)[:3]}")
    _save_weights_alone(model, part, folder)
    if not files:
        return
    files.append(folder / "model.safetensors")
    file_of_weight: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, 1):  # the names that transformers looks for
        renamed = file.rename(folder / f"model-{number:05}-of-{len(files):05}.safetensors")
        with safe_open(renamed, "pt") as opened:
            file_of_weight |= dict.fromkeys(opened.keys(), renamed.name)
        size += renamed.stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": file_of_weight}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _save_weights_alone(written: Any, part: dict[str, torch.Tensor], folder: Path) -> None:
    """Let transformers write weights, under their names on the disk, without the other files of a model: it would
    write those first, and an error there would cost the weights."""
    alone = weights_alone(written)
    alone.save_pretrained(folder, state_dict=part)
    written.config.dtype = alone.config.dtype
    written.config.architectures = alone.config.architectures


def save_generation_settings(model: Any, folder: Path) -> None:
    """Write generation_config.json without the settings that transformers refuses to save."""
    settings, _ = split_valid_settings(model.generation_config.to_diff_dict())
    settings.save_pretrained(folder)


def read_generation_settings(name: str) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Return (a stored model's generation settings, None without a file; {name: value} of the settings that are
    dropped because transformers refuses to read the file with them)."""
    try:
        return GenerationConfig.from_pretrained(name), {}
    except OSError:  # there is none
        return None, {}
    except Exception:  # ValueError, TypeError, ...: as a value is checked
        stored = json.loads(Path(cached_file(name, GENERATION_CONFIG_NAME) or "").read_text(encoding="utf-8"))
        return split_valid_settings(stored) if isinstance(stored, dict) else (GenerationConfig(), {"the file": stored})


def split_valid_settings(stored: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return (the generation settings that are valid together, the others, such as a temperature without sampling,
    which published models have). Some settings need another one, so they are tried again."""
    valid: dict[str, Any] = {}
    invalid = dict(stored)
    num_before = len(stored) + 1
    while len(invalid) < num_before:
        num_before = len(invalid)
        for name, value in list(invalid.items()):
            with suppress(Exception):  # ValueError, TypeError, ...
                GenerationConfig(**valid, **{name: value}).validate(strict=True)
                valid[name] = invalid.pop(name)
    return GenerationConfig(**valid), invalid


def _copy_sentencepiece_model(source: Path, folder: Path) -> None:
    """Copy the tokenizer.model that the tokenizer was converted from: it cannot be converted back, and other programs
    (llama.cpp, Meta's code) read it."""
    for name in ("tokenizer.model", "original/tokenizer.model"):
        if (source / name).is_file() and not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def write_model_card(folder: Path, card: str) -> None:
    """Write README.md, and give the weights its permissions: safetensors lets only the owner read them."""
    readme = folder / "README.md"
    readme.write_text(card, encoding="utf-8")
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(readme, weights)
