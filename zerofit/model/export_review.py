"""An exported folder, loaded back without memory for its weights: does it hold what its own configuration says?"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from zerofit.model.folders import has_tokenizer, is_adapter

LORA = re.compile(r"\.lora_(embedding_)?[AB]\b")
MERGED = "`zerofit merge` makes a model that it loads"


def review_export(folder: Path, model_class: Any) -> list[str]:
    """Read an export back. Returns a line that says what was read, and one for each thing that others stumble over.
    `model_class`: of the model that was trained, one of transformers. Raises RuntimeError where weights are
    missing."""
    adapter = is_adapter(str(folder))
    stored = stored_weights(folder, "adapter_model" if adapter else "model")
    if not stored:
        raise RuntimeError(f"{folder} holds no weights")
    dtypes = Counter(str(dtype) for shape, dtype in stored.values() if len(shape) > 1)
    dtype = dtypes.most_common(1)[0][0] if dtypes else "no matrix"
    lines = [f"{len(stored):,} weights, {dtype}, read back"]
    lines += _adapter(folder, stored) if adapter else _model(folder, model_class, stored)
    return lines if has_tokenizer(folder) else [*lines, "there is no tokenizer"]


def stored_weights(folder: Path, name: str = "model") -> dict[str, tuple[list[int], str]]:
    """{name: (shape, dtype)} of the weights in the files that transformers and peft look for, from their headers."""
    index = folder / f"{name}.safetensors.index.json"
    files = {f"{name}.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
    found: dict[str, tuple[list[int], str]] = {}
    for file in sorted(folder / each for each in files if (folder / each).is_file()):
        with safe_open(file, "pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            found |= {key: (each.get_shape(), each.get_dtype()) for key, each in slices.items()}
    return found


def _model(folder: Path, model_class: Any, stored: Iterable[str]) -> list[str]:
    model, info = model_class.from_pretrained(
        folder, device_map="meta", dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True
    )
    if wrong := {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}:
        raise RuntimeError(f"{folder} lacks weights of its model, or has them in another shape: {_some(wrong)}")
    lines = [f"weights that its model has not: {_some(extra)}"] if (extra := info["unexpected_keys"]) else []
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    if names and f"{names[0]}.weight" in stored and model.config.get_text_config().tie_word_embeddings:
        lines.append(f"{names[0]}.weight is stored, and config.json ties it to the embeddings: it may not be read")
    return lines


def _adapter(folder: Path, stored: Iterable[str]) -> list[str]:
    lines = []
    if json.loads((folder / "adapter_config.json").read_text()).get("target_parameters"):
        lines.append(f"vLLM drops the adapters on some models' experts in silence (vllm#41384, #41754): {MERGED}")
    if others := [name for name in stored if not LORA.search(name)]:
        lines.append(f"vLLM and llama.cpp take pairs of A and B only, not {_some(others)}: {MERGED}")
    return lines


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
