"""A merged model as one GGUF file, by llama.cpp's own converter."""

import os
import subprocess
import sys
from pathlib import Path

from zerofit.recipe.errors import UserError

CONVERTERS = ("convert_hf_to_gguf.py", "llama-convert-hf-to-gguf")  # the script's name, and that of its package
REMEDY = """llama.cpp's converter is not here. Get it, and name its folder in LLAMA_CPP:
  git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install ./llama.cpp/gguf-py
  export LLAMA_CPP=$PWD/llama.cpp"""


def find_converter(gguf: Path) -> list[str]:
    """The command that starts the converter: from the folder LLAMA_CPP, or the PATH.

    Raises:
        UserError: it is not here, or the file exists.
    """
    if gguf.exists():
        raise UserError(f"gguf = {str(gguf)!r} exists, and is not replaced. Name another file")
    folders = os.pathsep.join([os.environ.get("LLAMA_CPP", ""), os.environ.get("PATH", "")])
    places = [Path(place) / name for place in folders.split(os.pathsep) if place for name in CONVERTERS]
    found = next((str(place) for place in places if place.is_file()), None)
    if found is None:
        raise UserError(f"gguf = {str(gguf)!r}: {REMEDY}")
    return [sys.executable, found] if found.endswith(".py") else [found]


def convert(converter: list[str], model: Path, gguf: Path) -> str:
    """Convert a folder in its own precision. Returns a line for the terminal.

    Raises:
        UserError: the converter failed; the folder stays.
    """
    command = [*converter, str(model), "--outfile", str(gguf), "--outtype", "auto"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode or not gguf.is_file():
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"gguf = {str(gguf)!r}: llama.cpp's converter failed on {model}, which stays: {last}")
    return f"{'gguf':<12}  {gguf}  ({gguf.stat().st_size / 1e6:,.1f} MB)"
