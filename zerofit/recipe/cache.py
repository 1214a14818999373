"""The folder of prepared data, and a lock: one process of a machine prepares it while the others wait."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zerofit.recipe.data_options import SourceOptions
from zerofit.recipe.files import is_shared


def cache_root(cache_dir: str | None) -> Path:
    """The folder of prepared data: the recipe's cache_dir, else a folder in the cache of the datasets library."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(_datasets_cache()).expanduser() / "zerofit"


def _datasets_cache() -> str:
    """The cache of the datasets library, without importing it, which takes a second (datasets/config.py)."""
    environment = os.environ
    hub = environment.get("HF_HOME", f"{environment.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    return environment.get("HF_DATASETS_CACHE", f"{hub}/datasets")


def prepare_anew(recipe: SourceOptions) -> bool:
    """Whether this process may replace cached tables: only with overwrite_cache.

    On a local disk the first process of each machine replaces them (see `made_by_this_launch`). On a shared file
    system only rank 0 does, since other machines may have mapped a file that a second process would replace.
    """
    return recipe.overwrite_cache and (_rank() == 0 or not is_shared(cache_root(recipe.cache_dir)))


def made_by_this_launch(files: Iterable[Path]) -> bool:
    """Whether one of these files is newer than the launcher of this machine's processes, made by one of them."""
    import psutil

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    launch_time = psutil.Process(os.getppid()).create_time()
    return any(file.stat().st_mtime >= launch_time for file in files)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def one_process_at_a_time(cache_dir: str | None) -> Iterator[None]:
    """Hold a file lock: the first process does the work; the others wait, and then find the result in the cache.

    A file lock and no collective: no process group exists yet, so none can time out, however long tokenizing takes.
    """
    from filelock import FileLock

    root = cache_root(cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    from datasets.utils import disable_progress_bars
    from datasets.utils.logging import CRITICAL, set_verbosity

    set_verbosity(CRITICAL)  # what its errors log comes with the exception, which has our own message
    if _rank() != 0 or not sys.stderr.isatty():
        disable_progress_bars()
    with FileLock(root / "prepare.lock"):
        yield
