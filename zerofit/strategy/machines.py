"""Runs on several machines: whether all of them have the same, and what to say where one has not."""

import platform
from typing import Any

import torch.distributed as dist

from zerofit.recipe.errors import UserError

SHARED_FOLDER_REMEDY = "output_dir must be on a file system that all machines share"


def all_gather_objects(value: Any) -> list[Any]:
    """Gather a small object from each rank on every rank; a list of one without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_same(facts: dict[str, Any], remedy: str) -> None:
    """Check that all ranks have the same. All of them call it together. `facts`: {what it is, in words: what this rank
    has}. `remedy`: what to do where they differ. Raises UserError on all ranks, naming the first rank that differs
    from rank 0, and its machine."""
    ranks = all_gather_objects((platform.node(), facts))
    (first, expected), *others = ranks
    for rank, (machine, facts_there) in enumerate(others, 1):
        for name in expected:
            if facts_there.get(name) != expected[name]:
                raise UserError(
                    f"rank {rank}, on machine {machine}, has another {name} than rank 0, on machine {first}: "
                    f"{_shown(facts_there.get(name))}, and there {_shown(expected[name])}. {remedy}"
                )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:140]} ... {text[-140:]}"
