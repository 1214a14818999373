"""Weights that are no numbers: NaN or infinite, as a run that diverged or a damaged copy leaves them."""

from collections.abc import Callable
from typing import Any

import torch

from train.model.parameters import true_numel
from train.recipe.errors import UserError

NAMED = 3
LOST = "Nothing comes of these: take an earlier checkpoint, or get the files anew"
OVERFLOW = "What is above 65,504 is infinite in fp16: use --precision bf16, if the files are good"


def check_finite(model: torch.nn.Module, said: str, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> None:
    """See that all weights are numbers. All ranks call it together: under ZeRO-3 each looks at its share.

    Args:
        said: how the weights were named, e.g. "model_name_or_path = 'x'".
        gather: (what this rank has) -> what each rank has; where ranks hold shards.

    Raises:
        UserError: on all ranks, with the names of the weights and how many of their values are none.
    """
    found: dict[str, int] = {}
    for rank in gather(not_finite(model)):
        for name, (count, is_share) in rank.items():
            found[name] = found.get(name, 0) + count if is_share else count
    if not found:
        return
    parameters = dict(model.named_parameters())
    named = [f"{name} ({count:,} of {true_numel(parameters[name]):,} values)" for name, count in found.items()]
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    halved = any(parameters[name].dtype == torch.float16 for name in found)
    raise UserError(
        f"{said}: {len(found)} of its {len(parameters)} weights hold NaN or infinity: "
        f"{', '.join(named[:NAMED])}{more}. {OVERFLOW if halved else LOST}"
    )


@torch.no_grad()
def not_finite(model: torch.nn.Module) -> dict[str, tuple[int, bool]]:
    """{weight: (how many of the values that this rank has of it are NaN or infinite, whether it has a share only)}."""
    found = {}
    for name, parameter in model.named_parameters():
        values = _held(parameter)
        if not values.numel() or not values.is_floating_point() or values.element_size() == 1 or values.is_meta:
            continue  # quantised weights are whole numbers, or are scaled
        if not torch.isfinite(torch.stack(torch.aminmax(values))).all():  # without a mask as large as the weight
            found[name] = int((~torch.isfinite(values)).sum()), hasattr(parameter, "ds_tensor")
    return found


def _held(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The values of a parameter that this rank has; under ZeRO-3 without what fills the last share up."""
    share = getattr(parameter, "ds_tensor", None)
    if share is None:
        return parameter.detach()
    before = torch.distributed.get_rank() * share.numel()
    return share.flatten()[: max(0, parameter.ds_numel - before)]
