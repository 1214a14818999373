"""The folder of prepared data."""

import os
from pathlib import Path


def cache_root(cache_dir: str | None) -> Path:
    """The folder of prepared data: the recipe's cache_dir, else a folder in the cache of the datasets library."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    # the cache of the datasets library, without importing it, which takes a second (datasets/config.py)
    hub = os.environ.get("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE", f"{hub}/datasets")).expanduser() / "zerofit"
