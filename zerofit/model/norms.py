"""RMSNorm in one kernel: torch's own function in place of the eight operations that transformers computes it with. And
the sum that layers add to (the residual stream), in bf16 also where weights are in fp32 and products are cast.

transformers writes the norm of Llama, and of some 140 other classes, as operations on single elements, in fp32. On
CUDA torch.nn.functional.rms_norm is one kernel forward, which keeps its input and a number for each row. On a CPU
torch computes it by the same operations in the same order: in fp32 the result and every gradient are the same to the
last bit.
"""

import inspect
import types
from typing import Any

import torch
from torch.nn.functional import rms_norm

from zerofit.model.compilation import blocks_of

DEVICES = {"cuda"}  # elsewhere torch has no kernel, and in half precision its operations keep more than transformers'


def fuse_norms(model: torch.nn.Module) -> int:
    """Let each RMSNorm of a model that is written as Llama's be computed by one function. Returns their number. One
    with another forward pass is left as it is, such as Gemma's, which multiplies by 1 + weight."""
    norms = [module for module in model.modules() if is_llama_norm(module)]
    for module in norms:
        module.forward = types.MethodType(_fused, module)
    return len(norms)


def is_llama_norm(module: torch.nn.Module) -> bool:
    """Return whether a module has the text of LlamaRMSNorm's forward pass, and its weight and `variance_epsilon`."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or not hasattr(module, "variance_epsilon"):
        return False
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # it imports scipy, which takes a second

    return "forward" not in vars(module) and _body(type(module)) == _body(LlamaRMSNorm)


def _body(module_class: type[torch.nn.Module]) -> str | None:
    """The text of a class's forward pass, without its first line, where annotations differ; None: there is none."""
    try:
        return inspect.getsource(module_class.forward).partition(":\n")[2]
    except (OSError, TypeError):
        return None


def _fused(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The forward pass that a norm is given in place of its own: the norm in the dtype that transformers' has; under
    autocast in that of the products behind it, each of which would cast it. torch's kernel wants input and weight in
    one dtype: the weight is cast as a product's is."""
    weight, device, epsilon = self.weight, hidden_states.device.type, self.variance_epsilon
    is_cast = torch.is_autocast_enabled(device)
    if device not in DEVICES or (hidden_states.dtype != weight.dtype and not is_cast):
        return type(self).forward(self, hidden_states)
    if not is_cast:
        return rms_norm(hidden_states, weight.shape, weight, epsilon)
    with torch.autocast(device, enabled=False):
        normalized = rms_norm(hidden_states, weight.shape, weight.to(hidden_states.dtype), epsilon)
    return normalized.to(torch.get_autocast_dtype(device))


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
