"""Private parts of huggingface_hub. Tried with huggingface_hub 1.x."""

import os

from huggingface_hub import constants

from zerofit.compat import UNTIL_THE_RUN_ENDS, replaced


def work_offline() -> None:
    """Let the hub's libraries read their cache alone, until the run ends. The library reads the variable
    HF_HUB_OFFLINE when it is imported, which has happened, and has no function for it. Without it: on a host without a
    network each file is asked for six times."""
    UNTIL_THE_RUN_ENDS.enter_context(replaced(constants, "HF_HUB_OFFLINE", True))
    os.environ["HF_HUB_OFFLINE"] = "1"  # for datasets, which is imported later
