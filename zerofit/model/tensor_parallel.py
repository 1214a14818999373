"""Tensor parallelism: a model of transformers, cut in place. Each rank keeps its share of the layers that the family's
plan names, under the names that they have in the full model.

In the dtype in which safetensors files store them, weights are mapped into memory and not read: what a rank does not
keep takes none, and the ranks of a host share what they have read. So they are cut first, and converted then. Random
weights are drawn by the first rank, the only one that has all of them for a moment.

A layer that is cut by its outputs (columns) is followed by one that is cut by its inputs (rows): between the two, each
rank has some of the channels. The first stays what it was, with fewer outputs.

Outside of them each rank has a part of the tokens (sequence parallelism within tensor parallelism, Korthikanti et al.
2022, arXiv:2205.05198), so that norms, residuals and dropout are computed and kept once. A module whose layers are cut
by columns joins the parts of its input, and the layer that is cut by rows adds up what the ranks have found and leaves
each its part: an all-gather and a reduce-scatter, which together exchange the bytes of one all-reduce. Where no
gradient is needed (evaluation, generation) every rank has all tokens, and an all-reduce adds up: rows may be single
tokens there.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import distributed, nn

from zerofit.model.export import read_weight_headers
from zerofit.model.families import family_of, require_plan
from zerofit.model.parameters import replace_parameters
from zerofit.model.stages import IdentityLayer
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of all weights in a folder of safetensors files; None: unknown, or the weights have several."""
    dtypes = {dtype for _, dtype in read_weight_headers(Path(name)).values()}
    return SAFETENSORS_DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None


def draw_share(make: Callable[[], "PreTrainedModel"], keep: Callable[["PreTrainedModel"], None]) -> "PreTrainedModel":
    """Return this rank's share of the model that `make` draws. The first rank draws it, and broadcasts each parameter
    to the others, so that all have the same bits; all ranks call this together. `keep`: removes what is not in this
    rank's share."""
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    draws = ranks == 1 or distributed.get_rank() == 0
    with contextlib.nullcontext() if draws else init_empty_weights(include_buffers=False):  # rotary frequencies
        model = make()
    model.tie_weights()  # within the context each name has got a parameter of its own
    drawn = {id(parameter): parameter.data for parameter in model.parameters()}
    keep(model)
    parameters_by_id = {id(parameter): parameter for parameter in model.parameters()}
    device = torch.device("cpu")
    if ranks > 1 and distributed.get_backend() != "gloo":
        device = torch.accelerator.current_accelerator() or device
    shares = {}
    for key in list(drawn):
        whole = drawn.pop(key)
        if ranks > 1:
            whole = torch.empty_like(whole, device=device) if whole.is_meta else whole.to(device)
            distributed.broadcast(whole, 0)
            whole = whole.cpu()
        if key in parameters_by_id:
            parameter = parameters_by_id[key]
            cut = getattr(parameter, "cut", None)
            shares[key] = nn.Parameter(whole if cut is None else cut.of(whole), parameter.requires_grad)
            shares[key].__dict__.update(parameter.__dict__)
            if hasattr(parameter, "gradient_hook"):
                shares[key].register_hook(parameter.gradient_hook)
    replace_parameters(model, shares)
    return model


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share each layer (a tensor-parallel group), and the place of this rank among them."""

    group: Any  # torch.distributed.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True)
class Cut:
    """This rank's share of a parameter of shape `shape`: the indices within `ranges` of dimension `dim`."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Elements of the share."""
        width = sum(stop - start for start, stop in self.ranges)
        return math.prod(self.shape) // self.shape[self.dim] * width

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Copy this rank's share of a whole parameter."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def put(self, whole: torch.Tensor, share: torch.Tensor) -> None:
        """Write the share, in any shape, to its place in the whole parameter."""
        width = sum(stop - start for start, stop in self.ranges)
        at = 0
        share = share.view(*self.shape[: self.dim], width, *self.shape[self.dim + 1 :])
        for start, stop in self.ranges:
            whole.narrow(self.dim, start, stop - start).copy_(share.narrow(self.dim, at, stop - start))
            at += stop - start

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (first elements in the flattened whole, lengths) of the runs that are contiguous both there and in
        the flattened share. Both are in the same order: the share's elements lie in it one run after the other."""
        inner = math.prod(self.shape[self.dim + 1 :])
        starts, stops = (np.array(edge, dtype=np.int64) for edge in zip(*self.ranges))
        rows = np.arange(math.prod(self.shape[: self.dim]), dtype=np.int64)[:, None] * self.shape[self.dim]
        return ((rows + starts) * inner).ravel(), np.tile((stops - starts) * inner, len(rows))


