"""The weights of a transformers folder: read from safetensors files one at a time, and written file by file."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from zerofit.model.folders import read_json
from zerofit.recipe.errors import UserError, first_line

INDEX = "model.safetensors.index.json"
RELEASE_BYTES = 2**29  # mapped files are closed when this much of them was read: their pages count as memory taken


class HfFolder:
    """The safetensors weights of a folder, each read when it is needed.

    Raises:
        UserError: there are no weights, or they are broken.
    """

    def __init__(self, path: Path, option: str = "input"):
        self.path, self.says = path, f"{option} = {str(path)!r}"
        self._open: dict[str, Any] = {}
        self._read_bytes = 0
        self.files = self._find()

    def _find(self) -> dict[str, str]:
        """{name of a weight: file}."""
        if (self.path / INDEX).is_file():
            return read_json(self.path / INDEX).get("weight_map", {})
        if not (self.path / "model.safetensors").is_file():
            raise UserError(f"{self.says} has no model.safetensors. Name a model's folder; of a LoRA, merge it first")
        return dict.fromkeys(self._file("model.safetensors").keys(), "model.safetensors")

    def _file(self, name: str):
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, "pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.path / name} cannot be read: {first_line(error)}. Copy it again") from None
        return self._open[name]

    def release(self) -> None:
        """Close the files."""
        self._open.clear()
        self._read_bytes = 0

    def read(self, name: str):
        if self._read_bytes > RELEASE_BYTES:
            self.release()
        tensor = self._file(self.files[name]).get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self.files[name]).get_slice(name).get_shape())

    def wrong_shapes(self, config) -> list[str]:
        """How the weights differ from those of transformers' model of the configuration; empty if they do not."""
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        stored = {name for name in self.files if not name.endswith("rotary_emb.inv_freq")}
        if config.tie_word_embeddings:
            stored -= {"lm_head.weight"}
        return (
            [f"lacks {name}" for name in sorted(expected.keys() - stored)]
            + [f"has {name}, which a Llama does not have" for name in sorted(stored - expected.keys())]
            + [
                f"has {name} of {self.shape(name)}, and {expected[name]} was expected"
                for name in sorted(stored & expected.keys())
                if self.shape(name) != expected[name]
            ]
        )


class ShardWriter:
    """Writes weights to safetensors files of a limited size. The weights of one file are in memory.

    Args:
        limit: bytes of a file, which only a single weight may exceed.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self.waiting: dict[str, Any] = {}
        self.waiting_bytes = self.total_bytes = 0
        self.written: list[list[str]] = []

    def add(self, name: str, tensor) -> bool:
        """Add a weight. Returns whether a file was written, so that the memory of its sources can be released."""
        full = bool(self.waiting) and self.waiting_bytes + tensor.nbytes > self.limit
        if full:
            self._flush()
        self.waiting[name] = tensor.clone().contiguous()  # of a mapped file, which may be closed
        self.waiting_bytes += tensor.nbytes
        return full

    def _flush(self) -> None:
        save_file(self.waiting, self.folder / f"{len(self.written)}.safetensors", metadata={"format": "pt"})
        self.written.append(list(self.waiting))
        self.total_bytes += self.waiting_bytes
        self.waiting, self.waiting_bytes = {}, 0

    def finish(self) -> int:
        """Write the rest, give the files their names, and write the index. Returns the number of files."""
        self._flush()
        number = len(self.written)
        names = [f"model-{index + 1:05}-of-{number:05}.safetensors" for index in range(number)]
        if number == 1:
            names = ["model.safetensors"]
        for index, name in enumerate(names):
            (self.folder / f"{index}.safetensors").rename(self.folder / name)
        if number > 1:
            places = {weight: name for name, weights in zip(names, self.written) for weight in weights}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return number
