"""Muon for the matrices of a model's blocks, AdamW for the rest, also where ranks hold parts of a matrix only.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); the size of the steps is that of Liu et al. 2025
(arXiv:2502.16982), so that AdamW's learning rate and weight decay serve both. The update is that of torch.optim.Muon
with adjust_lr_fn = "match_rms_adamw". torch's class needs full matrices. DeepSpeed's clips what Muon has made of the
gradient, and not the gradient, so that it would train something else than one process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed

from zerofit.compat.torch import leave_scaling_to_scaler
from zerofit.model.parameters import decay_groups, hidden_matrices, true_shape
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import OptimizerOptions

MOMENTUM = 0.95  # as everywhere
# of Newton-Schulz; Jordan's
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-7
UPDATE_RMS = 0.2  # of an update's elements: about that of AdamW's


@dataclass(frozen=True)
class Matrix:
    """A parameter that takes Muon's updates."""

    shape: torch.Size  # (rows, columns), or (experts, rows, columns): each expert's matrix is one by itself
    held: torch.Tensor  # the tensor of the optimizer that this rank's part of it lies in
    offset: int  # of this part in `held`, in elements
    ranges: tuple[tuple[int, int], ...]  # the elements [start, stop) of the flattened matrix that each rank has

    @property
    def is_split(self) -> bool:
        """No rank has all of it."""
        return (0, self.shape.numel()) not in self.ranges

    def gradient(self, rank: int) -> torch.Tensor:
        """A view of this rank's part."""
        start, stop = self.ranges[rank]
        return flat(self.held.grad)[self.offset : self.offset + stop - start]

    @property
    def scale(self) -> float:
        """Factor by which the orthogonalized update is multiplied."""
        return UPDATE_RMS * math.sqrt(max(self.shape[-2:]))


class Muon(torch.optim.AdamW):
    """Muon for the matrices of a model's blocks, and AdamW for all other parameters. `model`: before it is sharded, or
    after: parameters under ZeRO-3 know their shapes. Raises UserError where it has no such matrices."""

    def __init__(self, model: torch.nn.Module, recipe: OptimizerOptions, fused: bool) -> None:
        matrices = hidden_matrices(model)
        if not matrices:
            raise UserError(f"optim = muon: a {type(model).__name__} has no blocks with matrices. Use --optim adamw")
        chosen = {id(parameter) for parameter in matrices.values()}
        rest = decay_groups((each for each in model.parameters() if id(each) not in chosen), recipe.weight_decay)
        first: dict[str, Any] = {"params": [*matrices.values()], "weight_decay": recipe.weight_decay, "muon": True}
        super().__init__(
            [first, *({**group, "muon": False} for group in rest)],
            lr=recipe.learning_rate,
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            fused=fused or None,
        )
        leave_scaling_to_scaler(self)
        self.dtype = torch.float32 if recipe.precision in (None, "fp32") else torch.bfloat16  # of Newton-Schulz
        self.matrices = {
            name: Matrix(shape := true_shape(parameter), parameter, 0, ((0, shape.numel()),))
            for name, parameter in matrices.items()
        }
        self.num_others = sum(len(group["params"]) for group in rest)
        self.rank = 0
        self.group = None

    def locate(self, state: Any, group: Any) -> None:
        """Find where the parts of each matrix are, once the model is sharded. All ranks call it together. `group`: the
        process group of the ranks that shard the matrices; None: all."""
        places = {name: state.place(name) for name in self.matrices}
        own = {name: (start, stop) for name, (_, _, start, stop) in places.items()}
        every: list[Any] = [own]
        if distributed.is_initialized():
            self.rank = distributed.get_rank(group)
            self.group = group
            every = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(every, own, group)
        for name, (held, offset, _, _) in places.items():
            ranges = tuple(each[name] for each in every)
            self.matrices[name] = replace(self.matrices[name], held=held, offset=offset, ranges=ranges)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = self.param_groups
        self.param_groups = [group for group in every if not group["muon"]]
        loss = super().step(closure)
        self.param_groups = every
        for group in every:
            if group["muon"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Muon's step; gradients become the updates. Under ZeRO a tensor of the group has parts of many matrices."""
        tensors = {id(tensor): tensor for tensor in group["params"] if tensor.grad is not None}
        for tensor in tensors.values():
            state = self.state[tensor]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(tensor)
            state["step"] += 1
            average = flat(state["exp_avg"])
            gradient = flat(tensor.grad)
            average.lerp_(gradient, 1 - MOMENTUM)
            gradient.lerp_(average, MOMENTUM)
        matrices = [matrix for matrix in self.matrices.values() if id(matrix.held) in tensors]
        for matrix in matrices:
            if matrix.ranges[self.rank] == (0, matrix.shape.numel()):
                part = matrix.gradient(self.rank)
                # No name is given to what is made: it would stay while the next one is made.
                part.copy_(orthogonal(part.to(self.dtype).view(matrix.shape)).view(-1)).mul_(matrix.scale)
        split = [matrix for matrix in matrices if matrix.is_split]
        ranks = len(split[0].ranges) if split else 1
        for first in range(0, len(split), ranks):
            self._exchange(split[first : first + ranks])
        for tensor in tensors.values():
            flat(tensor).mul_(1 - group["lr"] * group["weight_decay"]).add_(flat(tensor.grad), alpha=-group["lr"])

    def _exchange(self, matrices: Sequence[Matrix]) -> None:
        """Each rank gets one of the matrices in full, and sends the others their parts of what it makes of it."""
        parts = [matrix.gradient(self.rank) for matrix in matrices]
        sizes = [len(part) for part in parts]
        sizes += [0] * (len(matrices[0].ranges) - len(sizes))  # ranks that get none
        own = matrices[self.rank] if self.rank < len(matrices) else None
        others = [stop - start for start, stop in own.ranges] if own else [0] * len(sizes)
        sent = torch.cat(parts).to(self.dtype)
        full = sent.new_empty(sum(others))
        distributed.all_to_all_single(full, sent, others, sizes, self.group)
        if own:
            full = orthogonal(full.view(own.shape)).view(-1)
        distributed.all_to_all_single(sent, full, sizes, others, self.group)
        for matrix, part, made in zip(matrices, parts, sent.split(sizes)):
            part.copy_(made).mul_(matrix.scale)

    def describe(self) -> str:
        """One line for the log: how many tensors Muon updates, and how many AdamW."""
        weights = sum(matrix.shape.numel() for matrix in self.matrices.values())
        return (
            f"Muon for {len(self.matrices)} matrices ({weights:,} weights), AdamW for {self.num_others} other tensors"
        )


def flat(tensor: Any) -> torch.Tensor:
    """A view of a tensor's elements in one dimension, without a gradient."""
    return tensor.detach().view(-1)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with orthogonal rows or columns, about: Newton-Schulz iterations, in the matrix's dtype.
    `matrix`: (rows, columns), or (experts, rows, columns). It may be overwritten."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)).view(-1, *x.shape[-2:])
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrix.shape).contiguous()
