"""Expert parallelism: each rank has some full experts of each layer, and tokens are sent to their experts' ranks.

The exchange is transformers' `AllToAllEP` (transformers/distributed/expert_parallel.py), whose plan for a model says
which modules are experts. Ranks have different samples, as in data parallelism, and experts are never gathered.
"""

import re
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerofit.recipe.errors import UserError

DISPATCH_EXPERTS = "ep_dispatch_experts"  # how transformers' plan marks modules that exchange tokens


def check_experts(config: Any, ranks: int, source: str) -> None:
    """Check that the ranks can share a model's experts evenly. Raises UserError if not, or if it has no experts."""
    setting = f"{source}: expert parallelism on {ranks} processes"
    experts = getattr(config, "num_experts", None)
    if not experts or not _patterns(config):
        raise UserError(f"{setting}, and a {config.model_type} is not a mixture of experts. Use fsdp2.yaml")
    if experts % ranks:
        sizes = [size for size in range(2, experts + 1) if experts % size == 0]
        raise UserError(
            f"{setting}, and the model has {experts} experts: each process needs equally many. Use --num_processes "
            f"{', '.join(map(str, sizes))}, or fsdp2.yaml"
        )


def _patterns(config: Any) -> list[str]:
    plan = getattr(config, "base_model_ep_plan", None) or {}
    return [name for name, style in plan.items() if style == DISPATCH_EXPERTS]


def find_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the expert modules of a model, one per layer. Their parameters have the shape (experts, ...)."""
    endings = [re.escape(pattern).replace(r"\*", r"\d+") for pattern in _patterns(model.config)]
    pattern = re.compile(rf"(.*\.)?({'|'.join(endings)})")
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


def dispatch(
    experts: torch.nn.Module, mesh: Any, alone: Any, half: torch.dtype | None, kind: type[Any] | None = None
) -> None:
    """Make an expert module exchange its tokens between ranks. Its parameters must be DTensors sharded by expert by
    the time of its first forward pass.

    Args:
        mesh: the device mesh of all ranks, of one dimension.
        alone: the device mesh of this rank alone.
        half: the dtype of the matrix products; None: that of the weights.
        kind: the class of the exchange; None: AllToAllEP of transformers.
    """
    from transformers.distributed.expert_parallel import AllToAllEP

    experts.num_experts //= mesh.size()  # the module computes this rank's only
    exchanged = _Exchanged(experts, (kind or AllToAllEP)(experts, mesh, alone))

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        local = {f"experts.{name}": local_experts(each) for name, each in experts.named_parameters(recurse=False)}
        if half is not None:
            local = {name: parameter.to(half) for name, parameter in local.items()}
        return torch.func.functional_call(exchanged, local, (hidden, chosen, weights)).to(hidden.dtype)

    experts.forward = forward


class _Exchanged(torch.nn.Module):
    """An expert module whose forward pass is the exchange, as `functional_call` needs a module."""

    def __init__(self, experts: torch.nn.Module, exchange: Any):
        super().__init__()
        self.experts = experts
        self.exchange = exchange

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.exchange(hidden, chosen, weights)


def local_experts(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of an expert parameter, (experts of this rank, ...), as a plain tensor."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
