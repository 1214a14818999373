"""An error that ends a rank, explained where something is known of it."""

import re
import sys
import traceback
from typing import TYPE_CHECKING

from zerofit.health.out_of_memory import explain
from zerofit.health.out_of_memory_errors import causes_of, is_out_of_memory
from zerofit.recipe.errors import EXIT_FAILED, EXIT_OUT_OF_MEMORY, first_line, print_last, printable

if TYPE_CHECKING:
    from zerofit.training.run import Run

# What torch.distributed says where another process is gone: gloo (torch 2.13, each seen by killing one of two
# processes in all_reduce, all_gather, reduce_scatter, barrier, gather_object and broadcast_object_list), the store
# through which processes find each other, and NCCL.
OF_GLOO = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "Application timeout caused pair closure",
)
OF_TORCH = (
    "Connection was likely closed",
    "failed to recv",
    "sendBytes failed",
    "recvValue failed",
    "wait timeout after",
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "communicator was aborted",
    "collective operation timeout",
    "Timeout at NCCL work",
)


def explain_failure(error: Exception, run: "Run") -> int | None:
    """Tell of memory that ran out, and of a process that is gone. Returns the exit code; None: nothing is known."""
    phase, update = run.watchdog.at
    if is_out_of_memory(error):
        frames = traceback.extract_tb(error.__traceback__)
        if phase == "forward" and any("cross_entropy" in frame.name for frame in frames):
            phase = "loss"
        print_last(printable(f"\n{explain(error, phase, update, run)}"))
        return EXIT_OUT_OF_MEMORY
    if died_elsewhere(error):
        where = f"phase {phase} of update {update}" if update else f"phase {phase}"
        said = re.sub(r"^\[\S+\.cc:\d+\] ", "", first_line(error).split(". ")[0])  # a line of gloo's source
        cause = f"another process is gone ({said})"
        said = f"rank {run.strategy.layout.rank} leaves in {where}: {cause}"
        said = "\n  waiting  ".join([said, *run.watchdog.waits_for()])
        print(printable(f"\n{said}"), file=sys.stderr, flush=True)
        return EXIT_FAILED  # whoever died first has the cause
    return None


def died_elsewhere(error: BaseException) -> bool:
    """Return True if an error, or what it came from, only tells that another process is gone, which has the cause."""
    texts = [str(each) for each in causes_of(error) if isinstance(each, RuntimeError)]
    return any(words in text for text in texts for words in (*OF_TORCH, *(OF_GLOO if "gloo" in text.lower() else ())))
