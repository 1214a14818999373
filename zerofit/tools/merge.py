r"""`zerofit merge`: a LoRA adapter folded into its base, W + scale * B A, as a plain folder that transformers loads.

    zerofit merge --adapter outputs/notes/model --output outputs/notes-merged

The merge is checked twice: the merged model has the logits of base and adapter before anything is written, and so has
the written folder, read back before it gets its name.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from zerofit.model.adapter_folder import open_adapter
from zerofit.model.pretrained_io import check_output, silence_libraries
from zerofit.recipe.base import option
from zerofit.recipe.errors import UserError
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe
from zerofit.record.terminal import log_lines
from zerofit.tools.tool_recipe import PRECISIONS

HINTS = {
    **dict.fromkeys(
        "model model_name_or_path model_path adapter_name_or_path lora peft_model checkpoint".split(),
        "say --adapter FOLDER, such as outputs/RUN/model",
    ),
    **dict.fromkeys("output_dir export_dir save_dir out".split(), "say --output FOLDER"),
    **dict.fromkeys("base_model base_model_name_or_path".split(), "say --base; by default it is the adapter's own"),
}
CONVERTERS = ("convert_hf_to_gguf.py", "llama-convert-hf-to-gguf")  # the script's name, and that of its package
REMEDY = """llama.cpp's converter is not here. Get it, and name its folder in LLAMA_CPP:
  git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install ./llama.cpp/gguf-py
  export LLAMA_CPP=$PWD/llama.cpp"""


@dataclass
class MergeOptions(Recipe):
    """Fold a LoRA adapter into its base"""

    adapter: str = option(
        None,
        "The adapter's folder: adapter_config.json and adapter_model.safetensors.",
        required="no adapter: set --adapter to the folder of one, e.g. outputs/RUN/model",
    )
    output: str = option(
        None,
        "The folder to write; it must not exist yet, or be empty.",
        required="no output: set --output to the folder that the merged model is to be written to",
    )
    base: str | None = option(None, "The base model, a folder or a hub name; by default the one the adapter names.")
    precision: str | None = option(None, "Of the merged weights; by default the base's.", choices=PRECISIONS)
    dequantize: bool = option(False, "Merge into a quantised base, whose weights are turned back to floats first.")
    gguf: str | None = option(None, "Write this file as well, in GGUF, by llama.cpp's converter.")
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(MergeOptions, argv, prog="zerofit merge", tool=True, hints=HINTS)
    from zerofit.tools.merge_adapter import merge

    folder = open_adapter(options.adapter)
    output = Path(options.output).expanduser()
    check_output(output)
    gguf = Path(options.gguf).expanduser() if options.gguf else None
    converter = find_converter(gguf) if gguf else []
    silence_libraries()
    log_lines(*merge(folder, output, options), f"merged model  {output}")
    if gguf:
        log_lines(to_gguf(converter, output, gguf))
    return 0


def find_converter(gguf: Path) -> list[str]:
    """The command that starts the converter: from the folder LLAMA_CPP, or the PATH. Raises UserError: it is not here,
    or the file exists."""
    if gguf.exists():
        raise UserError(f"gguf = {str(gguf)!r} exists, and is not replaced. Name another file")
    folders = os.pathsep.join([os.environ.get("LLAMA_CPP", ""), os.environ.get("PATH", "")])
    places = [Path(place) / name for place in folders.split(os.pathsep) if place for name in CONVERTERS]
    found = next((str(place) for place in places if place.is_file()), None)
    if found is None:
        raise UserError(f"gguf = {str(gguf)!r}: {REMEDY}")
    return [sys.executable, found] if found.endswith(".py") else [found]


def to_gguf(converter: list[str], model: Path, gguf: Path) -> str:
    """Write a folder as one GGUF file in its own precision, by llama.cpp's converter. Returns a line for the terminal.
    Raises UserError: the converter failed; the folder stays."""
    command = [*converter, str(model), "--outfile", str(gguf), "--outtype", "auto"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode or not gguf.is_file():
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"gguf = {str(gguf)!r}: llama.cpp's converter failed on {model}, which stays: {last}")
    return f"{'gguf':<12}  {gguf}  ({gguf.stat().st_size / 1e6:,.1f} MB)"
