r"""`zerofit generate`: let a model continue a text, answer a file of prompts, or talk.

    zerofit generate --model outputs/notes/model --prompt "Once upon a time" --temperature 0.8
    zerofit generate --model BASE --adapter outputs/notes/model --prompt_file asked.jsonl --output answered.jsonl
    zerofit generate --model outputs/chat/model --chat

What the model writes goes to `output`, or to stdout as it is written; everything else to stderr.
"""

from zerofit.recipe.parse import parse_recipe
from zerofit.tools.generate.generate_options import GenerateOptions


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(GenerateOptions, argv, prog="zerofit generate", tool=True)
    from zerofit.tools.generate.respond import respond

    return respond(options)
