"""What an optimizer on a disk holds (ZeRO-3, `device: nvme`): DeepSpeed brings one sub-group of it at a time."""

import contextlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zerofit.strategy.state import Piece, Read, ShardedState

SAVED = "saved.bin"


class DiskState(ShardedState):
    """
    Args:
        folder: of this process, on the disk. What a checkpoint is written from lies in a file there, not in memory.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        super().__init__(engine)
        self.folder = folder

    @property
    def _zero(self) -> Any:
        return self.engine.engine.optimizer

    def tensors(self) -> dict[str, torch.Tensor]:
        pieces = self.own()
        size = len(self.kinds) * sum(piece.stop - piece.start for piece in pieces)
        file = self.folder / SAVED
        file.unlink(missing_ok=True)  # a save under way keeps what it has
        room = torch.from_file(str(file), shared=True, size=size) if size else torch.empty(0)
        saved, start = {}, 0
        for number, several in self._by_sub_group(pieces):
            with self._swapped_in(number):
                for piece in several:
                    for kind in self.kinds:
                        values = self.get(kind, piece)
                        place = room[start : start + len(values)]
                        saved[f"{kind}/{piece.name}"] = place.copy_(values)
                        start += len(values)
        return saved

    def get(self, kind: str, piece: Piece) -> torch.Tensor:
        """Of a sub-group that is in memory."""
        parameter = self.parameters[piece.name]
        number, offset, length = self._zero.grad_position[self._zero.get_param_id(parameter)]
        flat = self._zero.fp32_partitioned_groups_flat[number]
        held = flat if kind == "weight" else self.optimizer.state[flat][kind]
        return held.detach().narrow(0, offset, length)[: piece.stop - piece.start]

    def set(self, kind: str, piece: Piece, values: torch.Tensor) -> None:
        self.get(kind, piece).copy_(values)

    def _take(self, read: Read) -> None:
        for number, several in self._by_sub_group(self.held()):
            with self._swapped_in(number, written=True):
                for piece in several:
                    for kind in self.kinds:
                        self.set(kind, piece, read(kind, piece))

    def _step(self) -> None:
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            with self._swapped_in(number, written=True):
                flat.grad = torch.zeros_like(flat)
                self._zero._optimizer_step(number)

    def _by_sub_group(self, pieces: list[Piece]) -> Iterator[tuple[int, list[Piece]]]:
        def number(piece: Piece) -> int:
            return self._zero.grad_position[self._zero.get_param_id(self.parameters[piece.name])][0]

        return ((key, list(several)) for key, several in groupby(sorted(pieces, key=number), number))

    @contextlib.contextmanager
    def _swapped_in(self, number: int, written: bool = False) -> Iterator[None]:
        """The context in which a sub-group is in memory; small ones always are (stage3.py)."""
        if not self._zero._swappable_optimizer_subgroup(number):
            yield
            return
        self._zero._optimizer_states_and_gradient_swap_in(number)
        yield
        if written:
            self._zero._optimizer_states_and_gradient_swap_out(number)
        else:
            self._zero._release_swap_buffers(number)
