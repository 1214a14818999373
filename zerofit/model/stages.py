"""A model's layers, shared by the stages of a pipeline: a rank keeps those of its stage, under the names that they
have in the full model.

The stages hand on hidden states. The first reads tokens; the others are called with `inputs_embeds`, and the last has
the head and the loss.
"""

import copy
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from zerofit.compat.transformers import recomputing_functions
from zerofit.model.families import family_of, require_plan
from zerofit.model.parameters import true_shape
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)


class IdentityLayer(nn.Module):
    """An identity module that replaces a layer of another pipeline stage: the hidden states pass through."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden


class ZeroLayer(nn.Module):
    """A module that returns 0, and replaces a layer whose output another pipeline stage adds to the hidden states."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=ids.device)


def cut_layers(model: "PreTrainedModel", stages: int) -> list[range]:
    """Return the layers of each stage of a causal model, cut so that the slowest stage has the fewest FLOPs that whole
    layers allow. FLOPs are counted by weights: the head is worth V x H over a layer's.

    Of equal cuts that one is taken whose last stage has most layers: earlier stages keep more micro-batches (1F1B), so
    spare layers go to the later ones of these as well. `model`: all of it; its weights may be on "meta". `stages`: at
    least 2.
    """
    layers = getattr(model.base_model, require_plan(family_of(model.config).stage_plan).layers)
    count = len(layers)
    head = model.get_output_embeddings().weight.numel()
    head_in_layers = head * count / sum(parameter.numel() for parameter in layers.parameters())

    def slowest(last: int) -> float:
        return max(-(-(count - last) // (stages - 1)), last + head_in_layers)

    before = count - min(range(count - stages + 1, 0, -1), key=slowest)
    edges = [before * stage // (stages - 1) for stage in range(stages)]
    return [range(*ends) for ends in itertools.pairwise([*edges, count])]


def check_stages(config: "PretrainedConfig", stages: int, source: str) -> None:
    """Raises UserError where a model's family has no plan for stages, or it has fewer layers than stages."""
    degree = f"{source}: pipeline.stages = {stages}"
    if family_of(config).stage_plan is None:
        raise UserError(f"{degree}: a {config.model_type} has no pipeline. Use a strategy such as zero3")
    if config.num_hidden_layers < stages:
        raise UserError(f"{degree}, and num_hidden_layers = {config.num_hidden_layers}. Use fewer stages")


def keep_stage(model: "PreTrainedModel", stage: int, stages: int, dtype: torch.dtype) -> None:
    """Keep this stage's part of a causal model; `whole_model` knows the rest from then on. `dtype`: of the weights
    when the model is loaded."""
    model.__dict__["whole"] = copy_without_weights(model, dtype)
    plan = require_plan(family_of(model.config).stage_plan)
    body = model.base_model
    is_first = stage == 0
    is_last = stage == stages - 1
    table = model.get_input_embeddings()
    layers = getattr(body, plan.layers)
    for index in set(range(len(layers))).difference(cut_layers(model, stages)[stage]):
        layers[index] = IdentityLayer()
    if not is_first:
        for name in plan.before:
            if getattr(body, name) is not table or not (is_last and is_tied(model)):  # the head's weight is in it
                setattr(body, name, ZeroLayer() if name in plan.added else IdentityLayer())
    if not is_last:
        for name in plan.after:
            setattr(body, name, IdentityLayer())
        model.set_output_embeddings(IdentityLayer())


def whole_model(model: Model) -> Model:
    """Return the model itself; for a pipeline stage, or a shard of its weights, the unsharded model on the meta
    device, for names and shapes."""
    return model.__dict__.get("whole", model)


def is_tied(model: "PreTrainedModel") -> bool:
    """Return whether the head of a causal model is its table of embeddings."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def meta_parameters(model: nn.Module, dtype: torch.dtype | None = None) -> dict[int, nn.Parameter]:
    """Return {id of each parameter: one like it on the meta device}."""
    return {
        id(p): nn.Parameter(torch.empty(true_shape(p), dtype=dtype or p.dtype, device="meta"), p.requires_grad)
        for p in model.parameters()
    }


def copy_without_weights(model: Model, dtype: torch.dtype | None = None) -> Model:
    """Return a copy on the meta device, with the names, shapes and dtypes of all weights. `dtype`: of all weights;
    None: each keeps its own."""
    replacements: dict[int, object] = {**meta_parameters(model, dtype)}
    # What recomputes layers may hold streams, which cannot be copied.
    replacements |= {id(function): function for function in recomputing_functions(model)}
    whole_copy = copy.deepcopy(model, replacements)
    whole_copy.config = model.config
    if getattr(model, "generation_config", None) is not None:
        whole_copy.generation_config = model.generation_config
    return whole_copy
