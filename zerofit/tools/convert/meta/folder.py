"""A folder of Meta's: params.json and the shards of tensor-parallel processes, consolidated.00.pth and so on.

The files are mapped, not read: a weight is read from the disk when it is needed. Nothing in them is executed.
"""

import pickle
import re
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zerofit.model.folders import read_json
from zerofit.recipe.errors import UserError, first_line
from zerofit.tools.convert.meta.layout import MetaWeight, ShardCut, Sizes, find_cut, same_bits, weights

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

    Raises:
        UserError: files are missing or broken, or are not a Llama's.
    """

    def __init__(self, path: Path, option: str = "input"):
        self.path, self.says = path, f"{option} = {str(path)!r}"
        self.files = self._find_files()
        self.params = self._read_params()
        self.shards = [self._load(file) for file in self.files]  # mapped
        self.shapes = [{name: tuple(tensor.shape) for name, tensor in shard.items()} for shard in self.shards]
        self._check_names()
        self._check_number()
        self.sizes = self._sizes()
        listed = weights(self.sizes)
        self.cuts = {weight.meta: self._cut(weight) for weight in listed if weight.meta in self.shapes[0]}
        embeddings, head = listed[0], listed[-1]
        self.tied = head.meta not in self.shapes[0] or same_bits(self.read(embeddings), self.read(head))
        self.weights = listed[:-1] if self.tied else listed

    # ------------------------------------------------------------------------------------------------------ the files

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
        problems = [
            f"{file}: {name} = {params.get(name)!r}, and a number above 0 was expected"
            for name in ("dim", "n_layers", "n_heads", "n_kv_heads")
            if not _is_count(params.get(name)) and (name != "n_kv_heads" or params.get(name) is not None)
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
        if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
            raise UserError(f"{file} is not a Llama: it has something else than named tensors")
        return {name: tensor for name, tensor in content.items() if not IGNORED.fullmatch(name)}

    # ----------------------------------------------------------------------------------------------------- the shapes

    def _check_names(self) -> None:
        have = max(
            (int(name.split(".")[1]) + 1 for name in self.shapes[0] if re.match(r"layers\.\d+\.", name)), default=0
        )
        layers = self.params["n_layers"]
        if have and have != layers:
            raise UserError(f"{self.says}: params.json says n_layers = {layers}, and the weights have {have} layers")
        expected = {weight.meta for weight in weights(Sizes(1, layers, 1, 1, 1, 1, 1))}
        for file, shapes in zip(self.files, self.shapes):
            unknown, missing = sorted(shapes.keys() - expected), sorted(expected - shapes.keys() - {"output.weight"})
            if unknown or missing:
                names = [*(f"has {name}" for name in unknown), *(f"lacks {name}" for name in missing)]
                raise UserError(f"{file} is not a Llama (1, 2 or 3): it {names[0]} ({len(names)} such)")
            if shapes.keys() != self.shapes[0].keys():
                raise UserError(f"{file} has other weights than {self.files[0].name}: they are of two checkpoints")

    def _check_number(self) -> None:
        """Compare the number of files with the number of shards that a shard's shape implies."""
        for name in ("tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight"):
            if len(self.shapes[0][name]) != 2:
                raise UserError(f"{self.files[0]} is not a Llama: {name} has the shape {self.shapes[0][name]}")
        rows, columns = self.shapes[0]["layers.0.attention.wq.weight"]
        expected, rest = divmod(self.params["n_heads"] * self.head_dim, rows)
        if rest or not expected or columns != self.params["dim"]:
            raise UserError(
                f"{self.says}: params.json says dim = {self.params['dim']}, n_heads = {self.params['n_heads']}, wq is "
                f"{rows} x {columns}: they are of two checkpoints"
            )
        if expected != len(self.files):
            raise UserError(f"{self.says} has {len(self.files)} consolidated files, cut for {expected}. Copy all")

    @cached_property
    def head_dim(self) -> int:
        return self.params.get("head_dim") or self.params["dim"] // self.params["n_heads"]

    def _sizes(self) -> Sizes:
        params = self.params
        heads = params["n_heads"]
        return Sizes(
            dim=params["dim"],
            layers=params["n_layers"],
            heads=heads,
            kv_heads=params.get("n_kv_heads") or heads,
            head_dim=self.head_dim,
            ffn=self.shapes[0]["layers.0.feed_forward.w1.weight"][0] * len(self.files),
            vocab=self._vocabulary(),
        )

    def _vocabulary(self) -> int:
        """The size in params.json, else that of the weights.

        Shards of the embeddings that are as wide as the model are cut along the vocabulary (Llama 3), or are all the
        same.
        """
        given, number = self.params.get("vocab_size", -1), len(self.files)
        rows, columns = self.shapes[0]["tok_embeddings.weight"]
        stored = rows
        if columns == self.params["dim"] and number > 1:
            first, second = (shard["tok_embeddings.weight"] for shard in self.shards[:2])
            stored = rows if same_bits(first, second) else rows * number
        if _is_count(given) and given != stored:
            raise UserError(f"{self.says}: vocab_size = {given} is not {stored}. Correct it, or write -1")
        return stored

    def _cut(self, weight: MetaWeight) -> ShardCut:
        shards = {shapes[weight.meta] for shapes in self.shapes}
        cut = find_cut(weight, next(iter(shards)), len(self.files)) if len(shards) == 1 else None
        if cut is None:
            raise UserError(
                f"{self.says}: {weight.meta} has {' and '.join(map(str, sorted(shards)))} in {len(self.files)} files, "
                f"and params.json gives {weight.shape}. They are of two checkpoints, or it is not a Llama"
            )
        return cut

    # ---------------------------------------------------------------------------------------------------- the weights

    @property
    def dtype(self) -> torch.dtype:
        return self.shards[0]["tok_embeddings.weight"].dtype

    def read(self, weight: MetaWeight) -> torch.Tensor:
        """The full weight, concatenated from its shards, in Meta's order."""
        cut, shards = self.cuts[weight.meta], [shard[weight.meta] for shard in self.shards]
        if cut.axis is None or len(shards) == 1:
            return shards[0]
        return torch.cat(shards[:: cut.copies], cut.axis)

    def unlike_copies(self, weight: MetaWeight) -> list[str]:
        """The files whose shard differs from the first of its copies."""
        cut, shards = self.cuts[weight.meta], [shard[weight.meta] for shard in self.shards]
        copies = len(shards) if cut.axis is None else cut.copies
        return [
            self.files[index].name
            for index, shard in enumerate(shards)
            if not same_bits(shard, shards[index // copies * copies])
        ]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
