"""Private parts of megatron-core (`megatron.core` of the extra `megatron`). Tried with megatron-core 0.16.1."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerofit.compat import UNTIL_THE_RUN_ENDS, replaced


def load_without_pickles(modules: Iterable[Any], numpy: Any) -> None:
    """Let these modules of megatron-core's datasets have another numpy, until the run ends. They load an index, now or
    later, with allow_pickle=True, and no argument forbids it. Without it: a file beside a corpus could run code in
    whoever trains on it."""
    for module in modules:
        UNTIL_THE_RUN_ENDS.enter_context(replaced(module, "numpy", numpy))


def as_first_rank() -> AbstractContextManager[None]:
    """Within this context torch.distributed.get_rank is 0: BlendedDataset asks for it, and there is no group yet.
    Without it: samples of Megatron could be made only after the ranks have met."""
    return replaced(torch.distributed, "get_rank", lambda *_: 0)
