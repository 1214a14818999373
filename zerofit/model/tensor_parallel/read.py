"""Pretrained weights of which each rank keeps its share.

In the dtype in which safetensors files store them, weights are mapped into memory and not read: what a rank does not
keep takes none, and the ranks of a host share what they have read. So they are cut first, and converted then.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_share(
    read: Callable[[torch.dtype], nn.Module],
    keep: Callable[[nn.Module], None],
    stored: torch.dtype,
    dtype: torch.dtype,
) -> nn.Module:
    """This rank's share of a stored model, in `dtype`.

    Args:
        read: loads the whole model in a dtype.
        keep: takes away what is not of this rank's share.
        stored: the dtype to load it in.
    """
    model = read(stored)
    keep(model)
    for parameter in model.parameters():
        is_own = hasattr(parameter, "cut")  # in memory of its own already
        parameter.data = parameter.data.to(dtype, copy=not is_own)
    model.config.dtype = dtype
    return model


def stored_dtype(name: str) -> torch.dtype | None:
    """The dtype of all weights in a folder of safetensors files; None where it is not known, or is not one."""
    dtypes = set()
    for path in Path(name).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            dtypes |= {file.get_slice(each).get_dtype() for each in names}
    return DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
