"""The tokenizer of a name without a model: the same one that training loads from there."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from zerofit.model.folders import model_folder
from zerofit.model.tokenizer import (
    TokenizerOptions,
    find_vocabulary_files,
    load_tokenizer,
    tokenizer_from_vocabulary_files,
)
from zerofit.recipe.errors import UserError
from zerofit.tools.meta_tokenizer import LLAMA_3, convert_tokenizer, tiktoken_ranks

SELF_DESCRIBING = ("tokenizer.json", "tokenizer_config.json")  # files that say which kind of tokenizer a folder has
LLAMA_3_SPECIAL = 256  # special tokens that all of Llama 3's models have


def named_tokenizer(option: str, name: str, trust_remote_code: bool = False):
    """The tokenizer in a folder, of a hub name, or in a tokenizer.model.

    Bare vocabulary files do not say which kind of tokenizer they are for. A config.json beside them says it, as in
    training; without one, vocab.json and merges.txt are GPT-2's, and a tokenizer.model is a Llama's.

    Args:
        option: the option's name, for messages.

    Raises:
        UserError: there is none, or it cannot be loaded.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _in_file(option, path)
    if not path.is_dir():
        return _load(option, name, None, trust_remote_code)
    folder = Path(model_folder(name))
    if any((folder / file).is_file() for file in SELF_DESCRIBING):
        return _load(option, str(folder), None, trust_remote_code)
    return _load_bare(option, folder, trust_remote_code)


def _load_bare(option: str, folder: Path, trust_remote_code: bool):
    from transformers import LlamaConfig

    model = folder / "tokenizer.model"
    if model.is_file() and tiktoken_ranks(model):
        return _of_tiktoken(model)
    if (folder / "config.json").is_file():
        return _load(option, str(folder), None, trust_remote_code)
    bare = str(folder / "vocab.json"), str(folder / "merges.txt")
    if files := bare if all(map(os.path.isfile, bare)) else find_vocabulary_files(folder):
        return tokenizer_from_vocabulary_files(*files)
    if model.is_file():
        return _load(option, str(folder), LlamaConfig(), trust_remote_code)
    raise UserError(f"{option} = {str(folder)!r} has no tokenizer. Name the folder with its tokenizer.json")


def _in_file(option: str, file: Path):
    if file.name in (*SELF_DESCRIBING, "vocab.json", "merges.txt"):
        raise UserError(f"{option} = {str(file)!r} is one file of a tokenizer. Name its folder: {file.parent}")
    if tiktoken_ranks(file):
        return _of_tiktoken(file)
    if file.suffix != ".model":
        raise UserError(f"{option} = {str(file)!r} is not a tokenizer. Name a folder, a hub name or a tokenizer.model")
    with tempfile.TemporaryDirectory() as folder:  # other files beside it would be read instead
        from transformers import LlamaConfig

        shutil.copyfile(file, Path(folder) / "tokenizer.model")
        try:
            return _load(option, folder, LlamaConfig(), False)
        except UserError as error:
            raise UserError(str(error).replace(folder, str(file))) from None


def _of_tiktoken(file: Path):
    """Llama 3's. The params.json beside it says which special tokens it has; without one they are those of 3.1."""
    params = file.parent / "params.json"
    params_values = json.loads(params.read_text(encoding="utf-8")) if params.is_file() else {"use_scaled_rope": True}
    ranks = len(tiktoken_ranks(file))
    vocab = (
        max(ranks + LLAMA_3_SPECIAL, params_values.get("vocab_size") or 0) if ranks > 1000 else ranks + len(LLAMA_3)
    )
    return convert_tokenizer(file, vocab, "3.1" if params_values.get("use_scaled_rope") else "3").tokenizer


def _load(option: str, name: str, config, trust_remote_code: bool):
    return load_tokenizer(TokenizerOptions(option, name, trust_remote_code=trust_remote_code), config)
