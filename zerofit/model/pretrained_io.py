"""Stored models, in a folder or on the hub: loaded completely or refused. For the tools, which do not train."""

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.model.configuration import check_quantiser, from_hub_or_folder
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import temporary_path

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WRAPPER_MAPPING = {  # key_mapping: removes what torch.compile, FSDP and DDP put into the names of weights
    **{rf"\b{name}\.": "" for name in ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")},
    r"^module\.": "",
}
DTYPE_OF_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def removes_wrapper(conversion: Any) -> bool:
    """Return whether a step of loading removes the name of a wrapper, which saving must not undo."""
    return not WRAPPER_MAPPING.keys().isdisjoint(conversion.source_patterns)


def read_model(
    auto_class: Any, option: str, name: str, config: "PretrainedConfig", *, precision: str | None, **more: Any
) -> tuple[Any, list[str]]:
    """Return (the model in evaluation mode, names of its weights that are not stored or have another shape there).
    Raises UserError: there are no such weights, they are broken or hold NaN, or the package for their quantisation is
    not installed.

    Args:
        precision: fp32, bf16 or fp16; None: that of the stored weights.
        config: its configuration, which may have another head than the stored weights.
        more: further arguments of from_pretrained, e.g. revision or trust_remote_code.
    """
    import torch

    from zerofit.compat.transformers import keep_conversions
    from zerofit.model.compilation import fuse_gelu  # imports torch
    from zerofit.model.parameters import check_finite

    common = {"dtype": DTYPE_OF_PRECISION.get(precision or "", "auto"), "trust_remote_code": False, **more}
    quantised = getattr(config, "quantization_config", None) is not None
    if quantised:
        check_quantiser(option, name, config)
        if device := torch.accelerator.current_accelerator(check_available=True):
            common["device_map"] = {"": device}  # they cannot be moved later
    try:
        model, info = from_hub_or_folder(
            option,
            name,
            auto_class.from_pretrained,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            key_mapping=WRAPPER_MAPPING,
            **common,
        )
    except RuntimeError as error:
        if not quantised:
            raise
        raise UserError(f"{option} = {name!r} is quantised, and needs more: {first_line(error)}") from None
    keep_conversions(model, lambda step: not removes_wrapper(step))
    check_finite(model, f"{option} = {name!r}")
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    return fuse_gelu(model).eval(), sorted({*info["missing_keys"], *mismatched})


def check_output(output: Path) -> None:
    """Raises UserError unless the folder is new or empty."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"output = {str(output)!r} is not empty, or no folder; nothing is replaced. Name a new folder")


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Open a temporary folder next to `output`, renamed to `output` at the end, and removed after an error."""
    partial = temporary_path(output)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"output = {str(output)!r} cannot be created: {error.strerror}") from None
    try:
        yield partial
        partial.rename(output)  # replaces an empty folder, too
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def silence_libraries() -> None:
    """Keep, in a tool's own process, the messages of transformers, peft and DeepSpeed off the terminal."""
    from transformers.utils import logging as of_transformers

    warnings.simplefilter("ignore")
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)  # it writes to stdout
