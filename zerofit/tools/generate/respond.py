"""What was asked is found, checked and answered: a text, a file of prompts, or a conversation."""

from pathlib import Path

from zerofit.data.rendering import Renderer
from zerofit.model.chat import named_template
from zerofit.model.pretrained_io import silence_libraries
from zerofit.recipe.errors import UserError
from zerofit.record.terminal import say_aside
from zerofit.tools.generate.answers import Asked, answer_file
from zerofit.tools.generate.conversation import converse, lines_of_stdin
from zerofit.tools.generate.generate_options import GenerateOptions
from zerofit.tools.generate.generation_model import find_model, load
from zerofit.tools.generate.prompts import read_prompts
from zerofit.tools.generate.text_writer import Writer, complete


def respond(options: GenerateOptions, argv: list[str]) -> int:
    """Answer. Returns the exit code.

    Args:
        argv: the command line, for processes that are launched.
    """
    silence_libraries()
    asked = find(options)  # finds every mistake that does not need the weights, which take long
    source, renderer, prompts = asked.source, asked.renderer, asked.prompts
    if options.chat or any(prompt.messages for prompt in prompts):
        renderer.check_conversations()
    if renderer.uses_template and not options.chat:
        say_aside("note: prompts are rendered with the tokenizer's chat template; --raw takes them as they are")
    check_output(options.output)
    if options.prompt_file and options.output:
        return answer_file(asked, options, argv)
    output = _open(options.output)
    writer = Writer(load(source, options), source.tokenizer, options, renderer.end_of_turn())
    if options.chat:
        converse(writer, renderer, lines_of_stdin())
    else:
        complete(writer, renderer, prompts, output)
    return 0


def find(options: GenerateOptions) -> Asked:
    """The prompts, and the model without its weights."""
    prompts = read_prompts(options)
    if options.chat_template:
        named_template(options.chat_template)
    source = find_model(options)
    renderer = Renderer(source.tokenizer, source.config, options.chat_template, options.raw, options.system_prompt)
    return Asked(source, renderer, prompts)


def check_output(name: str | None) -> None:
    """Raises UserError unless it is the name of a .jsonl file."""
    if name is not None and Path(name).suffix != ".jsonl":
        raise UserError(f"output = {name!r}: expected the name of a .jsonl file")


def _open(name: str | None):
    """The file for generated texts, opened before the model is loaded; None if there is none."""
    if name is None:
        return None
    path = Path(name).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"output = {name!r} cannot be written: {error.strerror}") from None
