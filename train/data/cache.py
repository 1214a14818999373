"""Where prepared data lives, and how the processes of a machine share the work of preparing it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.recipe.options import SourceOptions


def cache_root(cache_dir: str | None) -> Path:
    """The folder for prepared data: the recipe's cache_dir, else zerofit's part of the datasets library's cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "zerofit"


def prepare_anew(recipe: SourceOptions) -> bool:
    """Whether this process is to leave the cache aside: the first one, where the recipe asks for it."""
    return recipe.overwrite_cache and int(os.environ.get("RANK", "0")) == 0


@contextmanager
def one_process_at_a_time(cache_dir: str | None) -> Iterator[None]:
    """Let the first process do the work while the others wait at a file, and then find it done in the cache.

    They wait at a file and not in a collective: no process group exists yet, so none can time out, however long the
    tokenising takes.
    """
    from filelock import FileLock

    root = cache_root(cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    if int(os.environ.get("RANK", "0")) != 0:
        from datasets.utils import disable_progress_bars

        disable_progress_bars()
    with FileLock(root / "prepare.lock"):
        yield
