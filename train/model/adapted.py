"""A trained LoRA adapter on the model that the engine is to hold: under ZeRO-3, too, where each rank has a share."""

import torch

from train.model.adapters import WEIGHTS, AdapterFolder, adapter_settings, check_base_weights, some
from train.model.parameters import true_shape
from train.model.pretrained_io import ADAPTER_PREFIX
from train.recipe.errors import UserError, first_line


def put_on(folder: AdapterFolder, model: torch.nn.Module, name: str, strategy, quantised: bool) -> list[str]:
    """Put an adapter's layers into the model itself, as training does, and its weights in their places.

    Args:
        model: of the base, of build_model.
        name: the base's, for messages.
        quantised: the base's weights are.

    Returns: what there is to say.

    Raises:
        UserError: the adapter is for another base.
    """
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    where = f"model_name_or_path = {str(folder.path)!r}"
    another = f"{where} is for another base than {name!r}"
    settings = adapter_settings(folder, where)
    whole = tuple(f".{module}" for module in settings.modules_to_save or ())  # trained whole: the model's own modules
    saved = [f"{module}." for module, _ in model.named_modules() if whole and f".{module}".endswith(whole)]
    inside = [module for module, _ in model.named_modules() if f"{module}.".startswith(tuple(saved))] if saved else []
    settings.modules_to_save, settings.exclude_modules = None, inside or settings.exclude_modules
    try:
        inject_adapter_in_model(settings, model)
    except ValueError as error:  # nothing matches target_modules
        raise UserError(f"{another}: {first_line(error)}") from None
    own = dict(model.named_parameters(remove_duplicate=False))
    places = get_peft_model_state_dict(model, state_dict=dict(own), save_embedding_layers=False)
    tensors = _tensors(folder)
    homeless = [key for key in tensors if key not in places and key not in own]
    empty = [key for key in places if key not in tensors]
    if homeless or empty:
        what = f"no place for {some(homeless)}" if homeless else f"no weights for {some(empty)}"
        raise UserError(f"{another}: {what}")
    for key, tensor in tensors.items():
        parameter = places.get(key, own.get(key))
        if true_shape(parameter) != tensor.shape:
            shapes = f"{tuple(tensor.shape)}, and that one takes {tuple(true_shape(parameter))}"
            raise UserError(f"{another}: {key} has the shape {shapes}")
        if strategy.deepspeed is None:  # as in training: no copy in fp32 is kept of it elsewhere
            parameter.data = parameter.data.float()
        with strategy.gathered(parameter), torch.no_grad():
            parameter.copy_(tensor)
    for layer in model.modules():
        for dora in getattr(layer, "lora_magnitude_vector", {}).values():
            strategy.read_from_outside(dora, layer.get_base_layer().weight)
    return check_base_weights(
        model, folder, where, name, quantised, lambda weight: strategy.gathered(weight, written=False)
    )


def _tensors(folder: AdapterFolder) -> dict[str, torch.Tensor]:
    """{name in the base: tensor}, whose file open_adapter has looked at."""
    from safetensors.torch import load_file

    file = next(folder.path / name for name in WEIGHTS if (folder.path / name).is_file())
    found = torch.load(file, map_location="cpu", weights_only=True) if file.suffix == ".bin" else load_file(file)
    return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in found.items()}
