"""Mixtures of experts: the routers' auxiliary loss, and how evenly tokens are spread over experts.

The auxiliary loss is the model's own `load_balancing_loss_func` (Fedus et al. 2022, Switch Transformer, equations 4 to
6), of one micro-batch: E times the sum over experts of (share of the choices) x (mean probability). It is a product of
two means, so the global batch cut into other micro-batches has another one. What is optimised is

    loss + router_aux_loss_coef * sum over micro-batches of (auxiliary loss) * (tokens of it / tokens of global batch)

where `loss` is the language model's. Padding is neither counted as a choice nor as a token.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

ROUTER_CLASS_SUFFIX = "TopKRouter"  # class names in transformers: the first output of such a module is its logits


class RoutingFigures(NamedTuple):
    """The routers' figures in metrics.jsonl."""

    aux_loss: float | None
    expert_load_max: float
    expert_load_min: float


class Routing:
    """Counts the choices of a model's routers in the micro-batches of an update, on this rank. `model`: a causal model
    with experts. Its auxiliary loss counts if its configuration has output_router_logits."""

    def __init__(self, model: Any):
        self.num_experts = model.num_experts
        self.top_k = model.num_experts_per_tok
        self.coefficient = model.router_aux_loss_coef if model.config.output_router_logits else 0.0
        self._auxiliary_loss = sys.modules[type(model).__module__].load_balancing_loss_func
        self._logits: list[torch.Tensor] | None = None  # (B * T, E) of each layer, while a forward pass is watched
        routers = [module for module in model.modules() if type(module).__name__.endswith(ROUTER_CLASS_SUFFIX)]
        assert routers, f"{type(model).__name__} has no {ROUTER_CLASS_SUFFIX}: its loss of experts would be 0"
        for router in routers:
            router.register_forward_hook(self._note)
        self.begin(1.0)

    def describe(self, autocast: bool) -> list[str]:
        """Lines for the log. `autocast`: trained weights are in fp32, and autocast casts them for the products that it
        knows."""
        auxiliary = "no auxiliary loss (--config_overrides output_router_logits=true adds it)"
        if self.coefficient:
            auxiliary = f"auxiliary loss of the routers, times {self.coefficient:g}"
        lines = [f"experts   {self.top_k} of {self.num_experts} for each token; {auxiliary}"]
        if autocast:
            lines.append("experts   computed in fp32, since autocast does not reach them. Use zero1 or fsdp2")
        return lines

    def begin(self, targets: float, tokens: float = 1.0) -> None:
        """Begin an update. `targets`: trained tokens of the global batch. `tokens`: its tokens without padding."""
        self._targets_per_token = targets / max(tokens, 1.0)
        self._auxiliary: torch.Tensor | float = 0.0  # summed over micro-batches, each times its tokens
        self._choices: torch.Tensor | int = 0  # (layers, E)

    @contextmanager
    def watched(self) -> Iterator[list[torch.Tensor]]:
        """Record the routers' logits (B * T, E), layer by layer, of the forward pass in this context. Passes that
        recompute activations are outside of it."""
        self._logits = []
        try:
            yield self._logits
        finally:
            self._logits = None

    def _note(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._logits is not None:
            self._logits.append(output[0])

    @torch.compiler.disable
    def observe(self, loss: torch.Tensor, logits: list[torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
        """Count a micro-batch. `loss`: of the language model, summed over its trained tokens. `mask`: (B, T), 0 where
        a position is padding.

        Returns: the same loss. Its gradient is that of the loss and of the micro-batch's part of the auxiliary loss,
            which whoever divides the loss by the trained tokens of the global batch so divides by its tokens.
        """
        is_token = torch.ones(len(logits[0]), device=loss.device) if mask is None else mask.reshape(-1).float()
        # In half precision sums over tokens have too few digits, and choices are not the routers', which round later.
        logits_fp32 = tuple(layer.float() for layer in logits)
        with torch.no_grad():
            counts = is_token.long().repeat_interleave(self.top_k)
            chosen = [layer.topk(self.top_k, dim=-1).indices.flatten() for layer in logits_fp32]
            empty = counts.new_zeros(self.num_experts)
            self._choices = self._choices + torch.stack([empty.scatter_add(0, layer, counts) for layer in chosen])
        if not self.coefficient:
            return loss
        auxiliary = self._auxiliary_loss(logits_fp32, self.num_experts, self.top_k, mask) * is_token.sum()
        self._auxiliary = self._auxiliary + auxiliary.detach()
        added = self.coefficient * self._targets_per_token * auxiliary
        return loss + (added - added.detach())

    @property
    def sums(self) -> list[float]:
        """The numbers that ranks sum up: the auxiliary loss, and how often each expert of each layer was chosen."""
        return [float(self._auxiliary), *torch.as_tensor(self._choices).flatten().tolist()]

    def figures(self, sums: list[float], targets: float = 0.0, tokens: float = 1.0) -> RoutingFigures:
        """Compute the figures of metrics.jsonl. A load is an expert's share of its layer's choices times E: 1 is even;
        the largest and the smallest of all layers. `tokens`: of the global batch, without padding."""
        choices = torch.tensor(sums[1:], dtype=torch.float64).view(-1, self.num_experts)
        load = choices * self.num_experts / choices.sum(dim=1, keepdim=True)
        auxiliary = sums[0] / max(tokens, 1.0) if self.coefficient else None
        return RoutingFigures(auxiliary, load.max().item(), load.min().item())
