"""`zerofit convert`: Meta's Llama checkpoints (1, 2, 3) as folders that transformers loads, and back.

(`zerofit convert megatron-args` is zerofit/tools/convert/megatron_args/script_to_recipe.py.)

    zerofit convert meta-to-hf --input llama-2-7b --output outputs/llama-2-7b-hf
    zerofit convert hf-to-meta --input outputs/notes/model --output outputs/notes-meta --shards 2

A conversion is checked before the folder gets its name: the shapes are those of transformers' model of the
configuration, and every weight converted back is the same bit for bit. Memory: about one written file.
"""

import sys
from pathlib import Path

from zerofit.model.pretrained_io import check_output, silence_libraries
from zerofit.recipe.errors import EXIT_USER_ERROR, UserError
from zerofit.recipe.parse import parse_recipe
from zerofit.record.terminal import say
from zerofit.tools.convert.convert_options import FromMetaOptions, MegatronArgsOptions, ToMetaOptions

DIRECTIONS = {"meta-to-hf": FromMetaOptions, "hf-to-meta": ToMetaOptions}


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        if not argv:
            return EXIT_USER_ERROR
        raise SystemExit(0)
    if argv[0] == "megatron-args":
        from zerofit.tools.convert.megatron_args.script_to_recipe import main as convert_arguments

        return convert_arguments(argv[1:])
    if argv[0] not in DIRECTIONS:
        raise UserError(f"{argv[0]!r}: use zerofit convert meta-to-hf, hf-to-meta or megatron-args")
    options = parse_recipe(DIRECTIONS[argv[0]], argv[1:], prog=f"zerofit convert {argv[0]}", tool=True)
    output = Path(options.output).expanduser()
    check_output(output)
    silence_libraries()
    from zerofit.tools.convert.meta.conversion import from_meta, to_meta_folder

    convert = from_meta if argv[0] == "meta-to-hf" else to_meta_folder
    say(*convert(options, output), f"converted model  {output}")
    return 0


def _usage() -> str:
    lines = [f"  {name}  {kind.__doc__}" for name, kind in DIRECTIONS.items()]
    return "\n".join(
        [
            "usage: zerofit convert DIRECTION --input FOLDER --output FOLDER [--option value]",
            "       zerofit convert megatron-args [--option value] -- WORDS",
            "",
            *lines,
            f"  megatron-args  {MegatronArgsOptions.__doc__}",
            "",
            "`zerofit convert DIRECTION --help` lists the options.",
        ]
    )
