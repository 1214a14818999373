"""A model's folder and its files, read without transformers and torch."""

from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.parsing import parse_json

TRAINED_WITH = "trained_with"  # in tokenizer_config.json: the options that shaped the inputs in training
WEIGHTS = ("*.safetensors", "*.bin", "*.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
                   "spiece.model", "spm.model", "sentencepiece.bpe.model", "source.spm")  # fmt: skip


def model_folder(name: str) -> str:
    """The folder of a named model: for a run's folder its model/; a hub name is unchanged."""
    path = Path(name).expanduser()
    files = ("config.json", "adapter_config.json")
    if path.is_dir() and not any((path / file).is_file() for file in files):
        inside = path / "model"
        if any((inside / file).is_file() for file in files):
            return str(inside)
    return str(path) if path.exists() else name


def weights_key(name: str) -> Any:
    """A key that tells a model's weights from others: the files of its folder; of a hub name its commit in the hub's
    cache, which its configuration has been read into."""
    if not (folder := Path(model_folder(name))).is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")  # .../snapshots/COMMIT/config.json
        return name, Path(found).parent.name if isinstance(found, str) else None
    stats = ((file.name, file.stat()) for pattern in WEIGHTS for file in folder.glob(pattern))
    return sorted((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def is_adapter(name: str) -> bool:
    return (Path(name) / "adapter_config.json").is_file()


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError if it holds anything else."""
    try:
        contents = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(contents, dict):
        raise UserError(f"{path} holds no JSON object")
    return contents
