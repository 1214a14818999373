"""The prepared model and optimizer. The loop asks it for backward, update and sums, and never which strategy it is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from zerofit.strategy.layout import ParallelLayout
from zerofit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from zerofit.data.collate import Batch

LossSum = Callable[[Any, "Batch"], torch.Tensor]  # (model, batch) -> the loss summed over the batch's targets


class Engine(Protocol):
    """What training, evaluation, checkpoints and export see of a strategy; prepare.py makes one.

    Attributes:
        module: the model of transformers; of a pipeline this rank's stage of it.
        whole: the model with all its weights' names; of a pipeline one that has no memory.
        model: what is called: the module, wrapped as the strategy says.
        state: the optimizer's state in the form in which checkpoints have it (state.py); None where nothing is
            trained.
        alive: called within what may take long: a sign of life.
    """

    strategy: Strategy
    accelerator: Any
    module: Any
    whole: Any
    model: Any
    state: Any
    schedule: Any
    alive: Callable[[], None]

    @property
    def device(self) -> torch.device: ...

    @property
    def layout(self) -> ParallelLayout: ...

    @property
    def is_main(self) -> bool: ...

    def run(
        self, batches: Sequence["Batch"], loss_sum: LossSum, scale: float, phase: Callable[[str], None]
    ) -> list[torch.Tensor]:
        """Forward and backward over an update's micro-batches: gradients are averaged over replicas and summed over
        micro-batches.

        Args:
            scale: what losses are multiplied by before the backward pass.
            phase: is told "forward" and "backward", as each begins; of a pipeline, whose passes take turns, "forward".

        Returns: the loss sum of each, fp32 scalars; of a pipeline zeros on all stages but the last.
        """

    def losses(self, batches: Iterable["Batch"], loss_sum: LossSum) -> Iterator[tuple["Batch", torch.Tensor]]:
        """Each batch with its loss sum, an fp32 scalar; of a pipeline 0 on all stages but the last."""

    def set_learning_rate(self, index: int) -> None:
        """Give the optimizer the schedule's rate of update `index`, counted from 0."""

    def gradient_norm(self) -> float:
        """The 2-norm of the update's gradients over all ranks, before clipping; after `run`, once for each update, on
        all ranks together. NaN or infinite where a gradient is."""

    def apply(self) -> None:
        """Clip by the norm that `gradient_norm` has found, step, and drop the gradients. In fp16 the weights stay
        where the norm is infinite: the loss scale is lowered."""

    def discard(self) -> None:
        """Drop the gradients in place of `apply`: weights, optimizer state and loss scale stay."""

    @property
    def learning_rate(self) -> float:
        """The rate that the optimizer holds now."""

    def loss_scale(self) -> dict[str, Any]:
        """fp16's loss scaling, as plain numbers; empty without it."""

    def continue_from(self, loss_scale: dict[str, Any]) -> None:
        """Restore fp16's loss scaling."""

    def gradients(self) -> list[torch.Tensor]:
        """Those that this rank has now."""

    def live_tensors(self) -> list[torch.Tensor]:
        """What lies in memory that training changes: the weights of this rank, and buffers."""

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The same one after another, for a reader that does not keep them; nothing but on the main process. All ranks
        must read it to its end."""

    def stored_buffers(self) -> dict[str, torch.Tensor]:
        """By name, what is stored with the model's weights and is no parameter; the same on every rank."""

    def trained_state(self) -> dict[str, torch.Tensor] | None:
        """The same for the weights that are trained, and no others: each is gathered for itself."""

    def sum_over_replicas(self, values: Iterable[float]) -> list[float]:
        """Each value summed over all replicas: what the ranks of one replica have in common counts once."""

    def per_rank(self, values: Iterable[float]) -> list[list[float]]:
        """The values of each rank, one list a rank."""

    def gather_objects(self, own: Any) -> list[Any] | None:
        """What each rank has, one a rank, on the main process; None elsewhere. For small things only."""

    def from_main(self, value: Any) -> Any:
        """What the main process has, on every rank."""

    def rows_in_full(self) -> AbstractContextManager[Any]:
        """The context in which each rank computes rows in full, also where the ranks of a replica split them."""

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """`generate` of the model on this rank's rows (B, T), on all ranks together.

        Under ZeRO-3 and FSDP2 every rank takes part in every forward pass, so ranks that have finished continue until
        all have.
        """

    def close(self) -> None:
        """The last meeting of the ranks; each may leave the process after it (zerofit.recipe.errors.leave)."""

    def held_bytes(self) -> dict[str, int]:
        """What this rank holds from update to update, on the device or on the host: its shard of the weights
        (`parameters`), and the optimizer's moments and fp32 copies of what is trained (`optimizer`)."""

    def frozen_checksum(self) -> list[int]:
        """The sums of the bit patterns of the frozen weights, one a weight, of this rank's shard under ZeRO-3."""

    def effective_strategy(self) -> dict[str, Any]:
        """What is in force, with nothing left open."""
