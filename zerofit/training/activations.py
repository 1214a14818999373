"""Which activations of a model are recomputed, which are offloaded to the CPU, and what is compiled."""

import torch

from zerofit.model.compilation import compile_model
from zerofit.model.recomputation import enable_recomputation
from zerofit.recipe.model_options import ModelOptions
from zerofit.strategy.offloaded_inputs import host_store, offload_inputs


def prepare_activations(model: torch.nn.Module, recipe: ModelOptions, device: torch.device) -> list[str]:
    """Checkpoint, offload and compile as the recipe says, on this device. Returns notes for the log."""
    notes = []
    if recipe.gradient_checkpointing:
        enable_recomputation(model, recipe.gradient_checkpointing, is_traced=bool(recipe.torch_compile))
    if recipe.activation_offload and device.type == "cpu":
        notes.append("activation_offload has no effect: the device's memory is the host's")
    elif recipe.activation_offload:
        offload_inputs(model, host_store(device))
    if recipe.torch_compile:
        compile_model(model, str(recipe.torch_compile))
    return notes
