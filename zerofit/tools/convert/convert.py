"""`zerofit convert`: converts Meta's Llama checkpoints (1, 2, 3) to folders that transformers loads.

(`zerofit convert megatron-args` is zerofit/tools/convert/megatron_args/script_to_recipe.py.)

    zerofit convert meta-to-hf --input llama-2-7b --output outputs/llama-2-7b-hf

A conversion is checked before the folder gets its name: the shapes are those of transformers' model with this
configuration, and every weight is equal bit for bit. It needs memory for about one written file.
"""

from dataclasses import dataclass
from pathlib import Path

from zerofit.model.pretrained_io import check_output, silence_libraries
from zerofit.recipe.base import option
from zerofit.recipe.errors import EXIT_USER_ERROR, UserError
from zerofit.recipe.options import Recipe
from zerofit.recipe.parse import parse_recipe
from zerofit.record.terminal import log_lines

USAGE = """usage: zerofit convert meta-to-hf --input FOLDER --output FOLDER [--option value]
       zerofit convert megatron-args [--option value] -- WORDS

  meta-to-hf     Meta's consolidated.*.pth, params.json and tokenizer.model to a folder that transformers loads
  megatron-args  A Megatron command line (pretrain_gpt.py, preprocess_data.py, ...) to a recipe and a strategy

`zerofit convert meta-to-hf --help` lists the options."""


@dataclass
class FromMetaOptions(Recipe):
    """Meta's consolidated.*.pth, params.json and tokenizer.model to a folder that transformers loads"""

    input: str = option(
        None, "The folder of the checkpoint.", required="no input: set --input to the folder of the checkpoint"
    )
    output: str = option(
        None,
        "The folder to write; it must not exist yet, or be empty.",
        required="no output: set --output to the folder that the checkpoint is to be written to",
    )
    tokenizer: str | None = option(None, "tokenizer.model; by default the input's or the folder's above. none: no.")


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        if not argv:
            return EXIT_USER_ERROR
        raise SystemExit(0)
    if argv[0] == "megatron-args":
        from zerofit.tools.convert.megatron_args.script_to_recipe import main as convert_arguments

        return convert_arguments(argv[1:])
    if argv[0] != "meta-to-hf":
        raise UserError(f"{argv[0]!r}: use zerofit convert meta-to-hf or megatron-args")
    options = parse_recipe(FromMetaOptions, argv[1:], prog="zerofit convert meta-to-hf", tool=True)
    output = Path(options.output).expanduser()
    check_output(output)
    silence_libraries()
    from zerofit.tools.convert.meta import from_meta

    log_lines(*from_meta(options.input, output, options.tokenizer), f"converted model  {output}")
    return 0
