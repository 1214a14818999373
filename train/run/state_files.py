"""The state of a run in files: pieces of the optimizer's state from every rank, and an index that says where each is.

    state/index.json               progress of the run, and for each parameter its shape and who wrote which part of it
    state/rank_00000.safetensors   {kind}/{parameter} -> the part that this rank wrote, flat, fp32

Nothing here is ever unpickled.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from train.strategy.state import KINDS, OptimizerState, Piece

INDEX = "index.json"


def write_pieces(folder: Path, rank: int, state: OptimizerState) -> list[tuple[str, tuple[int, ...], int, int, int]]:
    """Write what this rank owns. Returns (parameter, shape, rank, start, stop) of each piece."""
    from safetensors.torch import save_file

    pieces = state.own()
    tensors = {
        f"{kind}/{piece.name}": state.get(kind, piece).detach().to("cpu", torch.float32, copy=True).contiguous()
        for piece in pieces
        for kind in KINDS
    }
    save_file(tensors, _file(folder, rank))
    return [(piece.name, piece.shape, rank, piece.start, piece.stop) for piece in pieces]


def write_index(folder: Path, pieces: Iterable[tuple], progress: dict[str, Any]) -> None:
    """Write where each piece is, and how far the run has come."""
    parameters: dict[str, dict[str, Any]] = {}
    for name, shape, rank, start, stop in pieces:
        entry = parameters.setdefault(name, {"shape": list(shape), "pieces": []})
        entry["pieces"].append([rank, start, stop])
    (folder / INDEX).write_text(json.dumps({"progress": progress, "parameters": parameters}) + "\n")


def read_progress(folder: Path) -> dict[str, Any]:
    """How far the run had come."""
    return json.loads((folder / INDEX).read_text())["progress"]


class StateFiles:
    """The pieces in a folder, read where they lie: only what is asked for is held in memory."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.parameters = json.loads((folder / INDEX).read_text())["parameters"]
        self._open: dict[int, Any] = {}

    def problems(self, parameters: dict[str, torch.nn.Parameter]) -> list[str]:
        """What of a model's trained parameters is not here, or in another shape."""
        from train.model.parameters import true_shape

        here = {name: tuple(entry["shape"]) for name, entry in self.parameters.items()}
        there = {name: tuple(true_shape(parameter)) for name, parameter in parameters.items()}
        found = [f"{name} is not in it" for name in there if name not in here]
        found += [f"{name} is not trained here" for name in here if name not in there]
        both = (name for name in there if name in here)
        return found + [f"{name} is {here[name]} in it, and {there[name]} here" for name in both
                        if here[name] != there[name]]  # fmt: skip

    def read(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        """(stop - start,) fp32: elements [start, stop) of a flattened parameter's value or moment."""
        values = torch.empty(stop - start)
        filled = 0
        for rank, begin, end in self.parameters[name]["pieces"]:
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


def pieces_of(gathered: list[list[tuple]]) -> list[tuple]:
    """The pieces of all ranks as one list."""
    return [piece for share in gathered for piece in share]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05}.safetensors"


__all__ = ["Piece", "StateFiles", "pieces_of", "read_progress", "write_index", "write_pieces"]
