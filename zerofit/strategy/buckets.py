"""How many gradients are reduced per bucket under ZeRO-1 and ZeRO-2."""

from typing import Any

import torch

SHARE_OF_MODEL = 16
MOST = 200_000_000  # elements; beyond this a bucket only takes memory


def fill_bucket_size(zero: dict[str, Any], model: torch.nn.Module) -> None:
    """Set `reduce_bucket_size` (elements) of ZeRO-1 and ZeRO-2 in place, where "auto" or nothing stands there.

    accelerate would make the square of the hidden size of "auto", so that each matrix is sent for itself; DeepSpeed
    makes two buffers of 5e8 elements of nothing. A sixteenth of the model makes some twenty messages of a backward
    pass, which still overlap with it; its two buffers take an eighth of what the gradients of the whole model would.
    An adapter's gradients are few, and go in one.
    """
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    fill_by_sizes(zero, sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes))


def fill_by_sizes(zero: dict[str, Any], trained: int, total: int) -> None:
    """The same for a rank's elements: of what is trained, and of all."""
    if zero.get("stage") in (1, 2) and zero.get("reduce_bucket_size", "auto") == "auto":
        zero["reduce_bucket_size"] = max(1, min(trained, total // SHARE_OF_MODEL, MOST))
