"""Muon for the matrices of a model's blocks and AdamW for all other parameters, with full or sharded matrices.

Muon is by Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/). Updates are scaled as in Liu et al. 2025
(arXiv:2502.16982), so that both use AdamW's learning rate and weight decay. An update is that of torch.optim.Muon
with adjust_lr_fn = "match_rms_adamw". torch's class needs full matrices. DeepSpeed's clips the orthogonalized update
instead of the gradient, so its result would differ from that of one process.
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

MOMENTUM = 0.95  # the usual value
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-7  # smallest norm that a matrix is divided by
UPDATE_RMS = 0.2  # root mean square of an update's elements, about that of AdamW


@dataclass(frozen=True)
class Matrix:
    """A parameter that Muon updates, and where its parts are."""

    shape: torch.Size  # (rows, columns); or (experts, rows, columns), updated as one matrix per expert
    tensor: torch.Tensor  # the optimizer's tensor that contains this rank's part
    offset: int  # where this part begins in `tensor`, in elements
    ranges: tuple[tuple[int, int], ...]  # by rank: its elements [start, stop) of the flattened matrix

    @property
    def is_split(self) -> bool:
        """Return whether no rank has the full matrix."""
        return (0, self.shape.numel()) not in self.ranges

    def gradient(self, rank: int) -> torch.Tensor:
        """Return a flat view of the gradient of this rank's part. `rank`: this rank's number."""
        start, stop = self.ranges[rank]
        return flat(self.tensor.grad)[self.offset : self.offset + stop - start]

    @property
    def scale(self) -> float:
        """Factor by which the orthogonalized update is multiplied."""
        return UPDATE_RMS * math.sqrt(max(self.shape[-2:]))


class Muon(torch.optim.AdamW):
    """Muon for the matrices of a model's blocks, and AdamW for all other parameters. `model`: not sharded yet, or
    sharded by ZeRO-3, whose parameters know their full shapes. Raises UserError if it has no such matrices."""

    def __init__(self, model: torch.nn.Module, recipe: OptimizerOptions, fused: bool) -> None:
        matrices = hidden_matrices(model)
        if not matrices:
            raise UserError(f"optim = muon: a {type(model).__name__} has no blocks with matrices. Use --optim adamw")
        matrix_ids = {id(parameter) for parameter in matrices.values()}
        others = (parameter for parameter in model.parameters() if id(parameter) not in matrix_ids)
        adamw_groups = decay_groups(others, recipe.weight_decay)
        first: dict[str, Any] = {"params": [*matrices.values()], "weight_decay": recipe.weight_decay, "muon": True}
        super().__init__(
            [first, *({**group, "muon": False} for group in adamw_groups)],
            lr=recipe.learning_rate,
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            fused=fused or None,
        )
        leave_scaling_to_scaler(self)
        self.dtype = torch.float32 if recipe.precision in (None, "fp32") else torch.bfloat16  # for Newton-Schulz
        self.matrices = {
            name: Matrix(shape := true_shape(parameter), parameter, 0, ((0, shape.numel()),))
            for name, parameter in matrices.items()
        }
        self.num_others = sum(len(group["params"]) for group in adamw_groups)
        self.rank = 0
        self.group = None

    def locate(self, state: Any, group: Any) -> None:
        """Find where the parts of each matrix are. All ranks call this together once the model is sharded. `group`:
        the process group of the ranks that shard the matrices; None: all ranks."""
        places = {name: state.place(name) for name in self.matrices}
        local = {name: (start, stop) for name, (_, _, start, stop) in places.items()}
        by_rank: list[Any] = [local]
        if distributed.is_initialized():
            self.rank = distributed.get_rank(group)
            self.group = group
            by_rank = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(by_rank, local, group)
        for name, (tensor, offset, _, _) in places.items():
            ranges = tuple(ranges_of_rank[name] for ranges_of_rank in by_rank)
            self.matrices[name] = replace(self.matrices[name], tensor=tensor, offset=offset, ranges=ranges)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        all_groups = self.param_groups
        self.param_groups = [group for group in all_groups if not group["muon"]]
        loss = super().step(closure)
        self.param_groups = all_groups
        for group in all_groups:
            if group["muon"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Take Muon's step; gradients become updates in place. Under ZeRO a tensor has parts of many matrices."""
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
        matrices = [matrix for matrix in self.matrices.values() if id(matrix.tensor) in tensors]
        for matrix in matrices:
            if matrix.ranges[self.rank] == (0, matrix.shape.numel()):
                part = matrix.gradient(self.rank)
                # The update has no name: a variable would keep it in memory while the next one is computed.
                part.copy_(orthogonalize(part.to(self.dtype).view(matrix.shape)).view(-1)).mul_(matrix.scale)
        split = [matrix for matrix in matrices if matrix.is_split]
        ranks = len(split[0].ranges) if split else 1
        for first in range(0, len(split), ranks):
            self._exchange(split[first : first + ranks])
        for tensor in tensors.values():
            flat(tensor).mul_(1 - group["lr"] * group["weight_decay"]).add_(flat(tensor.grad), alpha=-group["lr"])

    def _exchange(self, matrices: Sequence[Matrix]) -> None:
        """Orthogonalize split matrices, at most one per rank, which gathers it and scatters its update."""
        parts = [matrix.gradient(self.rank) for matrix in matrices]
        sizes = [len(part) for part in parts]
        sizes += [0] * (len(matrices[0].ranges) - len(sizes))  # the remaining ranks gather no matrix
        mine = matrices[self.rank] if self.rank < len(matrices) else None
        received_sizes = [stop - start for start, stop in mine.ranges] if mine else [0] * len(sizes)
        local = torch.cat(parts).to(self.dtype)
        full = local.new_empty(sum(received_sizes))
        distributed.all_to_all_single(full, local, received_sizes, sizes, self.group)
        if mine:
            full = orthogonalize(full.view(mine.shape)).view(-1)
        distributed.all_to_all_single(local, full, sizes, received_sizes, self.group)
        for matrix, part, update in zip(matrices, parts, local.split(sizes)):
            part.copy_(update).mul_(matrix.scale)

    def describe(self) -> str:
        """Return a line for the log: how many tensors Muon updates, and how many AdamW."""
        weights = sum(matrix.shape.numel() for matrix in self.matrices.values())
        return (
            f"Muon for {len(self.matrices)} matrices ({weights:,} weights), AdamW for {self.num_others} other tensors"
        )


def flat(tensor: Any) -> torch.Tensor:
    """Return a detached view of a contiguous tensor in one dimension."""
    return tensor.detach().view(-1)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return roughly the nearest matrix with orthonormal rows or columns, by Newton-Schulz iterations in its dtype.
    `matrix`: (rows, columns), or (experts, rows, columns). The result may share its memory."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)).view(-1, *x.shape[-2:])
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrix.shape).contiguous()
