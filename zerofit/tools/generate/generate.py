r"""`zerofit generate`: let a model continue a text, answer a file of prompts, or talk.

    zerofit generate --model outputs/notes/model --prompt "Once upon a time" --temperature 0.8
    zerofit generate --model BASE --adapter outputs/notes/model --prompt_file asked.jsonl --output answered.jsonl
    zerofit generate --model outputs/chat/model --chat
    zerofit generate --model TEACHER --logprobs 64 --prompt_file notes.txt --block_size 512 --output teacher

What the model writes goes to `output`, or to stdout as it is written; everything else to stderr.
"""

from zerofit.recipe.parse import parse_recipe
from zerofit.tools.generate.generate_options import GenerateOptions


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(GenerateOptions, argv, prog="zerofit generate", tool=True)
    if options.logprobs:
        from zerofit.tools.generate.logprobs import write_logprobs

        return write_logprobs(options)
    from zerofit.tools.generate.respond import respond

    return respond(options)
