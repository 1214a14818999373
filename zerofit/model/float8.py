"""Linear layers in float8: the products of the blocks' linear layers, forward and backward, through torchao.

Before each product both factors are rounded to 8 bits (e4m3; gradients e5m2), with one scale a tensor, by its largest
element. Sums are in fp32, results in bf16. Weights, gradients, the optimizer, checkpoints and exports are those of a
run in bf16; so are embeddings, norms, attention, routers and the head.

Source: Micikevicius et al. 2022, FP8 formats for deep learning; torchao.float8, recipe "tensorwise".
"""

import importlib.util
import os
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch.nn import Linear

from zerofit.compat.torch import computed_as_linear
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from zerofit.recipe.options import TrainingRecipe

MULTIPLE = 16  # of a product's widths; torch._scaled_mm needs it
CAPABILITY = (8, 9)  # compute capability from which GPUs of NVIDIA multiply in float8
ROUTERS = ("gate", "router")  # the names of linear layers that choose experts, or weigh them
EMULATED = "ZEROFIT_EMULATES_FLOAT8"  # set by tests: round to float8, and multiply in fp32, on any device
_converted: WeakSet[Linear] = WeakSet()


def is_emulated() -> bool:
    """Return whether products in float8 are emulated, which no run should be: it is slow, and needs no GPU."""
    return os.environ.get(EMULATED) == "1"


def check_float8(recipe: "TrainingRecipe") -> None:
    """Raises UserError where float8 is asked for and torchao is not installed."""
    if recipe.float8 and recipe.trains and importlib.util.find_spec("torchao") is None:
        raise UserError(f"float8 ({recipe.source('float8')}) needs torchao: pip install '.[float8]', or remove it")


def check_float8_device(recipe: "TrainingRecipe") -> None:
    """Raises UserError where a GPU of this process does not multiply in float8, or there is none."""
    if not (recipe.float8 and recipe.trains) or is_emulated():
        return
    needs = (
        f"float8 ({recipe.source('float8')}) needs a GPU of NVIDIA with compute capability 8.9 or more (L40S, H100)"
    )
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise UserError(f"{needs}, and there is none. Remove it")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_capability(number)
        if found < CAPABILITY:
            name = torch.cuda.get_device_name(number)
            raise UserError(f"{needs}, and a {name} has {found[0]}.{found[1]}. Remove it")


def convert_to_float8(model: "PreTrainedModel", blocks: list[torch.nn.Module]) -> str:
    """Let the linear layers of these blocks of a model multiply in float8, in place; parameters stay the same objects,
    and layers whose widths do not divide by 16 stay in bf16. Returns a line for the log. Raises UserError where no
    layer is left."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    inside = (each for block in blocks for each in block.named_modules())
    linear = [each for name, each in inside if type(each) is Linear and name.rpartition(".")[2] not in ROUTERS]
    fitting = {each for each in linear if not any(width % MULTIPLE for width in each.weight.shape)}
    if not fitting:
        why = f"no linear layer of its blocks has widths that divide by {MULTIPLE}"
        why = why if linear else "its blocks have no torch.nn.Linear (those of GPT-2 have Conv1D)"
        raise UserError(f"float8: a {model.config.model_type} has nothing to compute in float8: {why}. Remove it")
    # Rows whose number does not divide by 16 are padded for the product that sums over them.
    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=is_emulated(), pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: module in fitting)
    converted = (each for each in model.modules() if type(each).__module__.startswith("torchao."))
    _converted.update(each for each in converted if isinstance(each, Linear))
    part = sum(each.weight.numel() for each in fitting) / sum(each.numel() for each in model.parameters())
    emulated = ", emulated" if is_emulated() else ""
    return f"float8 in {counted(len(fitting), 'linear layer')}, which have {part:.0%} of the weights{emulated}"


def without_float8() -> AbstractContextManager[None]:
    """The context of passes in bf16: one scale is shared by all rows of a batch, so each row depends on the others,
    which is too little to matter to training, and too much for a check that compares rows."""
    return computed_as_linear(list(_converted))
