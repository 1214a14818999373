"""The casts of a GPU's autocast, in a trace that runs on the CPU."""

from typing import Any

import torch


class CudaCasts(torch.overrides.TorchFunctionMode):
    """Casts to fp32 what autocast casts on a GPU and not on a CPU (torch/amp, "Ops that autocast to float32")."""

    FUNCTIONS = ("layer_norm", "softmax", "log_softmax", "pow", "rms_norm", "group_norm", "cumsum", "sum", "norm")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in self.FUNCTIONS and torch.is_autocast_enabled("cpu"):
            args = [_widened(value) for value in args]
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _widened(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


def run_backward(loss: torch.Tensor) -> None:
    """loss.backward(), with CudaCasts in force: they would be off in it, and layers are computed again there."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
