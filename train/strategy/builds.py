"""Builds of torch extensions: DeepSpeed's operations are built, or looked at, as a run starts.

A build takes a minute or more and prints nothing.
"""

import functools
import os
import subprocess
from contextlib import suppress
from pathlib import Path


def announce_builds() -> None:
    """From now on, say so when an operation is about to be built; nothing where it is in the cache.

    One process of a machine builds, the others wait for it: that one speaks. torch asks ninja each time, whose answer
    only ninja knows: it depends on flags, versions and times of files.
    """
    from torch.utils import cpp_extension

    build = getattr(cpp_extension, "_run_ninja_build", None)  # torch's own: absent one day, the run is silent again
    if build is None or hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def announced(build_directory: str, *args, **kwargs) -> None:
        if not is_built(build_directory):
            print(
                f"note: DeepSpeed's {Path(build_directory).name} is being compiled, once for this machine: up to two "
                f"minutes ({build_directory})",
                flush=True,
            )
        build(build_directory, *args, **kwargs)

    cpp_extension._run_ninja_build = announced


def is_built(folder: str | os.PathLike) -> bool:
    """Whether ninja finds nothing to do there."""
    with suppress(OSError):
        asked = subprocess.run(["ninja", "-n"], cwd=folder, capture_output=True, text=True)
        return "no work to do" in asked.stdout
    return False