def cut_for(shape: Sequence[int], dim: int, rank: int, size: int, parts: int = 1) -> Cut:
    """Return the share of rank `rank` of `size`. `parts`: matrices side by side along `dim`, each of which is cut."""
    width = shape[dim] // parts
    inside = width * rank // size, width * (rank + 1) // size
    ranges = tuple((part * width + inside[0], part * width + inside[1]) for part in range(parts))
    return Cut(tuple(shape), dim, ranges)


def cut_parameter(parameter: torch.nn.Parameter, cut: Cut) -> None:
    """Keep this rank's share of a parameter, which remembers the cut as its attribute `cut`."""
    parameter.data = cut.of(parameter.data)
    # tensor_model_parallel is DeepSpeed's mark: its norm counts what is not marked on one rank only.
    vars(parameter).update(cut=cut, tensor_model_parallel=True)


def shard_rows(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return [first, last + 1) of `count` rows, as torch.chunk cuts them: later ranks have fewer, or none."""
    rows = -(-count // size)
    return min(rank * rows, count), min((rank + 1) * rows, count)


def keep_rows(model: torch.nn.Module, rank: int, size: int) -> None:
    """Keep this rank's rows of all parameters."""
    for parameter in model.parameters():
        vars(parameter)["ds_shape"] = parameter.shape  # peft reads the whole shape of GPT-2's layers here
        cut_parameter(parameter, Cut(tuple(parameter.shape), 0, (shard_rows(parameter.shape[0], rank, size),)))


@torch.no_grad()
def join_shares(share: torch.Tensor, cut: Cut, tensor: TensorGroup) -> torch.Tensor:
    """Gather the whole parameter from the ranks' shares. All ranks of the group call it together, and get it."""
    cuts = [cut_for(cut.shape, cut.dim, rank, tensor.size, len(cut.ranges)) for rank in range(tensor.size)]
    padded_share = share.new_zeros(max(each.numel for each in cuts))
    padded_share[: share.numel()] = share.reshape(-1)
    parts = [torch.empty_like(padded_share) for _ in cuts]
    torch.distributed.all_gather(parts, padded_share, group=tensor.group)
    whole = share.new_empty(cut.shape)
    for each, part in zip(cuts, parts):
        each.put(whole, part[: each.numel])
    return whole


# --------------------------------------------------------------------------------------------- what ranks exchange


TensorExchange = Callable[[torch.Tensor], torch.Tensor]


class CollectiveFunction(torch.autograd.Function):
    """Exchange a tensor between ranks in the forward pass, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: TensorExchange, backward: TensorExchange) -> torch.Tensor:
        ctx.exchange = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.exchange(gradient), None, None


def all_reduce_sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of all ranks' tensors."""
    summed = tensor.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(summed, group=group)
    return summed


def reduce_from_tensor_parallel(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of all ranks' tensors; the backward pass gives each of them the whole gradient."""
    return CollectiveFunction.apply(tensor, partial(all_reduce_sum, group=group), torch.Tensor.contiguous)


class ReduceScatterTokens(torch.autograd.Function):
    """Sum the ranks' tensors (B, T, H), add a bias, and keep this rank's tokens: (1, B x T / ranks, H), filled up.

    The backward pass gathers the gradients of all tokens.
    """

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, bias: torch.Tensor | None, tensor: TensorGroup) -> torch.Tensor:
        ctx.shape = share.shape[:2]
        ctx.tensor = tensor
        part = _reduce_scatter(share, tensor)
        return part if bias is None else part.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        whole = _all_gather(gradient, ctx.shape, ctx.tensor)
        return whole, whole.sum((0, 1)) if ctx.needs_input_grad[1] else None, None


def _pad_tokens(whole: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    tokens = whole.flatten(0, 1).contiguous()
    fill = -len(tokens) % tensor.size
    return F.pad(tokens, (0, 0, 0, fill)) if fill else tokens


def _all_gather(part: torch.Tensor, shape: torch.Size, tensor: TensorGroup) -> torch.Tensor:
    tokens = part.new_empty(tensor.size * part.shape[1], part.shape[2])
    distributed.all_gather_into_tensor(tokens, part[0].contiguous(), group=tensor.group)
    return tokens[: shape.numel()].view(*shape, -1)


def _reduce_scatter(share: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    tokens = _pad_tokens(share, tensor)
    part = tokens.new_empty(1, len(tokens) // tensor.size, tokens.shape[1])
    distributed.reduce_scatter_tensor(part[0], tokens, group=tensor.group)
    return part


class TokenParts:
    """The part of a micro-batch's tokens that belongs to this rank. Tokens are counted through all rows, (B, T, H) as
    (B x T, H), and filled up to a multiple of the ranks: a part is contiguous, and has the shape (1, B x T / ranks,
    H)."""

    def __init__(self, tensor: TensorGroup):
        self.tensor = tensor
        self._shape: torch.Size | None = None  # (B, T); None: every rank has all tokens
        self._incoming: torch.Tensor | None = None  # from the stage before, of a pipeline
        self._outgoing: torch.Tensor | None = None  # for the next stage

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of hidden states (B, T, H) that all ranks have, or the part that `receive` got."""
        self._shape = hidden.shape[:2] if torch.is_grad_enabled() else None
        if self._shape is None:
            return hidden
        received = self._incoming
        self._incoming = None
        if received is not None:
            return received
        return CollectiveFunction.apply(hidden, self._own, partial(_all_gather, shape=self._shape, tensor=self.tensor))

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return _pad_tokens(whole, self.tensor).chunk(self.tensor.size)[self.tensor.rank].unsqueeze(0).clone()

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Gather all tokens (B, T, H), to be read by layers that are cut: the gradients of their shares add up."""
        if self._shape is None:
            return part
        join = partial(_all_gather, shape=self._shape, tensor=self.tensor)
        return CollectiveFunction.apply(part, join, partial(_reduce_scatter, tensor=self.tensor))

    def sum_shares(self, share: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of the sum of all ranks' shares (B, T, H) and of a bias that all of them have."""
        if self._shape is not None:
            return ReduceScatterTokens.apply(share, bias, self.tensor)
        whole = all_reduce_sum(share, self.tensor.group)
        return whole if bias is None else whole + bias

    def leave(self, module: nn.Module, args: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Gather all tokens after the last norm, as a hook of it. Where a later stage of a pipeline has the norm, the
        part is for `send`, and the model's code goes on with something of its shape."""
        if self._shape is None:
            return hidden
        if hidden.requires_grad:  # recomputation needs this micro-batch's value; others may have come between
            hidden.register_hook(partial(self._return_to, self._shape))
        if not isinstance(module, IdentityLayer):
            return self.join(hidden)
        self._outgoing = hidden
        return hidden.new_zeros(()).expand(*self._shape, hidden.shape[-1])

    def receive(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a stand-in (B, T, H) for the model's code, instead of a part that comes from the stage before."""
        if not torch.is_grad_enabled():
            return part
        self._incoming = part
        return part.new_zeros(()).expand(*shape, part.shape[-1])

    def send(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the next stage receives instead of the model's hidden states."""
        outgoing = self._outgoing
        self._outgoing = None
        return hidden if outgoing is None else outgoing

    def _return_to(self, shape: torch.Size, gradient: torch.Tensor) -> None:
        self._shape = shape


# ------------------------------------------------------------------------------------------- layers that are cut


class RowLinear(nn.Module):
    """A linear layer that is cut by its inputs; every rank has its bias. `layer`: an nn.Linear, or transformers'
    Conv1D, whose weight is transposed; its weight is cut already.

    Shapes: (B, T, inputs of this rank) -> this rank's tokens of (B, T, outputs).
    """

    def __init__(self, layer: Any, parts: TokenParts):
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.parts = parts
        self.is_transposed = is_transposed(layer)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        share = F.linear(inputs, self.weight.t() if self.is_transposed else self.weight)
        return self.parts.sum_shares(share, self.bias)


class SharedNorm(nn.Module):
    """An RMS norm over channels that are split among the ranks. `norm`: computes in fp32 up to its result (T5's, OLMo
    2's); its weight is cut already.

    Shapes: (..., channels of this rank), and the same of the result, in the input's dtype.
    """

    def __init__(self, norm: Any, tensor: TensorGroup):
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon
        self.tensor = tensor
        self.channels = norm.weight.cut.shape[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        add_up = partial(all_reduce_sum, group=self.tensor.group)
        squares = CollectiveFunction.apply(wide.pow(2).sum(-1, keepdim=True), add_up, add_up)
        return (self.weight * (wide * torch.rsqrt(squares / self.channels + self.eps))).to(hidden.dtype)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the weight is (inputs, outputs), as GPT-2 has it, and not (outputs, inputs)."""
    return type(layer).__name__ == "Conv1D"


class VocabularyShare:
    """This rank's rows [start, stop) of the vocabulary, and the exchanges that compute a loss on shares of logits."""

    def __init__(self, tensor: TensorGroup, vocab_size: int):
        edges = [vocab_size * rank // tensor.size for rank in range(tensor.size + 1)]
        self.tensor = tensor
        self.sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        self.start = edges[tensor.rank]
        self.stop = edges[tensor.rank + 1]

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids as rows of this share, whether they are in it); ids outside of it become row 0."""
        is_own = (ids >= self.start) & (ids < self.stop)
        return (ids - self.start).masked_fill(~is_own, 0), is_own

    def log_softmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log probabilities (N, rows of this rank) over the whole vocabulary, the logsumexp (N, 1) of the
        whole vocabulary); `logits` is overwritten."""
        max_logits = logits.amax(dim=-1, keepdim=True)
        distributed.all_reduce(max_logits, distributed.ReduceOp.MAX, group=self.tensor.group)
        logits -= max_logits
        log_sums = all_reduce_sum(logits.exp().sum(dim=-1, keepdim=True), self.tensor.group).log_()
        return logits.sub_(log_sums), log_sums.add_(max_logits)

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors."""
        return all_reduce_sum(tensor, self.tensor.group)

    def join(self, own: torch.Tensor) -> torch.Tensor:
        """Join all ranks' columns side by side, on every rank; the gradient of a share is its part of the whole
        one."""
        return CollectiveFunction.apply(own, self._all_columns, lambda gradient: gradient[..., self.start : self.stop])

    def _all_columns(self, own: torch.Tensor) -> torch.Tensor:
        own = F.pad(own, (0, max(self.sizes) - own.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in self.sizes]
        distributed.all_gather(parts, own, group=self.tensor.group)
        return torch.cat([part[..., :size] for part, size in zip(parts, self.sizes)], dim=-1)


class VocabularyEmbedding(nn.Embedding):
    """A lookup table that is cut by its rows.

    Shapes: ids (B, T) -> (B, T, H), the same on all ranks.
    """

    def __init__(self, table: nn.Embedding, tensor: TensorGroup, vocab_size: int):
        share = VocabularyShare(tensor, vocab_size)
        padding = table.padding_idx
        padding = padding - share.start if padding is not None and share.start <= padding < share.stop else None
        rows, width = table.weight.shape
        super().__init__(rows, width, padding_idx=padding, _weight=table.weight.detach())
        self.weight = table.weight
        self.share = share

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, is_own = self.share.own(ids)
        embedded = super().forward(rows).masked_fill(~is_own.unsqueeze(-1), 0)
        return reduce_from_tensor_parallel(embedded, self.share.tensor.group)


class VocabularyHead(nn.Module):
    """The layer from hidden states to logits, cut by its outputs; the chunked loss (zerofit/model/loss.py) computes on
    shares of logits, and here they are joined. The gradient of its input is that of a share.

    Shapes: (..., H) -> (..., V), the same on all ranks.
    """

    def __init__(self, head: Any, tensor: TensorGroup, vocab_size: int):
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias
        self.share = VocabularyShare(tensor, vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.share.join(F.linear(hidden, self.weight, self.bias))


# ------------------------------------------------------------------------------------------------- a model that is cut


def check_split(config: "PretrainedConfig", size: int, source: str) -> None:
    """Raises UserError where `size` ranks cannot share the layers of a model: its family has no plan, or they do not
    divide its heads or its MLP's channels evenly."""
    plan = family_of(config).tensor_plan
    degree = f"{source}: tensor_parallel.autotp_size = {size}"
    alternative = "Use a strategy without it, such as zero3"
    if plan is None:
        raise UserError(f"{degree}: tensor parallelism does not support {config.model_type}. {alternative}")
    # GPT-2's n_inner may be None: then it is four times the hidden size
    widths = {name: getattr(config, name) or 4 * config.hidden_size for name in plan.widths}
    uneven = {name: width for name, width in widths.items() if width % size}
    if not uneven:
        return
    common = math.gcd(*widths.values())
    remedy = f"Possible: the divisors of {common}" if common > 1 else alternative
    listed = ", ".join(f"{name} = {width}" for name, width in uneven.items())
    raise UserError(f"{degree} does not divide the model's {listed}. {remedy}")


def split_model(model: "PreTrainedModel", tensor: TensorGroup) -> None:
    """Keep this rank's share of a causal model, whose weights are the same on all ranks of the group; between the
    layers that are cut, the ranks share the tokens of its `token_parts`."""
    plan = require_plan(family_of(model.config).tensor_plan)
    parts = TokenParts(tensor)
    vars(model)["token_parts"] = parts
    readers = set()
    for path, layer in list(model.named_modules()):
        owner, _, name = path.rpartition(".")
        if name in plan.columns:
            for parameter, dim in ((layer.weight, 1 if is_transposed(layer) else 0), (layer.bias, 0)):
                if parameter is not None:
                    cut = cut_for(parameter.shape, dim, tensor.rank, tensor.size, plan.columns[name])
                    cut_parameter(parameter, cut)
            width = "nf" if is_transposed(layer) else "out_features"
            setattr(layer, width, getattr(layer, width) // tensor.size)
            readers.add(owner)
        elif name in plan.rows:
            weight = layer.weight
            cut_parameter(weight, cut_for(weight.shape, 0 if is_transposed(layer) else 1, tensor.rank, tensor.size))
            setattr(model.get_submodule(owner), name, RowLinear(layer, parts))
        elif name in plan.norms:
            cut_parameter(layer.weight, cut_for(layer.weight.shape, 0, tensor.rank, tensor.size))
            setattr(model.get_submodule(owner), name, SharedNorm(layer, tensor))
        for attribute in plan.own_widths:
            if hasattr(layer, attribute):
                setattr(layer, attribute, getattr(layer, attribute) // tensor.size)
    for owner in readers:
        model.get_submodule(owner).register_forward_pre_hook(partial(_join_input, parts), with_kwargs=True)
    _share_tokens(model, parts)
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    rows = model.config.vocab_size
    over_tokens = {id(each): each for module in (table, head) for each in module.parameters()}
    for parameter in over_tokens.values():  # tied ones once
        cut_parameter(parameter, cut_for(parameter.shape, 0, tensor.rank, tensor.size))
    if isinstance(table, nn.Embedding):  # another stage of a pipeline may hold it
        model.set_input_embeddings(VocabularyEmbedding(table, tensor, rows))
    if hasattr(head, "weight"):
        model.set_output_embeddings(VocabularyHead(head, tensor, rows))


def _join_input(
    parts: TokenParts, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": parts.join(kwargs["hidden_states"])}
    return (parts.join(args[0]), *args[1:]), kwargs


def _share_tokens(model: "PreTrainedModel", parts: TokenParts) -> None:
    """Let each rank have a part of the tokens, from the dropout of the embeddings, or the first layer, to the last
    norm. Each rank computes a part of the gradients of a norm's weights, which add up."""
    body = model.base_model
    plan = require_plan(family_of(model.config).stage_plan)
    layers = getattr(body, plan.layers)
    last = getattr(body, plan.after[-1])
    dropouts = [module for name in plan.before if isinstance(module := getattr(body, name), torch.nn.Dropout)]
    first = dropouts[0] if dropouts else layers[0]
    first.register_forward_pre_hook(lambda module, args: (parts.enter(args[0]), *args[1:]))
    last.register_forward_hook(parts.leave)
    norms = (module for module in (*layers.modules(), last) if not isinstance(module, RowLinear))
    for parameter in (each for module in norms for each in module.parameters(recurse=False)):
        if parameter.requires_grad and not hasattr(parameter, "cut"):
            hook = partial(all_reduce_sum, group=parts.tensor.group)
            parameter.register_hook(hook)
            parameter.gradient_hook = hook  # a tensor that replaces the parameter needs it too
