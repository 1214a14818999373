r"""`zerofit merge`: merge a LoRA adapter into its base model, W + scale * B A, and write a plain transformers folder.

    zerofit merge --adapter outputs/notes/model --output outputs/notes-merged

The merge is checked twice against the logits of base and adapter: the merged model before anything is written, and the
written folder, which is read back before it gets its final name.
"""

from dataclasses import dataclass
from pathlib import Path

from zerofit.model.adapter_folder import open_adapter
from zerofit.model.pretrained_io import check_output, silence_libraries
from zerofit.recipe.base import option
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe
from zerofit.record.terminal import log_lines
from zerofit.tools.tool_recipe import PRECISIONS

MERGE_HINTS = {
    **dict.fromkeys(
        "model model_name_or_path model_path adapter_name_or_path lora peft_model checkpoint".split(),
        "say --adapter FOLDER, such as outputs/RUN/model",
    ),
    **dict.fromkeys("output_dir export_dir save_dir out".split(), "say --output FOLDER"),
    **dict.fromkeys("base_model base_model_name_or_path".split(), "say --base; by default it is the adapter's own"),
    "gguf": "it is gone; llama.cpp's convert_hf_to_gguf.py reads the merged folder",
}


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
    trust_remote_code: bool = option(False, "Allow a hub repository to run its own model code here.")


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(MergeOptions, argv, prog="zerofit merge", tool=True, hints=MERGE_HINTS)
    from zerofit.tools.merge_adapter import merge

    folder = open_adapter(options.adapter)
    output = Path(options.output).expanduser()
    check_output(output)
    silence_libraries()
    log_lines(*merge(folder, output, options), f"merged model  {output}")
    return 0
