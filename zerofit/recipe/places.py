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


def recipe_file(name: str) -> str:
    """The file of a recipe: the name itself, or one of the current folder or of the program that has this name without
    its folder and ending; else what was given."""
    found = (file for folder in (RECIPES, place(RECIPES)) for file in sorted(folder.glob(f"*/{name}.yaml")))
    return name if Path(name).is_file() else str(next(found, name))
