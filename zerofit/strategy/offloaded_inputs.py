"""Inputs of recomputed layers that wait in the host's memory for the backward pass.

DeepSpeed copies them there and back beside the computation, all but the newest (0.19,
runtime/activation_checkpointing/offload_activations.py). Its own hooks are not used: they mark a tensor outside of
FSDP2's and ZeRO-3's hooks, which hand another one to the layer, and keep what has come back until the pass has ended,
so that at the end of a backward pass all of it is on the device again.
"""

import functools
import weakref
from typing import Any, NamedTuple, Protocol

import torch

from zerofit.recipe.errors import UserError
from zerofit.strategy.devices import pins_memory


class Store(Protocol):
    """Where the inputs wait."""

    def offload_input(self, tensor: torch.Tensor) -> int | None:
        """Take a tensor; its number, or None where it had better stay where it is."""

    def restore_input(self, number: int) -> torch.Tensor:
        """Give it back, once."""


class Offloaded(NamedTuple):
    """What autograd saves instead of the input."""

    number: int


def host_store(device: torch.device) -> Store:
    """In the host's memory, page-locked where this device copies from it by itself."""
    from deepspeed.runtime.activation_checkpointing.offload_activations import _ActivationOffloadEngine

    return _ActivationOffloadEngine(use_pin_memory=pins_memory(device))


def offload_inputs(model: torch.nn.Module, store: Store) -> None:
    """Let the inputs of the layers that `model` recomputes (zerofit/model/recomputation.py) wait in `store`."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            keeping = functools.partial(_checkpoint, checkpoint, store)
            module._gradient_checkpointing_func = keeping  # type: ignore[assignment]  # a Module's setter wants tensors


def _checkpoint(checkpoint: Any, store: Store, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """torch.utils.checkpoint of a layer. What the layer saves within has hooks of its own."""
    if not torch.is_grad_enabled():
        return checkpoint(layer, *args, **kwargs)
    hidden, is_found = weakref.ref(args[0]) if args else lambda: None, False  # autograd keeps `pack`, too

    def pack(tensor: torch.Tensor) -> torch.Tensor | Offloaded:
        nonlocal is_found
        if tensor is not hidden() or is_found:
            return tensor
        is_found, number = True, store.offload_input(tensor)
        return tensor if number is None else Offloaded(number)

    def unpack(saved: torch.Tensor | Offloaded) -> torch.Tensor:
        return store.restore_input(saved.number) if isinstance(saved, Offloaded) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = checkpoint(layer, *args, **kwargs)
    if not is_found:
        raise UserError(
            "activation_offload: this model's code hands its layers no input that can be found. Remove this option"
        )
    return output
