"""A few of the frozen weights that an adapter was trained on, by which its base is known again.

They lie beside the adapter in base_weights.json: {"modules": {"model.layers.0.self_attn.q_proj": [64 numbers], ...}},
of the first and the last module that has an adapter. Two models of one architecture fit each other's adapters without
an error; only the weights tell them apart.
"""

import math
from collections.abc import Sequence

import torch

FILE = "base_weights.json"
COUNT = 64
RELATIVE, ABSOLUTE = 1e-2, 1e-6  # bf16 rounds by 2^-9 of a value, fp16 by 2^-25 where values are tiny
SHARE = 0.05  # of the values may differ before it is another base


def sample_weights(weight: torch.Tensor) -> list[float]:
    """64 values, evenly strided over the flattened weight, from the first on.

    Args:
        weight: of any shape, whole (under ZeRO-3 gathered), not empty and not quantised.
    """
    places = torch.arange(COUNT, device=weight.device) * weight.numel() // COUNT
    return weight.detach().flatten()[places].float().tolist()


def differs(recorded: Sequence[float], found: Sequence[float]) -> bool:
    """Whether the two samples come from different weights; each may have been rounded to bf16 or fp16 on its way."""
    if len(recorded) != len(found):
        return True
    differing = sum(not math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in zip(recorded, found))
    return differing > SHARE * len(recorded)
