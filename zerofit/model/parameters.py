"""True sizes of parameters, FLOPs, and whether weights are finite (a diverged run or a damaged copy leaves NaN).

Under ZeRO-3 `shape` is empty and `ds_shape` is the true one; under tensor parallelism `cut` knows the whole one.
"""

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from zerofit.model.compilation import blocks_of
from zerofit.model.configuration import name_some
from zerofit.model.families import family_of
from zerofit.recipe.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def true_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Return the parameter's full shape, even if this rank holds only a shard."""
    cut = getattr(parameter, "cut", None)
    return torch.Size(cut.shape) if cut is not None else getattr(parameter, "ds_shape", parameter.shape)


def true_numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of weights; bitsandbytes packs two of 4 bits into each byte that it stores."""
    packed = 2 * parameter.element_size() if type(parameter).__name__ == "Params4bit" else 1
    return packed * true_shape(parameter).numel()


def count_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Return (all, trainable) parameters, tied ones counted once."""
    sizes = [(true_numel(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)


def decay_groups(parameters: Iterable[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the two weight-decay groups: tensors of two and more dimensions decay, vectors (biases, norms) do not. By
    dimension and not by name, so that it holds for every architecture. Empty groups are omitted."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if len(true_shape(parameter)) >= 2]
    vectors = [parameter for parameter in trainable if len(true_shape(parameter)) < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def layer_groups(model: torch.nn.Module, weight_decay: float, layer_decay: float) -> list[dict[str, Any]]:
    """Return the groups of `decay_groups` for the head, each block from the last one on, and the embeddings.

    `lr_scale` of a group multiplies its learning rate: layer_decay to the power of its distance from the head (Clark
    et al. 2020, ELECTRA). Of what is in no block, the head is what follows the first block and is not an embedding.
    Raises UserError: the model has no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        kind = type(model).__name__
        raise UserError(f"layer_decay = {layer_decay:g}: the code of a {kind} names no blocks. Remove it")
    head = len(blocks) + 1
    depths = {id(each): depth for depth, block in enumerate(blocks, 1) for each in block.parameters()}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            for each in module.parameters():
                depths.setdefault(id(each), 0)
    parameters = list(model.parameters())
    for each in takewhile(lambda each: not depths.get(id(each)), parameters):
        depths[id(each)] = 0
    return [
        {**group, "lr_scale": layer_decay ** (head - depth)}
        for depth in reversed(range(head + 1))
        for group in decay_groups((each for each in parameters if depths.get(id(each), head) == depth), weight_decay)
    ]


def hidden_matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return {name: weight} of the parameters that Muon is for: the trained matrices of linear layers in the model's
    blocks, and those of experts (experts, rows, columns). Embeddings, positions and heads are not among them."""
    inside = {
        id(parameter)
        for block in blocks_of(model)
        for module in block.modules()
        if not isinstance(module, torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in inside
        and (name.endswith(".weight"), len(true_shape(parameter))) in ((True, 2), (False, 3))
    }


def flops_per_token(model: "PreTrainedModel", sequence_length: int) -> float:
    """Floating-point operations of one trained token: forward 2, backward 4 for each weight of a matrix product (2 for
    a frozen one, which has no gradient of its own), and attention over the whole sequence (Chowdhery et al. 2022,
    PaLM, appendix B: 6 N + 12 L H T). Causal masking, document boundaries and recomputed activations are not
    subtracted or added, so that figures of different settings compare. Embedding lookups are not matrix products; a
    tied embedding counts once, as the head. Of a layer's experts those count that a token passes through."""
    config = model.config
    chosen = getattr(config, "num_experts_per_tok", None)
    weights = _matrix_flops(model, model.get_output_embeddings(), chosen)
    width = family_of(config).attention_width(config)
    return weights + 12.0 * config.num_hidden_layers * width * sequence_length


def flops_per_pair_token(model: "PreTrainedModel", source_length: float, target_length: float) -> float:
    """Floating-point operations of one trained token of an encoder-decoder model: the mean over the tokens of a source
    and its target. Source tokens pass through the encoder and the decoder's keys and values of the source, target
    tokens through the rest of the decoder and the head."""
    config = model.config
    encoder = model.get_encoder()
    decoder = model.get_decoder()
    layers = getattr(config, "encoder_layers", config.num_hidden_layers)
    decoder_layers = getattr(config, "decoder_layers", getattr(config, "num_decoder_layers", layers))
    width = family_of(config).attention_width(config)
    frozen = any(not parameter.requires_grad for parameter in decoder.parameters())
    crossing = (4.0 if frozen else 6.0) * 2 * decoder_layers * config.hidden_size * width  # the source's keys, values
    of_source = _matrix_flops(encoder) + crossing + 12.0 * layers * width * source_length
    of_target = _matrix_flops(decoder) - crossing + _matrix_flops(model.get_output_embeddings())
    of_target += 12.0 * decoder_layers * width * (source_length + target_length)
    return (source_length * of_source + target_length * of_target) / (source_length + target_length)


def _matrix_flops(module: torch.nn.Module, head: torch.nn.Module | None = None, chosen: int | None = None) -> float:
    """Return the operations per token in matrix products: with the weights of `head`, and all others but lookup
    tables. `chosen`: the number of experts that a token passes through."""
    lookup = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    heads = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    total = 0.0
    for parameter in module.parameters():
        shape = true_shape(parameter)
        if len(shape) >= 2 and (id(parameter) not in lookup or id(parameter) in heads):
            active = chosen / shape[0] if chosen and len(shape) == 3 else 1.0  # shape: (experts, outputs, inputs)
            total += (6.0 if parameter.requires_grad else 4.0) * true_numel(parameter) * active
    return total


DAMAGED_REMEDY = "They cannot be repaired: take an earlier checkpoint, or get the files again"
OVERFLOW_REMEDY = "A value above 65,504 is infinite in fp16: use --precision bf16, if the files are good"


def check_finite(
    model: torch.nn.Module, origin: str, gather: Callable[[Any], list[Any]] = lambda names: [names]
) -> None:
    """Check that no weight is NaN or infinite. All ranks call it together: under ZeRO-3 each checks its shard.
    `origin`: how the user named the weights, e.g. "model_name_or_path = 'x'". `gather`: (object of this rank) -> list
    of all ranks' objects; where ranks hold shards. Raises UserError on all ranks, with the names of the weights."""
    of_this_rank = []
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        values = parameter.detach()
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None:  # ZeRO-3's shard without padding
            before = torch.distributed.get_rank() * shard.numel()
            values = shard.flatten()[: max(0, vars(parameter)["ds_numel"] - before)]
        if not values.numel() or not values.is_floating_point() or values.element_size() == 1 or values.is_meta:
            continue  # quantised weights are integers, or are scaled
        if not torch.isfinite(torch.stack(torch.aminmax(values))).all():  # needs no mask as large as the weight
            of_this_rank.append(name)
    damaged = list(dict.fromkeys(name for names in gather(of_this_rank) for name in names))
    if damaged:
        any_fp16 = any(parameters[name].dtype == torch.float16 for name in damaged)
        raise UserError(
            f"{origin}: {len(damaged)} of its {len(parameters)} weights hold NaN or infinity: {name_some(damaged)}. "
            f"{OVERFLOW_REMEDY if any_fp16 else DAMAGED_REMEDY}"
        )


def replace_parameters(model: torch.nn.Module, others: dict[int, torch.nn.Parameter]) -> None:
    """Replace a model's parameters by others, by the id of each; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, others[id(parameter)])
