"""Private parts of torch."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerofit.compat import replaced


class DispatchMode(TorchDispatchMode):
    """A context in which `__torch_dispatch__` meets each operation on tensors.

    torch documents the protocol (`__torch_dispatch__`) and not the class. Tried with torch 2.13. Without it: no trace
    of a step's memory, no recomputed products, and no tensor-parallel weights drawn as one process draws them.
    """


def number_of_tensors(storage: torch.UntypedStorage) -> int:
    """Return how many tensors hold this storage.

    torch.multiprocessing.reductions.StorageWeakRef tells only whether any does. Tried with torch 2.13. Without it: a
    trace could not tell what a module keeps from what it hands on.
    """
    handle: Any = storage
    return torch._C._storage_Use_Count(handle._cdata)  # type: ignore[attr-defined]


@contextlib.contextmanager
def computed_as_linear(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within this context subclasses of torch.nn.Linear compute as it does.

    torchao's layers in float8 cannot be told to, and FSDP2 holds on to the modules that it has sharded, so others
    cannot take their places. Tried with torch 2.13 and torchao 0.18. Without it: one scale for all rows of a batch
    makes the check of packed documents find a leak where there is none.
    """
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, "forward", functools.partial(torch.nn.Linear.forward, layer)))
        yield
