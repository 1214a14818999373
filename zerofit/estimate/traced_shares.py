"""Traces of models that several ranks hold together: the run's own layers and rows, one rank of them.

Layers are cut by model/tensor_parallel and rows by strategy/sequence.py, as in a run. Only the collectives
are others: they exchange nothing, and the trace notes what they would have exchanged.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from zerofit.estimate.operations import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Operation
from zerofit.model.tensor_parallel.cut import TensorGroup
from zerofit.strategy.grid import replaced


@dataclass(frozen=True)
class FakeGroup:
    """Stands for a process group."""

    size: int
    group_name: str = "plan"


class Collectives:
    """What layers and rows that are shared call of torch.distributed and deepspeed.comm.

    Args:
        note: takes each collective, as an operation.
        size: ranks of the group.
    """

    ReduceOp = distributed.ReduceOp

    def __init__(self, note: Callable[[Operation], None], size: int):
        self.note, self.size = note, size

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        self._noted(ALL_REDUCE, tensor, tensor.nbytes)

    def all_gather(self, parts: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
        self._noted(ALL_GATHER, own, sum(part.nbytes for part in parts))

    def all_gather_into_tensor(self, whole: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
        self._noted(ALL_GATHER, own, whole.nbytes)

    def reduce_scatter_tensor(self, own: torch.Tensor, whole: torch.Tensor, group: Any = None) -> None:
        self._noted(REDUCE_SCATTER, own, whole.nbytes)

    def get_world_size(self, group: Any = None) -> int:
        return self.size

    def get_rank(self, group: Any = None) -> int:
        return 0

    def _noted(self, kind: str, tensor: torch.Tensor, size: int) -> None:
        self.note(Operation(kind, tensor.is_floating_point() and tensor.itemsize < 4, 0, size))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The context in which they take the place of the real ones."""
        from zerofit.model.tensor_parallel import layers, tokens

        if self.size == 1:
            yield
            return
        places = [(layers, "distributed"), (tokens, "distributed")]
        with contextlib.suppress(ImportError):
            from deepspeed.runtime.sequence_parallel import ulysses_sp
            from deepspeed.sequence import layer

            places += [(ulysses_sp, "dist"), (layer, "dist")]
        with contextlib.ExitStack() as replacements:
            for place in places:
                replacements.enter_context(replaced(*place, self))
            yield


def split_layers(model: torch.nn.Module, size: int) -> None:
    """Keep one rank's share of the layers: that of the last rank, which has most of a vocabulary that is uneven."""
    if size > 1:
        from zerofit.model.tensor_parallel.split import split_model

        split_model(model, TensorGroup(FakeGroup(size), size - 1, size))


@contextlib.contextmanager
def rows_split(model: torch.nn.Module, size: int, attention: str) -> Iterator[None]:
    """The context in which a model with an installed loss computes one rank's part of its rows.

    Args:
        attention: the name under which the model looks up its attention function.
    """
    if size == 1:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from zerofit.strategy import sequence
    from zerofit.strategy.layout import ParallelLayout

    class Groups:
        get_sequence_parallel_group = staticmethod(lambda: FakeGroup(size))

    with contextlib.ExitStack() as restored:
        restored.callback(setattr, model, "forward", model.forward)
        restored.enter_context(replaced(sequence, "sequence_groups", lambda layout: Groups))
        for name in (attention, "sdpa"):
            restored.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, name, ALL_ATTENTION_FUNCTIONS[name])
        sequence.SplitRows(model, ParallelLayout(size, sequence=size))
        yield
