"""The state of a run in files: pieces of the optimizer's state from every rank, and how far the run had come.

    state/progress.json            what the run resumes from, beside the optimizer's state
    state/rank_00000.safetensors   {kind}/{parameter} -> the part that this rank wrote, flat, fp32
    state/rank_00000.json          which part of which parameter that is, and the checksum of the above

Nothing here is ever unpickled.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from train.checkpoint.directory import entry
from train.strategy.state import Piece

PROGRESS = "progress.json"


def write_shard(folder: Path, rank: int, pieces: list[Piece], tensors: dict[str, torch.Tensor]) -> None:
    """Write what this rank owns; its .json comes into being when the rest is on the disk."""
    from safetensors.torch import save_file

    data = _file(folder, rank)
    save_file(tensors, data)
    parts = {piece.name: {"shape": piece.shape, "start": piece.start, "stop": piece.stop} for piece in pieces}
    partial = data.with_suffix(".partial")
    partial.write_text(json.dumps({"data": entry(data), "pieces": parts}) + "\n")
    partial.rename(data.with_suffix(".json"))


def entries_of_shards(folder: Path) -> dict[str, dict[str, Any]]:
    """What the ranks say of their .safetensors: {file in `folder`: its entry for the manifest}."""
    shards = {index.with_suffix(".safetensors").name: index for index in folder.glob("rank_*.json")}
    return {name: json.loads(index.read_text())["data"] for name, index in shards.items()}


def missing_shards(folder: Path, world_size: int) -> list[int]:
    """The ranks that have not finished writing."""
    written = set(os.listdir(folder))  # a listing, since NFS remembers for a while that a single name was absent
    return [rank for rank in range(world_size) if _file(folder, rank).with_suffix(".json").name not in written]


def write_progress(folder: Path, progress: dict[str, Any]) -> None:
    """Write how far the run has come."""
    (folder / PROGRESS).write_text(json.dumps(progress) + "\n")


def read_progress(folder: Path) -> dict[str, Any]:
    """How far the run had come."""
    return json.loads((folder / PROGRESS).read_text())


class ShardReader:
    """The pieces in a folder, read where they lie: only what is asked for is held in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, int, int]]] = {}  # (rank, start, stop) of each parameter
        self._open: dict[int, Any] = {}
        for index in sorted(folder.glob("rank_*.json")):
            rank = int(index.stem.removeprefix("rank_"))
            for name, part in json.loads(index.read_text())["pieces"].items():
                self.shapes[name] = tuple(part["shape"])
                self._pieces.setdefault(name, []).append((rank, part["start"], part["stop"]))

    def problems(self, parameters: dict[str, torch.nn.Parameter]) -> list[str]:
        """What of a model's trained parameters is not here, or in another shape."""
        from train.model.parameters import true_shape

        here, there = self.shapes, {name: tuple(true_shape(parameter)) for name, parameter in parameters.items()}
        found = [f"{name} is not in it" for name in there if name not in here]
        found += [f"{name} is not trained here" for name in here if name not in there]
        both = (name for name in there if name in here)
        return found + [f"{name} is {here[name]} in it, and {there[name]} here" for name in both
                        if here[name] != there[name]]  # fmt: skip

    def weight(self, name: str) -> torch.Tensor:
        """A parameter's whole value, fp32."""
        shape = self.shapes[name]
        return self.read("weight", name, 0, math.prod(shape)).view(shape)

    def read(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        """(stop - start,) fp32: elements [start, stop) of a flattened parameter's value or moment."""
        values = torch.empty(stop - start)
        filled = 0
        for rank, begin, end in self._pieces[name]:
            first, last = max(start, begin), min(stop, end)
            if first < last:
                part = self._of(rank).get_slice(f"{kind}/{name}")[first - begin : last - begin]
                values[first - start : last - start] = part
                filled += last - first
        if filled != stop - start:
            raise RuntimeError(f"{self.folder}: of {kind} of {name}, {stop - start - filled} elements are missing")
        return values

    def _of(self, rank: int):
        from safetensors import safe_open

        if rank not in self._open:
            self._open[rank] = safe_open(_file(self.folder, rank), "pt")
        return self._open[rank]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05}.safetensors"
