"""The order in which ZeRO-3 meets the modules of a pass: hooks on the traced model that stand where DeepSpeed's do.

Source: DeepSpeed 0.19, runtime/zero/parameter_offload.py (_register_deepspeed_module).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Visit(NamedTuple):
    """A module's weights are fetched, or they may be released.

    Attributes:
        module: its name.
        enters: they are fetched.
        forward: for its forward pass, which may be computed again in the backward pass.
        weights: names of its own weights; of those of modules in it only where DeepSpeed takes it for a leaf, as it
            does blocks of some mixtures of experts (leaf_module_config.py): those in it are not met one by one.
        kept: of these, those whose memory stays when they are released, as the backward pass needs a view of it:
            DeepSpeed frees a weight by giving it other memory (free_param), and a saved view keeps the one before.
    """

    module: str
    enters: bool
    forward: bool
    weights: tuple[str, ...]
    kept: tuple[str, ...] = ()


def watch_modules(model: torch.nn.Module, note: Callable[[Visit], None]) -> list[Any]:
    """Call `note` at each visit. Returns the handles of the hooks."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    handles = []
    for name, module, is_leaf in _met(model):
        weights = {names[id(parameter)]: parameter for parameter in module.parameters(recurse=is_leaf)}
        handles += _watch(module, name, weights, note)
    return handles


def _met(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, bool]]:
    """(name, module, whether it is a leaf) of all modules that are in no leaf."""
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, z3_leaf_module

    apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig())
    leaves: list[str] = []
    for name, module in model.named_modules():
        if not name.startswith(tuple(leaves)):
            yield name, module, z3_leaf_module(module)
            leaves += [f"{name}."] if z3_leaf_module(module) else []


def _holders(tensor: torch.Tensor) -> int:
    """Of a tensor's memory: itself, its views, and what autograd has saved of these; saved itself it counts once."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _watch(
    module: torch.nn.Module, name: str, parameters: Mapping[str, torch.Tensor], note: Callable[[Visit], None]
) -> list[Any]:
    weights, holders = tuple(parameters), {weight: _holders(each) for weight, each in parameters.items()}
    outputs = inputs = 0  # of tensors whose gradients have not come yet

    class BeforeBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal outputs
            outputs += 1
            return output.detach()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            nonlocal outputs
            if outputs > 0:
                note(Visit(name, True, False, weights))
                outputs -= 1
            return gradient

    class AfterBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            nonlocal inputs
            inputs += ctx.needs_input_grad[0]
            return given.detach()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            nonlocal inputs
            inputs -= 1
            if inputs == 0:
                note(Visit(name, False, False, weights))
            return gradient

    def before(module: torch.nn.Module, args: Any) -> Any:
        nonlocal inputs
        inputs = 0
        note(Visit(name, True, True, weights))
        return _applied(AfterBackward.apply, args)

    def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
        kept = tuple(weight for weight, each in parameters.items() if _holders(each) > holders[weight])
        note(Visit(name, False, True, weights, kept))
        return _applied(BeforeBackward.apply, output)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _applied(function: Callable[..., Any], value: Any) -> Any:
    from deepspeed.runtime.zero.utils import apply_to_tensors_only

    return apply_to_tensors_only(function, value)
