"""What fully_shard shards and gathers: the rows of each parameter that a rank keeps (FSDP2 never needs them in full),
and the ends of a model, which are gathered beside its blocks."""

from collections import Counter

import torch

from zerofit.model.compilation import blocks_of
from zerofit.model.tensor_parallel.cut import Cut, cut_parameter


def rows_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """[first, last + 1) of `count` rows, as torch.chunk cuts them: later ranks have fewer, or none."""
    rows = -(-count // size)
    return min(rank * rows, count), min((rank + 1) * rows, count)


def keep_rows(model: torch.nn.Module, rank: int, size: int) -> None:
    """Keep this rank's rows of all parameters."""
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape  # where peft looks for the whole shape of GPT-2's layers
        cut_parameter(parameter, Cut(tuple(parameter.shape), 0, (rows_of(parameter.shape[0], rank, size),)))


def ends_of(model: torch.nn.Module) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """([the embedding], [the final norm, the head]) of a model that predicts tokens: what is gathered for itself,
    as torchtitan does, beside the blocks; empty where other modules share a weight of it, as tied ends do."""
    blocks, embedding, head = blocks_of(model), model.get_input_embeddings(), model.get_output_embeddings()
    if not blocks or head is None:
        return [], []
    sharers = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    own = [all(sharers[id(each)] == 1 for each in end.parameters()) for end in (embedding, head)]
    modules, within = list(model.modules()), set(head.modules())
    after = modules[modules.index([*blocks[-1].modules()][-1]) + 1 :]
    norms = [each for each in after if each not in within and any(True for _ in each.parameters(recurse=False))]
    return [embedding] * (own[0] and isinstance(embedding, torch.nn.Embedding)), [*norms, head] * own[1]
