"""Layers of which each rank computes a share. They have the parameters, and the names, of the layers they replace.

A layer that is cut by its outputs (columns) is followed by one that is cut by its inputs (rows): between the two, each
rank has some of the channels. The first stays what it was, with fewer outputs. The ranks meet where the second adds up
what they have found, and where the next ones read that (tokens.py).
"""

import itertools

import torch
import torch.nn.functional as F
from torch import distributed, nn

from zerofit.model.tensor_parallel.cut import TensorGroup
from zerofit.model.tensor_parallel.tokens import TokenParts, total


class Copied(torch.autograd.Function):
    """The same tensor for every rank's share of a layer; the gradients of the shares add up."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return total(gradient, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum of all ranks' tensors, on every rank; each of them gets the whole gradient."""

    @staticmethod
    def forward(ctx, tensor, group):
        return total(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class RowLinear(nn.Module):
    """A linear layer that is cut by its inputs; every rank has its bias.

    Shapes: (B, T, inputs of this rank) -> this rank's tokens of (B, T, outputs).

    Args:
        layer: an nn.Linear, or transformers' Conv1D, whose weight is transposed; its weight is cut already.
    """

    def __init__(self, layer: nn.Module, parts: TokenParts):
        super().__init__()
        self.weight, self.bias, self.parts = layer.weight, layer.bias, parts
        self.is_transposed = is_transposed(layer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        share = F.linear(inputs, self.weight.t() if self.is_transposed else self.weight)
        return self.parts.add_up(share, self.bias)


class SharedNorm(nn.Module):
    """An RMS norm over channels of which each rank has some.

    Shapes: (..., channels of this rank), and the same of the result, in the input's dtype.

    Args:
        norm: computes in fp32 up to its result (T5's, OLMo 2's); its weight is cut already.
    """

    def __init__(self, norm: nn.Module, tensor: TensorGroup):
        super().__init__()
        self.weight, self.eps, self.tensor = norm.weight, norm.variance_epsilon, tensor
        self.channels = norm.weight.cut.shape[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide, group = hidden.float(), self.tensor.group
        squares = Copied.apply(Summed.apply(wide.pow(2).sum(-1, keepdim=True), group), group)
        return (self.weight * (wide * torch.rsqrt(squares / self.channels + self.eps))).to(hidden.dtype)


def is_transposed(layer: nn.Module) -> bool:
    """Whether the weight is (inputs, outputs), as GPT-2 has it, and not (outputs, inputs)."""
    return type(layer).__name__ == "Conv1D"


class VocabularyShare:
    """This rank's rows [start, stop) of the vocabulary, and what it takes to compute a loss on shares of logits."""

    def __init__(self, tensor: TensorGroup, vocab_size: int):
        edges = [vocab_size * rank // tensor.size for rank in range(tensor.size + 1)]
        self.tensor, self.sizes = tensor, [stop - start for start, stop in itertools.pairwise(edges)]
        self.start, self.stop = edges[tensor.rank], edges[tensor.rank + 1]

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids as rows of this share, whether they are in it); rows that are not in it are 0."""
        is_own = (ids >= self.start) & (ids < self.stop)
        return (ids - self.start).masked_fill(~is_own, 0), is_own

    def log_softmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log probabilities (N, rows of this rank) over the whole vocabulary, the logarithms (N, 1) of what divides
        them: the logsumexp of the whole vocabulary); `logits` is overwritten."""
        max_logits = logits.amax(dim=-1, keepdim=True)
        distributed.all_reduce(max_logits, distributed.ReduceOp.MAX, group=self.tensor.group)
        logits -= max_logits
        log_sums = total(logits.exp().sum(dim=-1, keepdim=True), self.tensor.group).log_()
        return logits.sub_(log_sums), log_sums.add_(max_logits)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors."""
        return total(tensor, self.tensor.group)


class VocabularyEmbedding(nn.Embedding):
    """A lookup table that is cut by its rows.

    Shapes: ids (B, T) -> (B, T, H), the same on all ranks.
    """

    def __init__(self, table: nn.Embedding, tensor: TensorGroup, vocab_size: int):
        share, padding = VocabularyShare(tensor, vocab_size), table.padding_idx
        padding = padding - share.start if padding is not None and share.start <= padding < share.stop else None
        super().__init__(*table.weight.shape, padding_idx=padding, _weight=table.weight.detach())
        self.weight, self.share = table.weight, share

    def forward(self, ids):
        rows, is_own = self.share.own(ids)
        embedded = super().forward(rows).masked_fill(~is_own.unsqueeze(-1), 0)
        return Summed.apply(embedded, self.share.tensor.group)


class Joined(torch.autograd.Function):
    """All ranks' columns side by side, on every rank; the gradient of each share is its part of the whole one."""

    @staticmethod
    def forward(ctx, tensor, share):
        ctx.share = share
        own = F.pad(tensor, (0, max(share.sizes) - tensor.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in share.sizes]
        distributed.all_gather(parts, own, group=share.tensor.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, share.sizes)], dim=-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[..., ctx.share.start : ctx.share.stop], None


class VocabularyHead(nn.Module):
    """The layer from hidden states to logits, cut by its outputs; the chunked loss (zerofit/model/loss.py) computes on
    shares of logits, and here they are joined. The gradient of its input is that of a share.

    Shapes: (..., H) -> (..., V), the same on all ranks.
    """

    def __init__(self, head: nn.Module, tensor: TensorGroup, vocab_size: int):
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self.share = VocabularyShare(tensor, vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Joined.apply(F.linear(hidden, self.weight, self.bias), self.share)
