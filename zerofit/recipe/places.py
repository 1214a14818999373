"""The folders of the program's scripts, strategies and recipes, and of prepared data.

The program's lie beside the package in a clone, and within it where it is installed.
"""

import functools
import hashlib
import os
from pathlib import Path

from zerofit.recipe.errors import nearest

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS, RECIPES = Path("accelerate_configs"), Path("recipes")


@functools.cache
def digest_of_code(folder: Path = PACKAGE, without: tuple[str, ...] = ()) -> str:
    """A hash of the Python files in a folder of the program, changes that are not committed included. `without`: how
    the paths in the folder begin of those that are left out."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder).as_posix()
        if not name.startswith(without):
            digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def place(name: str | Path) -> Path:
    """A folder or file of the program, by its path in a clone."""
    inside = PACKAGE / name
    return inside if inside.exists() else PACKAGE.parent / name


def script(task: str) -> Path:
    """The script of a task, such as clm."""
    return place("train") / f"{task}.py"


def configs() -> Path:
    """The folder of the strategies' YAML files: that of the current folder, or the program's own."""
    return CONFIGS if CONFIGS.is_dir() else place(CONFIGS)


def nearest_recipe(name: str) -> str | None:
    """The recipe whose name is most similar to that of a file which is not there; None if none is."""
    known = {file.stem: file for folder in (place(RECIPES), RECIPES) for file in folder.glob("*/*.yaml")}
    close = nearest(Path(name).stem, known)
    return str(known[close]) if close else None


def recipe_file(name: str) -> str:
    """The file of a recipe: the name itself, or one of the current folder or of the program that has this name without
    its folder and ending; else what was given."""
    found = (file for folder in (RECIPES, place(RECIPES)) for file in sorted(folder.glob(f"*/{name}.yaml")))
    return name if Path(name).is_file() else str(next(found, name))


def cache_root(cache_dir: str | None) -> Path:
    """The folder of prepared data: the recipe's cache_dir, else a folder in the cache of the datasets library."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    # the cache of the datasets library, without importing it, which takes a second (datasets/config.py)
    hub = os.environ.get("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    return Path(os.environ.get("HF_DATASETS_CACHE", f"{hub}/datasets")).expanduser() / "zerofit"


def shown_path(path: Path) -> str:
    """A path in a command that is shown: relative to the current folder where it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
