"""Where prepared data lives, and how the processes of a machine share the work of preparing it."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from train.recipe.data_options import SourceOptions
from train.recipe.files import is_shared


def cache_root(cache_dir: str | None) -> Path:
    """The folder for prepared data: the recipe's cache_dir, else zerofit's part of the datasets library's cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "zerofit"


def prepare_anew(recipe: SourceOptions) -> bool:
    """Whether this process may put new tables in the place of cached ones: where the recipe asks for it.

    A cache of the machine's own is renewed on each machine, by the process that comes first (`made_by_this_launch`);
    one that machines share by rank 0 alone, since others may have mapped what a second one would replace.
    """
    return recipe.overwrite_cache and (_rank() == 0 or not is_shared(cache_root(recipe.cache_dir)))


def made_by_this_launch(files: Iterable[Path]) -> bool:
    """Whether some of these files are younger than the launcher of this machine's processes, which all of them ask."""
    import psutil

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    began = psutil.Process(os.getppid()).create_time()
    return any(file.stat().st_mtime >= began for file in files)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def one_process_at_a_time(cache_dir: str | None) -> Iterator[None]:
    """Let the first process do the work while the others wait at a file, and then find it done in the cache.

    They wait at a file and not in a collective: no process group exists yet, so none can time out, however long the
    tokenising takes.
    """
    from filelock import FileLock

    root = cache_root(cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    if _rank() != 0 or not sys.stderr.isatty():
        from datasets.utils import disable_progress_bars

        disable_progress_bars()
    with FileLock(root / "prepare.lock"):
        yield
