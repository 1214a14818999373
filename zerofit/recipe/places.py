"""Where the scripts, strategies and recipes lie: beside the package in a clone, within it where it is installed."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS, RECIPES = Path("accelerate_configs"), Path("recipes")


def place(name: str | Path) -> Path:
    """A folder or file of the program, by its path in a clone."""
    inside = PACKAGE / name
    return inside if inside.exists() else PACKAGE.parent / name


def script(task: str) -> Path:
    """The script of a task: clm, cls or seq2seq."""
    return place("train") / f"{task}.py"


def configs() -> Path:
    """The folder of the strategies' YAML files: that of the current folder, or the program's own."""
    return CONFIGS if CONFIGS.is_dir() else place(CONFIGS)


def recipe_named(name: str) -> Path | None:
    """A recipe by its name without folder and ending, of the current folder or of the program."""
    folders = (RECIPES, place(RECIPES))
    return next((file for folder in folders for file in sorted(folder.glob(f"*/{name}.yaml"))), None)
