"""Models as they lie in a folder or on the hub, loaded whole or refused: for the tools, which do not train."""

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from train.model.configuration import from_hub_or_folder
from train.recipe.errors import UserError, first_line

ADAPTER_PREFIX = "base_model.model."  # of every name in an adapter's file: peft's wrappers around the model
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
                   "spiece.model", "spm.model", "sentencepiece.bpe.model", "source.spm")  # fmt: skip


def model_folder(name: str) -> str:
    """The folder that a name stands for: of a run it is RUN/model; a hub name stays as it is."""
    path = Path(name).expanduser()
    files = ("config.json", "adapter_config.json")
    if path.is_dir() and not any((path / file).is_file() for file in files):
        inside = path / "model"
        if any((inside / file).is_file() for file in files):
            return str(inside)
    return str(path) if path.exists() else name


def is_adapter(name: str) -> bool:
    return (Path(name) / "adapter_config.json").is_file()


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError: it is anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object")
    return found


def read_config(option: str, name: str, trust_remote_code: bool = False, revision: str | None = None):
    """The transformers configuration of a stored model."""
    from transformers import AutoConfig

    more = {"revision": revision} if revision else {}
    return from_hub_or_folder(option, name, AutoConfig.from_pretrained, trust_remote_code=trust_remote_code, **more)


def read_tokenizer(option: str, name: str, config, trust_remote_code: bool = False):
    """The tokenizer of a stored model, also where its folder holds bare vocabulary files."""
    from train.model.tokenizer import load_tokenizer

    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        raise UserError(f"{option} = {name!r}: the folder has no tokenizer. Copy the files of the model's own into it")
    asked = SimpleNamespace(tokenizer_name=None, model_name_or_path=name, trust_remote_code=trust_remote_code)
    try:
        return load_tokenizer(asked, config)
    except UserError as error:  # it names the option of training
        raise UserError(f"{option}: the tokenizer: {str(error).partition(': ')[2] or error}") from None


def read_model(
    auto_class, option: str, name: str, config, *, precision: str | None, trust_remote_code: bool = False, **more
):
    """The model in evaluation mode, and the names of weights that it has and the stored ones lack or have otherwise.

    Args:
        precision: fp32, bf16 or fp16; None: as it is stored.
        config: its configuration, perhaps with another head than the stored weights have.
        more: further arguments of from_pretrained, e.g. revision.

    Raises:
        UserError: there are no such weights, they are broken or hold NaN, or what their quantisation takes is not
            installed.
    """
    from safetensors import SafetensorError

    from train.model.finite import check_finite

    common = {"dtype": DTYPES.get(precision, "auto"), "trust_remote_code": trust_remote_code, **more}
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised:
        common |= _on_the_accelerator()
    try:
        model, info = from_hub_or_folder(
            option, name, auto_class.from_pretrained,
            config=config, output_loading_info=True, ignore_mismatched_sizes=True, **common,
        )  # fmt: skip
    except SafetensorError as error:
        raise UserError(f"{option} = {name!r}: its weights are broken: {first_line(error)}") from None
    except (ImportError, RuntimeError) as error:
        if not quantised:
            raise
        raise UserError(
            f"{option} = {name!r} is quantised, and cannot be loaded here: {first_line(error)}. Install what it "
            "takes, or name the model that was quantised"
        ) from None
    check_finite(model, f"{option} = {name!r}")
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    return model.eval(), sorted({*info["missing_keys"], *mismatched})


def _on_the_accelerator() -> dict[str, Any]:
    """Quantised weights are put where they are computed with as they are loaded; they cannot be moved later."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {"device_map": {"": device}} if device else {}


def check_output(output: Path) -> None:
    """Raises UserError unless a folder of that name can be written without replacing anything."""
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"output = {str(output)!r} is not empty, and nothing is replaced. Name a new folder")
    if output.exists() and not output.is_dir():
        raise UserError(f"output = {str(output)!r} is a file. Name a folder")


@contextmanager
def whole_or_nothing(output: Path):
    """A folder beside `output` that gets its name at the end, and is gone if there was an error."""
    partial = output.with_name(f"{output.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"output = {str(output)!r} cannot be made: {error.strerror}") from None
    try:
        yield partial
        partial.rename(output)  # over an empty folder, too
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def be_quiet() -> None:
    """For a tool's own process: what transformers, peft and DeepSpeed say of themselves stays off the terminal."""
    import logging
    import warnings

    from transformers.utils import logging as of_transformers

    warnings.simplefilter("ignore")
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)  # it writes to stdout
