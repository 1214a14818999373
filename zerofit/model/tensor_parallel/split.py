"""A model of transformers, cut in place: each rank keeps its share of the layers that the family's plan names."""

from functools import partial

import torch

from zerofit.model.families import family_of
from zerofit.model.tensor_parallel.cut import TensorGroup, cut_for, cut_parameter
from zerofit.model.tensor_parallel.layers import (
    RowLinear,
    SharedNorm,
    VocabularyEmbedding,
    VocabularyHead,
    is_transposed,
)
from zerofit.model.tensor_parallel.tokens import TokenParts, total
from zerofit.recipe.errors import UserError


def check_split(config, size: int, source: str) -> None:
    """Check that so many ranks can share the layers of a model, as a pair says.

    Raises:
        UserError: its family has no plan, or the number divides its heads or its MLP's channels not evenly.
    """
    plan, degree = family_of(config).tensor_plan, f"{source}: tensor_parallel.autotp_size = {size}"
    otherwise = "Use a pair without it, such as zero3"
    if plan is None:
        raise UserError(f"{degree}: tensor parallelism does not support {config.model_type}. {otherwise}")
    # GPT-2's n_inner may be None: then it is four times the hidden size
    widths = {name: getattr(config, name) or 4 * config.hidden_size for name in plan.widths}
    uneven = {name: width for name, width in widths.items() if width % size}
    if not uneven:
        return
    degrees = [
        str(each) for each in range(2, min(widths.values()) + 1) if all(width % each == 0 for width in widths.values())
    ]
    remedy = f"Possible: {', '.join(degrees)}" if degrees else otherwise
    listed = ", ".join(f"{name} = {width}" for name, width in uneven.items())
    raise UserError(f"{degree} does not divide the model's {listed}. {remedy}")


def split_model(model: torch.nn.Module, tensor: TensorGroup) -> None:
    """Keep this rank's share of a causal model, whose weights are the same on all ranks of the group; between the
    layers that are cut, the ranks share the tokens of its `token_parts`."""
    plan, parts = family_of(model.config).tensor_plan, TokenParts(tensor)
    model.token_parts, readers = parts, set()
    for path, layer in list(model.named_modules()):
        owner, _, name = path.rpartition(".")
        if name in plan.columns:
            _cut_columns(layer, tensor, plan.columns[name])
            readers.add(owner)
        elif name in plan.rows:
            weight = layer.weight
            cut_parameter(weight, cut_for(weight.shape, 0 if is_transposed(layer) else 1, tensor.rank, tensor.size))
            setattr(model.get_submodule(owner), name, RowLinear(layer, parts))
        elif name in plan.norms:
            cut_parameter(layer.weight, cut_for(layer.weight.shape, 0, tensor.rank, tensor.size))
            setattr(model.get_submodule(owner), name, SharedNorm(layer, tensor))
        for attribute in plan.own_widths:
            if hasattr(layer, attribute):
                setattr(layer, attribute, getattr(layer, attribute) // tensor.size)
    for owner in readers:
        model.get_submodule(owner).register_forward_pre_hook(partial(_join_input, parts), with_kwargs=True)
    _share_tokens(model, parts)
    _split_vocabulary(model, tensor)


def _cut_columns(layer: torch.nn.Module, tensor: TensorGroup, parts: int) -> None:
    for parameter, dim in ((layer.weight, 1 if is_transposed(layer) else 0), (layer.bias, 0)):
        if parameter is not None:
            cut_parameter(parameter, cut_for(parameter.shape, dim, tensor.rank, tensor.size, parts))
    width = "nf" if is_transposed(layer) else "out_features"
    setattr(layer, width, getattr(layer, width) // tensor.size)


def _join_input(parts: TokenParts, module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": parts.join(kwargs["hidden_states"])}
    return (parts.join(args[0]), *args[1:]), kwargs


def _share_tokens(model: torch.nn.Module, parts: TokenParts) -> None:
    """From the dropout of the embeddings, or the first layer, to the last norm each rank has a part of the tokens. Of
    a norm's weights it finds a part of the gradients, which add up."""
    body, plan = model.base_model, family_of(model.config).stage_plan
    layers, last = getattr(body, plan.layers), getattr(body, plan.after[-1])
    dropouts = [module for name in plan.before if isinstance(module := getattr(body, name), torch.nn.Dropout)]
    first = dropouts[0] if dropouts else layers[0]
    first.register_forward_pre_hook(lambda module, args: (parts.enter(args[0]), *args[1:]))
    last.register_forward_hook(parts.leave)
    norms = (module for module in (*layers.modules(), last) if not isinstance(module, RowLinear))
    for parameter in (each for module in norms for each in module.parameters(recurse=False)):
        if parameter.requires_grad and not hasattr(parameter, "cut"):
            parameter.register_hook(partial(total, group=parts.tensor.group))


def _split_vocabulary(model: torch.nn.Module, tensor: TensorGroup) -> None:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = model.config.vocab_size
    over_tokens = {id(each): each for module in (table, head) for each in module.parameters()}
    for parameter in over_tokens.values():  # tied ones once
        cut_parameter(parameter, cut_for(parameter.shape, 0, tensor.rank, tensor.size))
    if hasattr(table, "weight"):  # else it is of another stage of a pipeline
        model.set_input_embeddings(VocabularyEmbedding(table, tensor, rows))
    if hasattr(head, "weight"):
        model.set_output_embeddings(VocabularyHead(head, tensor, rows))
