"""The state of a run in files: pieces of the optimizer's state from every rank, and how far the run had come.

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

from zerofit.checkpoint.directory import entry
from zerofit.model.parameters import true_shape
from zerofit.model.tensor_parallel.cut import Cut
from zerofit.recipe.files import atomic_file
from zerofit.strategy.state import Piece, overlaps


def write_shard(folder: Path, rank: int, pieces: list[Piece], tensors: dict[str, torch.Tensor]) -> None:
    """Write what this rank owns; its .json comes into being when the rest is on the disk."""
    data = _file(folder, rank)
    save_file(tensors, data)
    parts = {piece.name: _entry_of(piece) for piece in pieces}
    with atomic_file(data.with_suffix(".json")) as file:
        file.write(json.dumps({"data": entry(data), "pieces": parts}) + "\n")


def _entry_of(piece: Piece) -> dict[str, Any]:
    part = {"shape": piece.shape, "start": piece.start, "stop": piece.stop}
    return part if piece.cut is None else {**part, "cut": {"dim": piece.cut.dim, "ranges": piece.cut.ranges}}


def _piece_of(name: str, part: dict[str, Any]) -> Piece:
    shape, cut = tuple(part["shape"]), part.get("cut")
    cut = cut and Cut(shape, cut["dim"], tuple(map(tuple, cut["ranges"])))
    return Piece(name, shape, part["start"], part["stop"], cut)


def entries_of_shards(folder: Path) -> dict[str, dict[str, Any]]:
    """Read what the ranks wrote about their .safetensors: {file in `folder`: its entry for the manifest}."""
    shards = {index.with_suffix(".safetensors").name: index for index in folder.glob("rank_*.json")}
    return {name: json.loads(index.read_text())["data"] for name, index in shards.items()}


def missing_shards(folder: Path, world_size: int) -> list[int]:
    """The ranks that have not finished writing."""
    written = set(os.listdir(folder))  # a listing, since NFS remembers for a while that a single name was absent
    return [rank for rank in range(world_size) if _file(folder, rank).with_suffix(".json").name not in written]


class ShardReader:
    """The pieces in a folder, read where they lie: only what is asked for is held in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[int, Piece]]] = {}  # (rank, what it wrote) of each parameter
        self._open: dict[int, Any] = {}
        for index in sorted(folder.glob("rank_*.json")):
            rank = int(index.stem.removeprefix("rank_"))
            for name, part in json.loads(index.read_text())["pieces"].items():
                self.shapes[name] = tuple(part["shape"])
                self._pieces.setdefault(name, []).append((rank, _piece_of(name, part)))

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
        return self.read("weight", Piece(name, shape, 0, math.prod(shape))).view(shape)

    def read(self, kind: str, piece: Piece) -> torch.Tensor:
        """(stop - start,) fp32: the value or a moment of a piece, put together from the pieces that were written."""
        values = torch.empty(piece.stop - piece.start)
        filled = 0
        for rank, written in self._pieces[piece.name]:
            common = list(overlaps(piece, written))
            if not common:
                continue
            begin, end = common[0][1], common[-1][1] + common[-1][2]
            part = self._of(rank).get_slice(f"{kind}/{piece.name}")[begin:end]
            for first, there, length in common:
                values[first : first + length] = part[there - begin : there - begin + length]
                filled += length
        if filled != len(values):
            missing = len(values) - filled
            raise RuntimeError(f"{self.folder}: of {kind} of {piece.name}, {missing} elements are missing")
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Read a tensor that the first rank wrote beside its pieces."""
        return self._of(0).get_tensor(name)

    def _of(self, rank: int) -> Any:  # safetensors has no types
        if rank not in self._open:
            self._open[rank] = safe_open(_file(self.folder, rank), "pt")
        return self._open[rank]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05}.safetensors"
