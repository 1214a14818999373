"""The sum that layers add to (the residual stream), in bf16 also where weights are in fp32 and products are cast."""

from typing import Any

import torch

from zerofit.model.compilation import blocks_of


def round_embeddings(model: torch.nn.Module) -> None:
    """Let embeddings before the blocks come in bf16 under autocast in bf16, and with them the residual stream.
    Embeddings in fp32 make every addition behind them, and every sum of gradients on its way back, one in fp32. Where
    DeepSpeed or FSDP2 hold the weights of the passes in bf16, none of these is."""
    within = {module for block in blocks_of(model) for module in block.modules()}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module not in within:
            module.register_forward_hook(_rounded)


def _rounded(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    device = output.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != torch.bfloat16:
        return output
    return output.bfloat16()
