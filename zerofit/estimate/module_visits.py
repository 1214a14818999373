"""The order in which ZeRO-3 meets the modules of a pass: DeepSpeed's own hooks, on the traced model, tell it to a list
in place of its coordinator (DeepSpeed 0.19, runtime/zero/parameter_offload.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from zerofit.compat.deepspeed import visit_modules
from zerofit.compat.torch import number_of_tensors


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


class ModuleVisits:
    """DeepSpeed's hooks on a model. It stands for the DeepSpeedZeRoOffload whose methods they call."""

    def __init__(self, model: torch.nn.Module):
        from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
        from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config, z3_leaf_module

        apply_zero_leaf_module_config(model, DeepSpeedZeroLeafModuleConfig())
        self.module, self.names = model, {id(module): name for name, module in model.named_modules()}
        self.parameters = dict(model.named_parameters())
        named = {id(parameter): name for name, parameter in self.parameters.items()}
        self.weights = {
            id(module): tuple(named[id(one)] for one in module.parameters(recurse=z3_leaf_module(module)))
            for module in model.modules()
        }
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        visit_modules(self, model)

    def begin(self, note: Callable[[Visit], None]) -> None:
        """A pass begins, whose visits `note` takes."""
        self.note, self.entered = note, _forward_stack()
        self.entered.clear()  # recomputation may leave modules before their end
        self.holders = {name: _holders(parameter) for name, parameter in self.parameters.items()}
        for module in self.module.modules():
            module.applied_pre_backward_ref_cnt = 0  # type: ignore[assignment]

    def get_param_coordinator(self) -> None:
        """Return None: nothing is fetched here. DeepSpeed's hooks ask for it."""

    def pre_sub_module_forward_function(self, module: torch.nn.Module) -> None:
        self.entered.append(module)
        self._visit(module, True, True)

    def post_sub_module_forward_function(self, module: torch.nn.Module) -> None:
        weights = self.weights[id(module)]
        kept = tuple(name for name in weights if _holders(self.parameters[name]) > self.holders[name])
        self._visit(module, False, True, kept)

    def pre_sub_module_backward_function(self, module: torch.nn.Module) -> None:
        self._visit(module, True, False)

    def post_sub_module_backward_function(self, module: torch.nn.Module) -> None:
        self._visit(module, False, False)

    def _visit(self, module: torch.nn.Module, enters: bool, forward: bool, kept: tuple[str, ...] = ()) -> None:
        self.note(Visit(self.names[id(module)], enters, forward, self.weights[id(module)], kept))


def _forward_stack() -> list[torch.nn.Module]:
    from deepspeed.runtime.zero import parameter_offload

    return parameter_offload.FWD_MODULE_STACK


def _holders(tensor: torch.Tensor) -> int:
    """Count who holds a tensor's memory: itself, its views, and what autograd has saved of these; saved itself it
    counts once."""
    return number_of_tensors(tensor.untyped_storage())
