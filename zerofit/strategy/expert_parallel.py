"""Expert parallelism: each rank has some experts of each layer in full, and tokens travel to those that they chose.

The exchange is that of transformers (`AllToAllEP`, transformers/distributed/expert_parallel.py): its plan for a model
says which modules are experts. Ranks have different samples, as in data parallelism, and no expert is gathered.
"""

import re
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerofit.recipe.errors import UserError

DISPATCH_EXPERTS = "ep_dispatch_experts"  # the plan's word for modules whose tokens come from other ranks


def check_experts(config: Any, ranks: int, source: str) -> None:
    """Raises UserError where the experts of a model cannot be divided evenly among the ranks, or it has none."""
    stated = f"{source}: expert parallelism on {ranks} processes"
    experts = getattr(config, "num_experts", None)
    if not experts or not _patterns(config):
        raise UserError(f"{stated}, and a {config.model_type} is not a mixture of experts. Use fsdp2.yaml")
    if experts % ranks:
        possible = [size for size in range(2, experts + 1) if experts % size == 0]
        raise UserError(
            f"{stated}, and the model has {experts} experts: each needs as many. Use --num_processes "
            f"{', '.join(map(str, possible))}, or fsdp2.yaml"
        )


def _patterns(config: Any) -> list[str]:
    plan = getattr(config, "base_model_ep_plan", None) or {}
    return [name for name, style in plan.items() if style == DISPATCH_EXPERTS]


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules with the experts of a layer each; their parameters are (experts, ...)."""
    endings = [re.escape(pattern).replace(r"\*", r"\d+") for pattern in _patterns(model.config)]
    matching = re.compile(rf"(.*\.)?({'|'.join(endings)})")
    return [module for name, module in model.named_modules() if matching.fullmatch(name)]


def dispatch(
    experts: torch.nn.Module, mesh: Any, alone: Any, half: torch.dtype | None, kind: type[Any] | None = None
) -> None:
    """Let a module's tokens travel: its parameters are, or will be, DTensors with this rank's experts.

    Args:
        mesh: all ranks, in one dimension.
        half: the precision of the products, None: that of the weights.
        kind: the class of the exchange, transformers' own by default.
    """
    from transformers.distributed.expert_parallel import AllToAllEP

    experts.num_experts //= mesh.size()  # each rank sees its own
    called = _Exchanged(experts, (kind or AllToAllEP)(experts, mesh, alone))

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        local = {name: own_experts(each) for name, each in experts.named_parameters(recurse=False)}
        if half is not None:
            local = {name: parameter.to(half) for name, parameter in local.items()}
        own = {f"experts.{name}": parameter for name, parameter in local.items()}
        return torch.func.functional_call(called, own, (hidden, chosen, weights)).to(hidden.dtype)

    experts.forward = forward


class _Exchanged(torch.nn.Module):
    """A module with experts, whose forward pass is the exchange: for torch to call with other parameters."""

    def __init__(self, experts: torch.nn.Module, exchange: Any):
        super().__init__()
        self.experts = experts
        self.exchange = exchange

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.exchange(hidden, chosen, weights)


def own_experts(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a parameter of experts, (experts of the rank, ...), as a plain tensor."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
