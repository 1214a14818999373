"""Builds of torch extensions: DeepSpeed's operations are built, or looked at, as a run starts.

A build takes a minute or more and prints nothing.
"""

import functools
import getpass
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.paths import not_ones_own
from zerofit.strategy.build_locks import extensions_folder


def check_compiled_code() -> None:
    """Before a run: torch, DeepSpeed and Triton run what they find compiled in these folders.

    Raises:
        UserError: others decide what is in one of them.
    """
    triton = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
    user = "unknown"
    with suppress(KeyError, OSError):  # in a container a user may have no name
        user = getpass.getuser()
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{user}"  # torch/_inductor/runtime
    folders = {
        "TORCH_EXTENSIONS_DIR": extensions_folder(),
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor,
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or triton,
    }
    whose = {name: not_ones_own(Path(folder)) for name, folder in folders.items()}
    problems = [
        f"{name}: {folders[name]} {why} and holds compiled code, which would be run. Set {name} to a folder of your "
        "own, which only you can write to"
        for name, why in whose.items()
        if why
    ]
    if problems:
        raise UserError(problems)


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
    def announced(build_directory: str, *args: Any, **kwargs: Any) -> None:
        if not is_built(build_directory):
            print(
                f"note: DeepSpeed's {Path(build_directory).name} is being compiled, once for this machine: up to two "
                f"minutes ({build_directory})",
                flush=True,
            )
        build(build_directory, *args, **kwargs)

    cpp_extension._run_ninja_build = announced


def is_built(folder: str | os.PathLike[str]) -> bool:
    """Whether ninja finds nothing to do there."""
    with suppress(OSError):
        asked = subprocess.run(["ninja", "-n"], cwd=folder, capture_output=True, text=True)
        return "no work to do" in asked.stdout
    return False
