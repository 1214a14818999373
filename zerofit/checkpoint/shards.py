"""The state of a run in files: shards of the optimizer's state from every rank, and how far the run had come.

    state/progress.json            the fields of RunState (run_state.py); `run`: its options, strategy and processes;
                                   `data`: size, checksum and grouping of the training set; `steps` of the optimizer;
                                   `loss_scale`; `weights`: sampled elements of each in the model (state.py)
    state/rank_00000.safetensors   {kind}/{parameter} -> the part that this rank wrote, flat, fp32
                                   on rank 0 also {what}/{parameter}, whole, of an optimizer other than AdamW
    state/rank_00000.json          which part of which parameter that is: a range of the flattened parameter, or of the
                                   share that tensor parallelism has cut out of it; and the checksum of the above

Nothing here is ever unpickled.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from zerofit.checkpoint.directory import manifest_entry
from zerofit.model.parameters import true_shape
from zerofit.model.tensor_parallel.cut import Cut
from zerofit.recipe.files import atomic_file
from zerofit.strategy.state import Shard, overlaps


def write_shard(folder: Path, rank: int, shards: list[Shard], tensors: dict[str, torch.Tensor]) -> None:
    """Write what this rank owns; its .json comes into being when the rest is on the disk."""
    data = _file(folder, rank)
    save_file(tensors, data)
    parts = {shard.name: _entry_of(shard) for shard in shards}
    with atomic_file(data.with_suffix(".json")) as file:
        file.write(json.dumps({"data": manifest_entry(data), "pieces": parts}) + "\n")


def _entry_of(shard: Shard) -> dict[str, Any]:
    part = {"shape": shard.shape, "start": shard.start, "stop": shard.stop}
    return part if shard.cut is None else {**part, "cut": {"dim": shard.cut.dim, "ranges": shard.cut.ranges}}


def _shard_of(name: str, part: dict[str, Any]) -> Shard:
    shape, cut = tuple(part["shape"]), part.get("cut")
    cut = cut and Cut(shape, cut["dim"], tuple(map(tuple, cut["ranges"])))
    return Shard(name, shape, part["start"], part["stop"], cut)


def entries_of_shards(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what the ranks wrote about their .safetensors: {file in `folder`: its entry for the manifest}."""
    shards = {index.with_suffix(".safetensors").name: index for index in folder.glob("rank_*.json")}
    return {name: json.loads(index.read_text())["data"] for name, index in shards.items()}


def missing_shards(folder: Path, world_size: int) -> list[int]:
    """The ranks that have not finished writing."""
    written = set(os.listdir(folder))  # a listing, since NFS remembers for a while that a single name was absent
    return [rank for rank in range(world_size) if _file(folder, rank).with_suffix(".json").name not in written]


class ShardReader:
    """The shards in a folder, read where they lie: only what is asked for is held in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, list[tuple[int, Shard]]] = {}  # (rank, what it wrote) of each parameter
        self._open: dict[int, Any] = {}
        for index in sorted(folder.glob("rank_*.json")):
            rank = int(index.stem.removeprefix("rank_"))
            for name, part in json.loads(index.read_text())["pieces"].items():
                self.shapes[name] = tuple(part["shape"])
                self._shards.setdefault(name, []).append((rank, _shard_of(name, part)))

    def problems(self, parameters: dict[str, torch.nn.Parameter]) -> list[str]:
        """Lines on trained parameters of a model that are not here, or have another shape."""
        here, there = self.shapes, {name: tuple(true_shape(parameter)) for name, parameter in parameters.items()}
        problems = [f"{name} is not in it" for name in there if name not in here]
        problems += [f"{name} is not trained here" for name in here if name not in there]
        both = (name for name in there if name in here)
        return problems + [
            f"{name} is {here[name]} in it, and {there[name]} here" for name in both if here[name] != there[name]
        ]

    def weight(self, name: str) -> torch.Tensor:
        """A parameter's whole value, fp32."""
        shape = self.shapes[name]
        return self.read("weight", Shard(name, shape, 0, math.prod(shape))).view(shape)

    def read(self, kind: str, shard: Shard) -> torch.Tensor:
        """Return (stop - start,) fp32: the value or a moment of a shard, put together from the shards that were
        written."""
        values = torch.empty(shard.stop - shard.start)
        filled = 0
        for rank, written in self._shards[shard.name]:
            common = list(overlaps(shard, written))
            if not common:
                continue
            begin, end = common[0][1], common[-1][1] + common[-1][2]
            part = self._of(rank).get_slice(f"{kind}/{shard.name}")[begin:end]
            for first, there, length in common:
                values[first : first + length] = part[there - begin : there - begin + length]
                filled += length
        if filled != len(values):
            missing = len(values) - filled
            raise RuntimeError(f"{self.folder}: of {kind} of {shard.name}, {missing} elements are missing")
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor that the first rank wrote beside its shards."""
        return self._of(0).get_tensor(name)

    def _of(self, rank: int) -> Any:  # safetensors has no types
        if rank not in self._open:
            self._open[rank] = safe_open(_file(self.folder, rank), "pt")
        return self._open[rank]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05}.safetensors"
