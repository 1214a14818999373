"""The order in which ZeRO-3 meets the modules of a pass: hooks on the traced model that stand where DeepSpeed's do.

Source: DeepSpeed 0.19, runtime/zero/parameter_offload.py (_register_deepspeed_module).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Visit(NamedTuple):
    """A module's weights are fetched, or they may be released.

    Attributes:
        module: its name.
        enters: they are fetched.
        forward: for its forward pass, which may be computed again in the backward pass.
        weights: names of its own weights, not of those of modules in it.
    """

    module: str
    enters: bool
    forward: bool
    weights: tuple[str, ...]


def watch_modules(model: torch.nn.Module, note: Callable[[Visit], None]) -> list:
    """Call `note` at each visit. Returns the handles of the hooks."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    handles = []
    for name, module in model.named_modules():
        weights = tuple(names[id(parameter)] for parameter in module.parameters(recurse=False))
        handles += _watch(module, name, weights, note)
    return handles


def _watch(module: torch.nn.Module, name: str, weights: tuple[str, ...], note: Callable[[Visit], None]) -> list:
    outputs = inputs = 0  # of tensors whose gradients have not come yet

    class BeforeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            nonlocal outputs
            outputs += 1
            return output.detach()

        @staticmethod
        def backward(ctx, gradient):
            nonlocal outputs
            if outputs > 0:
                note(Visit(name, True, False, weights))
                outputs -= 1
            return gradient

    class AfterBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            nonlocal inputs
            inputs += ctx.needs_input_grad[0]
            return given.detach()

        @staticmethod
        def backward(ctx, gradient):
            nonlocal inputs
            inputs -= 1
            if inputs == 0:
                note(Visit(name, False, False, weights))
            return gradient

    def before(module, args):
        nonlocal inputs
        inputs = 0
        note(Visit(name, True, True, weights))
        return _applied(AfterBackward.apply, args)

    def after(module, args, output):
        note(Visit(name, False, True, weights))
        return _applied(BeforeBackward.apply, output)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _applied(function, value):
    from deepspeed.runtime.zero.utils import apply_to_tensors_only

    return apply_to_tensors_only(function, value)
