"""Weights that are NaN or infinite, as a diverged run or a damaged copy leaves them."""

from collections.abc import Callable
from typing import Any

import torch

from zerofit.model.parameters import true_numel
from zerofit.recipe.errors import UserError

MAX_NAMED = 3
DAMAGED = "They cannot be repaired: take an earlier checkpoint, or get the files again"
OVERFLOW = "A value above 65,504 is infinite in fp16: use --precision bf16, if the files are good"


def check_finite(model: torch.nn.Module, origin: str, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> None:
    """Check that no weight is NaN or infinite. All ranks call it together: under ZeRO-3 each checks its shard.

    Args:
        origin: how the user named the weights, e.g. "model_name_or_path = 'x'".
        gather: (object of this rank) -> list of all ranks' objects; where ranks hold shards.

    Raises:
        UserError: on all ranks, with the names of the weights and the number of values that are not finite.
    """
    counts: dict[str, int] = {}
    for counts_of_rank in gather(count_not_finite(model)):
        for name, (count, is_shard) in counts_of_rank.items():
            counts[name] = counts.get(name, 0) + count if is_shard else count
    if not counts:
        return
    parameters = dict(model.named_parameters())
    listed = [f"{name} ({count:,} of {true_numel(parameters[name]):,} values)" for name, count in counts.items()]
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    any_fp16 = any(parameters[name].dtype == torch.float16 for name in counts)
    raise UserError(
        f"{origin}: {len(counts)} of its {len(parameters)} weights hold NaN or infinity: "
        f"{', '.join(listed[:MAX_NAMED])}{more}. {OVERFLOW if any_fp16 else DAMAGED}"
    )


@torch.no_grad()
def count_not_finite(model: torch.nn.Module) -> dict[str, tuple[int, bool]]:
    """{weight: (the number of NaN and infinite values that this rank holds of it, whether it holds a shard only)}."""
    counts = {}
    for name, parameter in model.named_parameters():
        values = _local_values(parameter)
        if not values.numel() or not values.is_floating_point() or values.element_size() == 1 or values.is_meta:
            continue  # quantised weights are integers, or are scaled
        if not torch.isfinite(torch.stack(torch.aminmax(values))).all():  # without a mask as large as the weight
            counts[name] = int((~torch.isfinite(values)).sum()), hasattr(parameter, "ds_tensor")
    return counts


def _local_values(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The values of a parameter that this rank holds; under ZeRO-3 without the padding of the last shard."""
    shard = getattr(parameter, "ds_tensor", None)
    if shard is None:
        return parameter.detach()
    before = torch.distributed.get_rank() * shard.numel()
    return shard.flatten()[: max(0, parameter.ds_numel - before)]
