"""Private parts of transformers' expert parallelism."""

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from zerofit.compat import replaced


@contextlib.contextmanager
def exchanging_tokens_with(counts: Callable[..., Any], rows: Callable[..., Any]) -> Iterator[None]:
    """Within this context transformers' AllToAllEP exchanges through these functions.

    One process has no group of several ranks; what an exchange is made of has no interface of its own. Tried with
    transformers 5.23. Without it: `zerofit plan` cannot trace divided experts.

    Args:
        counts: stands for torch.distributed.all_to_all_single, (received, sent, group=).
        rows: stands for the one with a gradient, (rows, received sizes, sent sizes, group) -> rows.
    """
    library = import_module("transformers.distributed.expert_parallel")
    arrived = SimpleNamespace(apply=lambda received: received)
    with (
        replaced(library, "all_to_all_single", counts),
        replaced(library, "all_to_all_single_autograd", rows),
        replaced(library, "_WaitTensor", arrived),
    ):
        yield


def multiplying_without_groups() -> contextlib.AbstractContextManager[None]:
    """Within this context transformers multiplies experts by its own operator, and not by torch's grouped product.

    Its function asks for the device and the version of torch; no setting chooses. torch's operator has no shapes for
    fake tensors of every dtype. Tried with transformers 5.23. Without it: `zerofit plan` cannot trace experts in fp32.
    """
    moe = import_module("transformers.integrations.moe")
    return replaced(moe, "_can_use_grouped_mm", lambda *args: False)
