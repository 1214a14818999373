"""Private parts of huggingface_hub. Tried with huggingface_hub 1.x."""

import os

from huggingface_hub import constants

from zerofit.compat import UNTIL_THE_RUN_ENDS, replaced


def work_offline() -> None:
    """Let the hub's libraries read only their cache until the run ends. huggingface_hub reads the variable
    HF_HUB_OFFLINE when it is imported, which has happened before, and has no function to set it. Without it: on a host
    without a network each file is requested six times."""
    UNTIL_THE_RUN_ENDS.enter_context(replaced(constants, "HF_HUB_OFFLINE", True))
    os.environ["HF_HUB_OFFLINE"] = "1"  # for datasets, which is imported later
