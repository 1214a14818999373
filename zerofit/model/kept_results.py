"""Selective recomputation without Python around every operator.

torch's own contexts (create_selective_checkpoint_contexts) are dispatch modes: each operator of a layer passes through
Python, in the forward pass and in the recomputation. Here only those operators do whose results are kept: a kernel
below autograd (BackendSelect, which every call passes, and where these operators have no kernel) notes their results
in the forward pass of a layer and gives them back, in the same order, in its recomputation. Autograd records both
passes as ever.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import _detach_helper, _VersionWrapper

aten = torch.ops.aten
BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class _Thread(threading.local):
    """The context that this thread is in: autograd recomputes in threads of its own."""

    context: "_Context | None" = None


THREAD, LIBRARIES = _Thread(), {}


class _Context:
    """The context of a layer's forward pass, or of its recomputation.

    Args:
        results: of both contexts, in the order of the calls: (operator, its result, or None where it is recomputed).
    """

    def __init__(self, results: deque):
        self.results = results

    def __enter__(self) -> None:
        self.before, THREAD.context = THREAD.context, self

    def __exit__(self, *error) -> None:
        THREAD.context = self.before


class Noting(_Context):
    def result(self, operator: OpOverload, compute: Callable[[], Any]) -> Any:
        THREAD.context = None  # one kernel of attention may call another
        try:
            result = compute()
        finally:
            THREAD.context = self
        self.results.append((operator, _held(result)))
        return result

    def changed(self, tensor: torch.Tensor) -> None:
        """Do not keep the result that this tensor lies in: torch adds biases and masks in place, through views that
        have a version of their own."""
        place = tensor.untyped_storage().data_ptr()
        for index, (operator, held) in enumerate(self.results):
            if isinstance(held, _VersionWrapper) and held.val.untyped_storage().data_ptr() == place:
                self.results[index] = operator, None


class Replaying(_Context):
    def result(self, operator: OpOverload, compute: Callable[[], Any]) -> Any:
        noted, held = self.results.popleft() if self.results else (None, None)
        if noted is not operator:
            raise RuntimeError(f"the recomputation of a layer has {operator} where its forward pass had {noted}")
        return compute() if held is None else _given(held)

    def changed(self, tensor: torch.Tensor) -> None:
        """It was recomputed."""


def _held(result: Any) -> Any:
    return tuple(map(_held, result)) if isinstance(result, tuple) else _VersionWrapper(_detach_helper(result))


def _given(held: Any) -> Any:
    """Raises RuntimeError where the tensor was changed in place since."""
    return tuple(map(_given, held)) if isinstance(held, tuple) else held.get_val(allow_cache_entry_mutation=False)


def keeping_contexts() -> tuple[Noting, Replaying]:
    """(context of the forward pass, of the recomputation) of a layer, for torch.utils.checkpoint."""
    results = deque()
    return Noting(results), Replaying(results)


@functools.cache
def keep_results(operator: OpOverload, is_kept: Callable[..., bool]) -> None:
    """Let the contexts keep the results of this operator, from now on in this process.

    Args:
        is_kept: (operator, args, kwargs) -> whether the result of this call is.
    """

    def kernel(keyset, *args, **kwargs):
        context = THREAD.context
        if context is None or not is_kept(operator, args, kwargs):
            return operator.redispatch(keyset & BELOW, *args, **kwargs)
        return context.result(operator, lambda: operator.redispatch(keyset & BELOW, *args, **kwargs))

    _register(operator, kernel)
    _watch_additions()


@functools.cache
def _watch_additions() -> None:
    operator = aten.add_.Tensor

    def kernel(keyset, tensor, other, **kwargs):
        if THREAD.context is not None:
            THREAD.context.changed(tensor)
        other = other if isinstance(other, torch.Tensor) else torch.tensor(other)  # a number comes as one of Python's
        return operator.redispatch(keyset & BELOW, tensor, other, **kwargs)

    _register(operator, kernel)


def _register(operator: OpOverload, kernel: Callable) -> None:
    space = operator.namespace
    library = LIBRARIES.setdefault(space, torch.library.Library(space, "IMPL"))
    library.impl(operator, kernel, "BackendSelect", with_keyset=True)
