"""The strategy pairs that there are."""

from pathlib import Path

from zerofit.recipe.errors import UserError, nearest
from zerofit.recipe.places import CONFIGS, configs


def find_strategies(names: list[str]) -> dict[str, Path]:
    """{name: accelerate YAML}. A name is one in accelerate_configs/, or a .yaml file.

    Raises:
        UserError: there is no such file.
    """
    folder = configs()
    files = {name: Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml" for name in names}
    missing = [name for name, path in files.items() if not path.is_file()]
    if missing:
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        raise UserError([f"strategy {name!r}: there is no file {files[name]}. {_remedy(name, known)}"
                         for name in missing])  # fmt: skip
    return files


def _remedy(name: str, known: list[str]) -> str:
    if not known:
        return f"Start it where the folder {CONFIGS}/ is, or name .yaml files"
    close = nearest(name, known)
    return f"{f'Did you mean {close}? ' if close else ''}There are {', '.join(known)}"
