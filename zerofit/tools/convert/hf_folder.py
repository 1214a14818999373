"""The weights of a transformers folder, read from its safetensors files one at a time."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import LlamaForCausalLM

from zerofit.model.folders import read_json
from zerofit.recipe.errors import UserError, first_line

INDEX = "model.safetensors.index.json"


class HfFolder:
    """The safetensors weights of a folder, each read when it is needed.

    Raises:
        UserError: there are no weights, or they are broken.
    """

    def __init__(self, path: Path, option: str = "input"):
        self.path, self.says = path, f"{option} = {str(path)!r}"
        self._open: dict[str, Any] = {}
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

    def read(self, name: str):
        return self._file(self.files[name]).get_tensor(name)

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
