"""RMSNorm in one kernel: torch's own function in place of the eight operations that transformers computes it with.

transformers writes the norm of Llama, and of some 140 other classes, as operations on single elements, in fp32. On
CUDA torch.nn.functional.rms_norm is one kernel forward, which keeps its input and a number for each row. On a CPU
torch computes it by the same operations in the same order: in fp32 the result and every gradient are the same to the
last bit.
"""

import inspect
import types

import torch
from torch.nn.functional import rms_norm

DEVICES = {"cuda"}  # elsewhere torch has no kernel, and in half precision its operations keep more than transformers'


def fuse_norms(model: torch.nn.Module) -> int:
    """Let each RMSNorm of a model that is written as Llama's be computed by one function. Returns their number. One
    with another forward pass is left as it is, such as Gemma's, which multiplies by 1 + weight."""
    norms = [module for module in model.modules() if is_llama_norm(module)]
    for module in norms:
        module.forward = types.MethodType(FusedNorm.forward, module)
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


class FusedNorm:
    """The forward pass that a module is given in place of its own."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The norm in the dtype that transformers' has; under autocast in that of the products behind it, each of
        which would cast it. torch's kernel wants input and weight in one dtype: the weight is cast as a product's is.
        """
        weight, device = self.weight, hidden_states.device.type
        is_cast = torch.is_autocast_enabled(device)
        if device not in DEVICES or (hidden_states.dtype != weight.dtype and not is_cast):
            return type(self).forward(self, hidden_states)
        if not is_cast:
            return rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        with torch.autocast(device, enabled=False):
            normalized = rms_norm(hidden_states, weight.shape, weight.to(hidden_states.dtype), self.variance_epsilon)
        return normalized.to(torch.get_autocast_dtype(device))
