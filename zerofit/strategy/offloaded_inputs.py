"""Inputs of recomputed layers that wait in the host's memory for the backward pass: torch's save_on_cpu."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerofit.strategy.devices import pins_memory

Saved = Callable[[], AbstractContextManager[Any]]  # makes a context in which autograd saves tensors elsewhere


def saved_on_host(device: torch.device) -> Saved:
    """Save tensors in the host's memory, page-locked where this device copies from it by itself."""
    return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pins_memory(device))


def offload_inputs(model: torch.nn.Module, saved: Saved) -> None:
    """Save the inputs of the layers that `model` recomputes (zerofit/model/recomputation.py) in contexts of `saved`.
    What such a layer saves within has hooks of its own."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            saving = functools.partial(_checkpoint, checkpoint, saved)
            module._gradient_checkpointing_func = saving  # type: ignore[assignment]  # a Module's setter wants tensors


def _checkpoint(checkpoint: Any, saved: Saved, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """torch.utils.checkpoint of a layer."""
    with saved():
        return checkpoint(layer, *args, **kwargs)
