"""Private parts of megatron-core (`megatron.core` of the extra `megatron`). Tried with megatron-core 0.16.1."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from zerofit.compat import UNTIL_THE_RUN_ENDS, replaced


def load_without_pickles(modules: Iterable[Any], numpy: Any) -> None:
    """Replace numpy in these modules of megatron-core's datasets until the run ends. They load index files with
    allow_pickle=True, and no argument forbids it. Without it: a file next to a corpus could run code on the machine
    that trains on it. `numpy`: an object that loads without pickles."""
    for module in modules:
        UNTIL_THE_RUN_ENDS.enter_context(replaced(module, "numpy", numpy))


def as_first_rank() -> AbstractContextManager[None]:
    """Within this context torch.distributed.get_rank returns 0. BlendedDataset calls it, and there is no process group
    yet. Without it: Megatron's samples could be read only after the process group is initialized."""
    return replaced(torch.distributed, "get_rank", lambda *_: 0)
