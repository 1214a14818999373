"""The recipe's optimizer."""

import torch

from train.model.parameters import decay_groups
from train.recipe.options import OptimizerOptions
from train.strategy.devices import has_fused_adamw


def adamw(model: torch.nn.Module, recipe: OptimizerOptions, device: torch.device) -> torch.optim.AdamW:
    """The recipe's AdamW, fused where torch has it for this device."""
    return torch.optim.AdamW(
        decay_groups(model.parameters(), recipe.weight_decay),
        lr=recipe.learning_rate,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        fused=has_fused_adamw(device) or None,
    )
