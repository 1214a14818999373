"""One process, or DDP: torch's own optimizer, and gradients in DDP's buckets."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerofit.compat.torch import norms_of
from zerofit.recipe.options import OptimizerOptions
from zerofit.strategy.engine import Bounds, Engine, Outcome
from zerofit.strategy.optimizers import SHARDED, ReplicatedOptimizerState
from zerofit.strategy.state import OptimizerState, ReplicatedState


def gradient_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, a scalar; of gradients in half precision it is not rounded to that. On a
    CPU the squares are added up in fp64: torch's fp32 norm adds them one after another there, and is too small by 5e-5
    for a tensor of 0.8 M elements and by 0.4 % for one of 50 M."""
    wide = torch.float64 if gradients and gradients[0].device.type == "cpu" else torch.float32
    norms = norms_of(gradients, wide)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


class TorchEngine(Engine):
    """Engine of one process, or of DDP."""

    optimizer: Any  # accelerate's wrapper

    def _prepare(self, model: Any, recipe: OptimizerOptions, optimizer: Any) -> Any:
        self.optim = recipe.optim
        model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.torch_optimizer = self.optimizer.optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.layout.world_size > 1:
            self._put_gradients_into_buckets(model)
        return model

    def _put_gradients_into_buckets(self, model: Any) -> None:
        """Allocate gradients as views of DDP's buckets, by a backward pass that yields zeros. Else those of the first
        micro-batches take extra memory until the all-reduce."""
        zeros: Any = sum(0.0 * parameter.sum() for parameter in self.parameters)
        model.reducer.prepare_for_backward([zeros])
        zeros.backward()

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        # The forward pass as well: it is there that DDP decides whether the backward pass brings the ranks together.
        return (
            self.accelerator.no_sync(self.model)
            if self.layout.world_size > 1 and not last
            else contextlib.nullcontext()
        )

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def step(self, losses: list[torch.Tensor], bounds: Bounds) -> Outcome:
        if not losses or not self.decides_on_device:
            return super().step(losses, bounds)
        outcome, refused, divisor = self._decide(losses, bounds)
        self._clip_and_step_unless(refused, divisor)
        self._drop_gradients()
        return outcome

    @property
    def decides_on_device(self) -> bool:
        """True if the optimizer's step itself leaves out a refused update: torch's fused AdamW does."""
        optimizer = self.torch_optimizer
        fused = type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]
        has_fp64 = self.device.type not in ("mps", "hpu")
        return bool(fused and has_fp64 and self.accelerator.scaler is None and not self.ema_decay)

    def _decide(self, losses: list[torch.Tensor], bounds: Bounds) -> tuple[Outcome, torch.Tensor, torch.Tensor | None]:
        """Decide about an update without a wait for the device: loss, norm and verdict are read while it steps.

        Returns: (the outcome, refused, divisor), the latter two fp32 scalars on the device. refused: 1.0 or 0.0.
            divisor: 1 / the clipping factor, max(1, norm / max_grad_norm); None without clipping. Nothing is
            clipped here: the fused kernel divides gradients by `divisor` as it steps (`_clip_and_step_unless`).
        """
        norm = self._global_norm()
        report = torch.tensor(bounds.report, dtype=torch.float64).to(self.device, non_blocking=True)
        row = torch.cat([torch.stack([torch.as_tensor(sum(losses)).double(), norm.double()]), report])
        rows = row[None] if self.layout.world_size == 1 else self.accelerator.gather(row[None])
        norm = rows[0, 1]  # rank 0's, so that all decide alike
        refused = (~bounds.accept(rows[:, 0].sum(), norm)).float()
        divisor = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0).float() if self.max_grad_norm > 0 else None
        found = torch.cat([refused.double()[None], rows.flatten()]).to("cpu", non_blocking=True)
        copied = torch.Event(self.device.type) if self.device.type != "cpu" else None
        if copied is not None:
            copied.record()

        def read() -> tuple[bool, list[list[float]]]:
            if copied is not None:
                copied.synchronize()
            return bool(found[0]), found[1:].view(rows.shape).tolist()

        return Outcome(losses, read, self.layout.loss_ranks), refused, divisor

    def _clip_and_step_unless(self, refused: torch.Tensor, divisor: torch.Tensor | None) -> None:
        optimizer = self.torch_optimizer
        optimizer.found_inf, optimizer.grad_scale = refused, divisor  # what torch.amp.GradScaler gives an optimizer
        optimizer.step()
        del optimizer.found_inf, optimizer.grad_scale

    def trained(self) -> list[torch.Tensor]:
        """This rank's shard of the trainable parameters, with gradients."""
        return self.parameters

    def gradients(self) -> list[torch.Tensor]:
        return [each.grad for each in self.trained() if each.grad is not None]

    def _global_norm(self) -> torch.Tensor:
        """The 2-norm of all gradients, a scalar on the device, the same on all ranks."""
        self.accelerator.unscale_gradients()
        return gradient_norm(self.gradients())

    def gradient_norm(self) -> float:
        self._norm = self._global_norm()
        return float(self._norm)

    def clip_and_step(self) -> None:
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.trained(), self.max_grad_norm, self._norm)
        self.optimizer.step()
        self._drop_gradients()

    def skip_step(self) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()  # else the next unscale_ raises; to the scaler this was a step
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        # Of DDP, gradients are views of its buckets, and stay so.
        self.optimizer.zero_grad(set_to_none=self.layout.world_size == 1)

    def _state(self) -> OptimizerState:
        if self.optim in SHARDED:
            return ReplicatedState(self)
        return ReplicatedOptimizerState(self, self.optim)

    def loss_scale(self) -> dict[str, Any]:
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else {}

    def continue_from(self, loss_scale: dict[str, Any]) -> None:
        if loss_scale and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(loss_scale)
