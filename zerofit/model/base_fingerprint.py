"""A few of the frozen weights that an adapter was trained on: with them its base is recognised later.

They are beside the adapter in base_weights.json: {"modules": {"model.layers.0.self_attn.q_proj": [64 numbers], ...}},
of the first and the last module that has an adapter. The adapters of two models of one architecture fit both without
an error; only the weights tell the models apart.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.model.folders import read_json
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    import torch

FILE = "base_weights.json"
NUM_VALUES = 64
RELATIVE, ABSOLUTE = 1e-2, 1e-6  # bf16 rounds by 2^-9 of a value, fp16 by 2^-25 where values are tiny
MAX_DIFFERING = 0.05  # fraction of the values that may differ in the same base


def sample_weights(weight: "torch.Tensor") -> list[float]:
    """64 values, evenly strided over the flattened weight, from the first on.

    Args:
        weight: of any shape, full (under ZeRO-3 gathered), not empty and not quantised.
    """
    import torch

    indices = torch.arange(NUM_VALUES, device=weight.device) * weight.numel() // NUM_VALUES
    return weight.detach().flatten()[indices].float().tolist()


def adapted_weight(layer) -> "torch.Tensor":
    """The frozen weight that a layer of peft adapts; of experts a weight of all of them."""
    return layer.get_param() if hasattr(layer, "parameter_name") else layer.get_base_layer().weight


def differs(recorded: Sequence[float], sample: Sequence[float]) -> bool:
    """Whether the two samples come from different weights; each may have been rounded to bf16 or fp16."""
    if len(recorded) != len(sample):
        return True
    differing = sum(not math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in zip(recorded, sample))
    return differing > MAX_DIFFERING * len(recorded)


def check_base_weights(
    base, folder: Path, where: str, name: str, quantised: bool, gathered=lambda weight: nullcontext()
) -> list[str]:
    """Compare the frozen weights with those recorded in training. Returns a note if that is not possible.

    Args:
        base: the model that has the adapter's layers in it.
        folder: of the adapter.
        where: the option that names the adapter, and
        name: the base's name, both for messages.
        gathered: (weight) -> the context in which it is full.

    Raises:
        UserError: it is another base.
    """
    file = folder / FILE
    if not file.is_file():
        return []
    if quantised:
        return [f"note: {name!r} is quantised, so its weights are not compared with those recorded in {file}"]
    modules = dict(base.named_modules())
    for module, recorded in read_json(file).get("modules", {}).items():
        layer = modules.get(module)
        if not hasattr(layer, "base_layer"):
            raise UserError(f"{where} is for another base than {name!r}, where {module} has no adapter")
        weight = adapted_weight(layer)
        with gathered(weight):
            sample = sample_weights(weight)
        if differs(recorded, sample):
            raise UserError(
                f"{where} is for another base: the weights of {module} in {name!r} are not those that it was trained "
                "on. Name the base that it was trained on"
            )
    return []
