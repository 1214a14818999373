"""A trained LoRA adapter injected into the model that the engine will hold, also under ZeRO-3's sharding."""

import torch
from safetensors.torch import load_file

from zerofit.model.adapter_folder import ADAPTER_PREFIX, WEIGHTS, AdapterFolder, adapter_settings, name_some
from zerofit.model.base_fingerprint import check_base_weights
from zerofit.model.lora import check_expert_targets
from zerofit.model.parameters import true_shape
from zerofit.recipe.errors import UserError, first_line


def inject_adapter(folder: AdapterFolder, model: torch.nn.Module, name: str, strategy, quantised: bool) -> list[str]:
    """Inject an adapter's layers into the model, as training does, and load its weights into them.

    Args:
        model: of the base, of build_model.
        name: the base's, for messages.
        quantised: the base's weights are.

    Returns: notes.

    Raises:
        UserError: the adapter is for another base.
    """
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    where = f"model_name_or_path = {str(folder.path)!r}"
    refusal = f"{where} is for another base than {name!r}"
    settings = adapter_settings(folder, where)
    fully_trained = tuple(f".{module}" for module in settings.modules_to_save or ())  # the model's own modules
    saved = [name for name, _ in model.named_modules() if fully_trained and f".{name}".endswith(fully_trained)]
    inside = [name for name, _ in model.named_modules() if any(f"{name}.".startswith(f"{outer}.") for outer in saved)]
    settings.modules_to_save, settings.exclude_modules = None, inside or settings.exclude_modules
    check_expert_targets(sorted(settings.target_parameters or ()), strategy)
    try:
        inject_adapter_in_model(settings, model)
    except ValueError as error:  # nothing matches target_modules
        raise UserError(f"{refusal}: {first_line(error)}") from None
    parameters = dict(model.named_parameters(remove_duplicate=False))
    adapter_parameters = get_peft_model_state_dict(model, state_dict=dict(parameters), save_embedding_layers=False)
    tensors = _tensors(folder)
    unplaced = [key for key in tensors if key not in adapter_parameters and key not in parameters]
    unfilled = [key for key in adapter_parameters if key not in tensors]
    if unplaced or unfilled:
        problem = f"no place for {name_some(unplaced)}" if unplaced else f"no weights for {name_some(unfilled)}"
        raise UserError(f"{refusal}: {problem}")
    for key, tensor in tensors.items():
        parameter = adapter_parameters.get(key, parameters.get(key))
        if true_shape(parameter) != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, and that one takes {tuple(true_shape(parameter))}"
            raise UserError(f"{refusal}: {key} has the shape {shapes}")
        if strategy.deepspeed is None:  # as in training: it is the only copy, so it is in fp32
            parameter.data = parameter.data.float()
        with strategy.gathered(parameter), torch.no_grad():
            parameter.copy_(tensor)
    for layer in model.modules():
        for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():
            strategy.read_from_outside(magnitude, layer.get_base_layer().weight)
    return check_base_weights(
        model, folder.path, where, name, quantised, lambda weight: strategy.gathered(weight, written=False)
    )


def _tensors(folder: AdapterFolder) -> dict[str, torch.Tensor]:
    """{name in the base: tensor} of a file that open_adapter has checked."""
    file = next(folder.path / name for name in WEIGHTS if (folder.path / name).is_file())
    tensors = torch.load(file, map_location="cpu", weights_only=True) if file.suffix == ".bin" else load_file(file)
    return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in tensors.items()}
