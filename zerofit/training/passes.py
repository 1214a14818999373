"""How the passes of a model are computed: what is recomputed, what is offloaded to the CPU, what is compiled."""

import torch

from zerofit.model.compilation import compile_model
from zerofit.model.recomputation import enable_recomputation
from zerofit.recipe.model_options import ModelOptions
from zerofit.strategy.offloaded_inputs import host_store, offload_inputs


def prepare_passes(model: torch.nn.Module, recipe: ModelOptions, device: torch.device) -> list[str]:
    """Let the passes on this device be as the recipe says. Returns notes for the log."""
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
