"""The rows of each parameter that a rank keeps where fully_shard shards them: FSDP2 never needs them in full."""

import torch

from zerofit.model.tensor_parallel.cut import Cut, cut_parameter


def rows_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """[first, last + 1) of `count` rows, as torch.chunk cuts them: later ranks have fewer, or none."""
    most = -(-count // size)
    return min(rank * most, count), min((rank + 1) * most, count)


def keep_rows(model: torch.nn.Module, rank: int, size: int) -> None:
    """Keep this rank's rows of all parameters."""
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape  # where peft looks for the whole shape of GPT-2's layers
        cut_parameter(parameter, Cut(tuple(parameter.shape), 0, (rows_of(parameter.shape[0], rank, size),)))
