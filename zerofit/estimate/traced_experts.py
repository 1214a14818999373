"""Traces of mixtures whose experts are divided among ranks (`ep`): the run's own exchange of tokens, on one rank.

Experts are divided by zerofit/strategy/expert_parallel.py, and tokens travel as transformers' AllToAllEP sends them.
Only the collectives are others, as in shared.py: they exchange nothing, and the trace notes what they would have.
How many tokens a rank gets depends on the routers. Here they are balanced: each rank gets as many as it sends.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zerofit.estimate.operations import ALL_TO_ALL, Operation
from zerofit.strategy import expert_parallel
from zerofit.strategy.grid import replaced


@dataclass(frozen=True)
class FakeMesh:
    """Stands for a device mesh of one dimension."""

    ranks: int
    device_type: str = "cpu"

    def size(self) -> int:
        return self.ranks

    def get_group(self) -> list[int]:
        return list(range(self.ranks))


def expert_names(model: torch.nn.Module) -> frozenset[str]:
    """The names of the parameters that are divided."""
    divided = {id(parameter) for module in expert_parallel.experts_of(model) for parameter in module.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in divided)


def divide_experts(model: torch.nn.Module, ranks: int, dtype: torch.dtype) -> None:
    """Keep one rank's experts, and let tokens travel to them.

    Args:
        ranks: 0: they are not divided.
        dtype: that products are computed in. Experts that are trained are stored in fp32, as their optimizer has them.
    """
    if not ranks:
        return
    from transformers.distributed import expert_parallel as library

    class Balanced(library.AllToAllEP):
        """The exchange, whose sizes are on the host before there are any: fake tensors have no values."""

        def _dispatch_tokens(self, hidden_states: Any, top_k_index: torch.Tensor, top_k_weights: Any) -> Any:
            sizes = _even(top_k_index.numel(), ranks)
            with replaced(FakeTensor, "tolist", lambda counts: [sizes] * len(counts)):
                return super()._dispatch_tokens(hidden_states, top_k_index, top_k_weights)

    with contextlib.ExitStack() as replacements:
        for place, name, other in (
            (library, "get_process_group_ranks", list),
            (library, "AllToAllEP", Balanced),
        ):
            replacements.enter_context(replaced(place, name, other))
        for module in expert_parallel.experts_of(model):
            for name, whole in module.named_parameters(recurse=False):
                stored = torch.float32 if whole.requires_grad else whole.dtype
                own = torch.empty(len(whole) // ranks, *whole.shape[1:], dtype=stored, device=whole.device)
                module._parameters[name] = torch.nn.Parameter(own, whole.requires_grad)
            expert_parallel.dispatch(module, FakeMesh(ranks), FakeMesh(1), None if dtype == torch.float32 else dtype)


@contextlib.contextmanager
def tokens_exchanged(ranks: int, note: Callable[[Operation], None]) -> Iterator[None]:
    """The context in which a model whose experts are divided computes one rank's part.

    Args:
        note: takes each collective, as an operation.
    """
    if not ranks:
        yield
        return
    from transformers.distributed import expert_parallel as library

    def exchanged(rows: torch.Tensor, received: list[int]) -> torch.Tensor:
        note(Operation(ALL_TO_ALL, rows.is_floating_point() and rows.itemsize < 4, 0, rows.nbytes))
        return rows.contiguous().new_empty(sum(received), *rows.shape[1:])

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
            ctx.sent = sent
            return exchanged(rows, received)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return exchanged(gradient, ctx.sent), None, None

    class Arrived:
        apply = staticmethod(lambda rows: rows)

    with contextlib.ExitStack() as replacements:
        for place, name, other in (
            # As to_local: its backward comes when all of the module's is done, and gradients wait for it.
            (expert_parallel, "own_experts", lambda parameter: parameter.view_as(parameter)),
            (library, "all_to_all_single", lambda received, sent, group: exchanged(sent, [len(sent)])),
            (library, "all_to_all_single_autograd", lambda rows, received, sent, group: Exchange.apply(
                rows, received, sent)),
            (library, "_WaitTensor", Arrived),
        ):  # fmt: skip
            replacements.enter_context(replaced(place, name, other))
        yield


def _even(total: int, parts: int) -> list[int]:
    """A total in parts that differ by one at most."""
    return [len(range(part, total, parts)) for part in range(parts)]
