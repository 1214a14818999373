"""Sequence parallelism within tensor parallelism (Korthikanti et al. 2022, arXiv:2205.05198): between the layers that
are cut, each rank has a part of the tokens, so that norms, residuals and dropout are computed and kept once.

A module whose layers are cut by columns joins the parts of its input, and the layer that is cut by rows adds up what
the ranks have found and leaves each its part: an all-gather and a reduce-scatter, which together exchange the bytes of
one all-reduce. Where no gradient is needed (evaluation, generation) every rank has all tokens, and an all-reduce adds
up: rows may be single tokens there.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import distributed, nn

from zerofit.model.stages import Passed
from zerofit.model.tensor_parallel.cut import TensorGroup


class TokenParts:
    """Which tokens of the micro-batch that passes through this rank has.

    Tokens are counted through all rows, (B, T, H) as (B x T, H), and filled up to a multiple of the ranks: a part is
    contiguous, and has the shape (1, B x T / ranks, H).
    """

    def __init__(self, tensor: TensorGroup):
        self.tensor = tensor
        self._shape: torch.Size | None = None  # (B, T); None: every rank has all tokens
        self._incoming = self._outgoing = None  # between the stages of a pipeline

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of hidden states (B, T, H) that all ranks have, or the part that `receive` was given."""
        self._shape = hidden.shape[:2] if torch.is_grad_enabled() else None
        if self._shape is None:
            return hidden
        received, self._incoming = self._incoming, None
        return Taken.apply(hidden, self.tensor) if received is None else received

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """All tokens (B, T, H), to be read by layers that are cut: the gradients of their shares add up."""
        return part if self._shape is None else Gathered.apply(part, self._shape, self.tensor)

    def add_up(self, share: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of the sum of all ranks' shares (B, T, H) and of a bias that all of them have."""
        if self._shape is not None:
            return Scattered.apply(share, bias, self.tensor)
        summed = total(share, self.tensor.group)
        return summed if bias is None else summed + bias

    def leave(self, module: nn.Module, args: tuple, hidden: torch.Tensor) -> torch.Tensor:
        """All tokens behind the last norm, as a hook of it. Where a later stage of a pipeline has the norm, the part
        is for `send`, and the model's code goes on with something of its shape."""
        if self._shape is None:
            return hidden
        if hidden.requires_grad:  # what is recomputed then is of this micro-batch, and others may have come between
            hidden.register_hook(partial(self._return_to, self._shape))
        if not isinstance(module, Passed):
            return self.join(hidden)
        self._outgoing = hidden
        return self._placeholder(hidden, self._shape)

    def receive(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """What the model's code is given in place of a part that comes from the stage before.

        Args:
            shape: (B, T).
        """
        if not torch.is_grad_enabled():
            return part
        self._incoming = part
        return self._placeholder(part, shape)

    def send(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the next stage is sent in place of the model's hidden states."""
        outgoing, self._outgoing = self._outgoing, None
        return hidden if outgoing is None else outgoing

    def _placeholder(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return part.new_zeros(()).expand(*shape, part.shape[-1])

    def _return_to(self, shape: torch.Size, gradient: torch.Tensor) -> None:
        self._shape = shape


class Taken(torch.autograd.Function):
    """This rank's part of what all ranks have."""

    @staticmethod
    def forward(ctx, whole, tensor):
        ctx.shape, ctx.tensor = whole.shape[:2], tensor
        return _filled_up(whole, tensor).chunk(tensor.size)[tensor.rank].unsqueeze(0).clone()

    @staticmethod
    def backward(ctx, gradient):
        return _gather(gradient, ctx.shape, ctx.tensor), None


class Gathered(torch.autograd.Function):
    """All ranks' parts, on every rank; the gradients of the ranks add up."""

    @staticmethod
    def forward(ctx, part, shape, tensor):
        ctx.tensor = tensor
        return _gather(part, shape, tensor)

    @staticmethod
    def backward(ctx, gradient):
        return _scatter(gradient, ctx.tensor), None, None


class Scattered(torch.autograd.Function):
    """This rank's part of the sum of all ranks' tensors, and of a bias; each of them gets the whole gradient."""

    @staticmethod
    def forward(ctx, share, bias, tensor):
        ctx.shape, ctx.tensor = share.shape[:2], tensor
        part = _scatter(share, tensor)
        return part if bias is None else part.add_(bias)

    @staticmethod
    def backward(ctx, gradient):
        whole = _gather(gradient, ctx.shape, ctx.tensor)
        return whole, whole.sum((0, 1)) if ctx.needs_input_grad[1] else None, None


def total(tensor: torch.Tensor, group) -> torch.Tensor:
    """The sum of all ranks' tensors."""
    summed = tensor.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(summed, group=group)
    return summed


def _filled_up(whole: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    tokens = whole.flatten(0, 1).contiguous()
    fill = -len(tokens) % tensor.size
    return F.pad(tokens, (0, 0, 0, fill)) if fill else tokens


def _gather(part: torch.Tensor, shape: torch.Size, tensor: TensorGroup) -> torch.Tensor:
    tokens = part.new_empty(tensor.size * part.shape[1], part.shape[2])
    distributed.all_gather_into_tensor(tokens, part[0].contiguous(), group=tensor.group)
    return tokens[: shape.numel()].view(*shape, -1)


def _scatter(share: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    tokens = _filled_up(share, tensor)
    part = tokens.new_empty(1, len(tokens) // tensor.size, tokens.shape[1])
    distributed.reduce_scatter_tensor(part[0], tokens, group=tensor.group)
    return part
