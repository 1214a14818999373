"""A folder of Meta's: params.json and the shards of tensor-parallel processes, consolidated.00.pth and so on.

The files are mapped, not read: a weight is read from the disk when it is needed. Nothing in them is executed.
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from zerofit.model.folders import read_json
from zerofit.recipe.errors import UserError, first_line
from zerofit.tools.convert.meta.weight_names import MetaWeight, ShardCut, Sizes, find_cut, same_bits, weights

IGNORED = re.compile(r"(.*\.)?rope\.freqs")  # Llama 1 and 2 store these, which follow from head_dim
FOREIGN = ("moe", "moe_args", "sliding_window", "vision_chunk_size", "quantization", "lora_args")  # change the model
DEFAULT_THETA = 10000.0


class MetaFolder:
    """The checkpoint in a folder, checked: every shard of every weight exists and has its shape.

    Attributes:
        params: params.json.
        sizes: from params.json and the weights' shapes.
        weights: the weights to convert; without the head where it is tied.
        cuts: {Meta's name: how it is cut}.
        tied: the head equals the embeddings, or is missing.
    """

    def __init__(self, path: Path):
        self.path, self.says = path, f"input = {str(path)!r}"
        self.files = self._find_files()
        self.params = self._read_params()
        self.shards = [self._load(file) for file in self.files]  # mapped
        self._check_names()
        self.sizes = self._sizes()
        listed = weights(self.sizes)
        self.cuts = {weight.meta: self._cut(weight) for weight in listed if weight.meta in self.shards[0]}
        embeddings, head = listed[0], listed[-1]
        self.tied = head.meta not in self.shards[0] or same_bits(self.read(embeddings), self.read(head))
        self.weights = listed[:-1] if self.tied else listed

    def _find_files(self) -> list[Path]:
        if not self.path.is_dir():
            raise UserError(f"{self.says} is not a folder. Name the one with consolidated.00.pth and params.json")
        files = {
            int(match[1]): file
            for file in self.path.iterdir()
            if (match := re.fullmatch(r"consolidated\.(\d+)\.pth", file.name))
        }
        if not files:
            other = " (it is transformers' already)" if (self.path / "config.json").is_file() else ""
            raise UserError(f"{self.says} has no consolidated.00.pth{other}. Name the folder of Meta's weights")
        missing = sorted(set(range(max(files) + 1)) - files.keys())
        if missing:
            names = ", ".join(f"consolidated.{number:02}.pth" for number in missing)
            raise UserError(f"{self.says} lacks {names}. Copy all of the checkpoint's files into it")
        return [files[number] for number in sorted(files)]

    def _read_params(self) -> dict[str, Any]:
        file = self.path / "params.json"
        if not file.is_file():
            raise UserError(f"{self.says} has no params.json. Copy it from the original checkpoint")
        params = read_json(file)
        params = params.get("model", params)
        sizes = {name: params.get(name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads")}
        sizes["n_kv_heads"] = sizes["n_kv_heads"] or sizes["n_heads"]
        problems = [
            f"{file}: {name} = {value!r}, and a number above 0 was expected"
            for name, value in sizes.items()
            if type(value) is not int or value < 1
        ]
        foreign = [name for name in FOREIGN if params.get(name)]
        if foreign:
            problems.append(f"{self.says} is not a Llama: params.json has {foreign[0]}")
        if problems:
            raise UserError(problems)
        return params

    def _load(self, file: Path) -> dict[str, Any]:
        mapped = zipfile.is_zipfile(file)  # torch before 1.6 wrote another format, which cannot be mapped
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            found = re.search(r"(?:GLOBAL|[Uu]nsupported (?:class|global)) ([\w.]+)", str(error))
            why = f"would execute {found[1]}" if found else "is not a file of torch.save"
            raise UserError(f"{file} {why}. It was not read. Take the weights from their publisher") from None
        except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
            raise UserError(f"{file} is broken: {first_line(error)}. Copy it again") from None
        tensors = content.values() if isinstance(content, dict) else [None]
        if not all(isinstance(tensor, torch.Tensor) and tensor.dim() in (1, 2) for tensor in tensors):
            raise UserError(f"{file} is not a Llama: it has something else than named vectors and matrices")
        return {name: tensor for name, tensor in content.items() if not IGNORED.fullmatch(name)}

    def _check_names(self) -> None:
        layers = self.params["n_layers"]
        expected = {weight.meta for weight in weights(Sizes(1, layers, 1, 1, 1, 1, 1))}
        for file, shard in zip(self.files, self.shards):
            unknown, missing = sorted(shard.keys() - expected), sorted(expected - shard.keys() - {"output.weight"})
            names = [*(f"has {name}" for name in unknown), *(f"lacks {name}" for name in missing)]
            if names:
                what = f"it {names[0]} ({len(names)} such)"
                raise UserError(f"{file} is not a Llama (1, 2 or 3) of {layers} layers, as params.json says: {what}")
            if shard.keys() != self.shards[0].keys():
                raise UserError(f"{file} has other weights than {self.files[0].name}: they are of two checkpoints")

    def _sizes(self) -> Sizes:
        params, heads = self.params, self.params["n_heads"]
        return Sizes(
            dim=params["dim"],
            layers=params["n_layers"],
            heads=heads,
            kv_heads=params.get("n_kv_heads") or heads,
            head_dim=params.get("head_dim") or params["dim"] // heads,
            ffn=self.shards[0]["layers.0.feed_forward.w1.weight"].shape[0] * len(self.files),
            vocab=self._vocabulary(),
        )

    def _vocabulary(self) -> int:
        """The size in params.json, else that of the weights.

        Shards of the embeddings that are as wide as the model are cut along the vocabulary (Llama 3), or are all the
        same.
        """
        given, shards = self.params.get("vocab_size", -1), [shard["tok_embeddings.weight"] for shard in self.shards]
        stored = shards[0].shape[0]
        if shards[0].shape[-1] == self.params["dim"] and not all(same_bits(shards[0], each) for each in shards[1:2]):
            stored *= len(shards)
        if given not in (None, -1, stored):
            raise UserError(f"{self.says}: vocab_size = {given} is not {stored}. Correct it, or write -1")
        return stored

    def _cut(self, weight: MetaWeight) -> ShardCut:
        shapes = {tuple(shard[weight.meta].shape) for shard in self.shards}
        cut = find_cut(weight, next(iter(shapes)), len(self.files)) if len(shapes) == 1 else None
        if cut is None:
            raise UserError(
                f"{self.says}: {weight.meta} has {' and '.join(map(str, sorted(shapes)))} in {len(self.files)} files, "
                f"and params.json gives {weight.shape}. A file is missing, or they are of two checkpoints"
            )
        return cut

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0]["tok_embeddings.weight"].dtype

    def read(self, weight: MetaWeight) -> torch.Tensor:
        """The full weight, concatenated from its shards, in Meta's order."""
        cut, shards = self.cuts[weight.meta], [shard[weight.meta] for shard in self.shards]
        if cut.axis is None or len(shards) == 1:
            return shards[0]
        return torch.cat(shards[:: cut.copies], cut.axis)
