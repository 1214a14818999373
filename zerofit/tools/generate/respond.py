"""Find, check and answer what was asked: a text, a file of prompts, or a conversation."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from zerofit.data.chat.instructions import SYSTEMS, given_in, turns_in
from zerofit.data.chat.samples import unread_note
from zerofit.data.records import BadRecord
from zerofit.data.rendering import Messages, Prompt, Renderer
from zerofit.data.turns import optional_text
from zerofit.model.chat import TEMPLATE_ARGUMENTS, Conversation, named_template, unread_keys
from zerofit.model.pretrained_io import silence_libraries
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import read_text
from zerofit.recipe.parsing import has_half_pair, parse_json
from zerofit.record.terminal import log_to_stderr
from zerofit.tools.generate.generate_options import GenerateOptions
from zerofit.tools.generate.generation_model import find_model, load
from zerofit.tools.generate.text_writer import Writer, complete


def respond(options: GenerateOptions) -> int:
    """Answer. Returns the exit code."""
    silence_libraries()
    prompts = read_prompts(options)  # every mistake that does not need the weights, which take long
    if options.chat_template:
        named_template(options.chat_template)
    source = find_model(options)
    how = (options.chat_template, options.raw, options.system_prompt)
    renderer = Renderer(source.tokenizer, source.config, *how, languages=(options.source_lang, options.target_lang))
    chats = [prompt for prompt in prompts if isinstance(prompt, Conversation)]
    if options.chat or chats:
        renderer.check_conversations()
    if renderer.uses_template and not options.chat:
        log_to_stderr("note: prompts are rendered with the tokenizer's chat template; --raw takes them as they are")
    if renderer.uses_template:
        for note in unread_note([], (key for chat in chats for key in unread_keys(source.tokenizer, chat))):
            log_to_stderr(f"note: {note.removeprefix('note').strip()}")
    output = _open(options.output)
    writer = Writer(load(source, options), source.tokenizer, options, renderer.end_of_turn())
    writer.ends_by_itself = renderer.has_encoder or renderer.uses_template
    if options.chat:
        converse(writer, renderer, lines_of_stdin())
    else:
        complete(writer, renderer, prompts, output)
    return 0


def _open(name: str | None) -> TextIO | None:
    """The .jsonl file for generated texts, opened before the model is loaded; None if there is none."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.suffix != ".jsonl":
        raise UserError(f"output = {name!r}: expected the name of a .jsonl file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"output = {name!r} cannot be written: {error.strerror}") from None


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """The prompts of --prompt or --prompt_file; none where there is a chat. Raises UserError: the file cannot be read,
    or a record of it holds no prompt."""
    if options.prompt_file is None:
        return list(options.prompt or ())
    where = f"prompt_file = {options.prompt_file!r}"
    path = Path(options.prompt_file).expanduser()
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"{where}: expected a .txt with a prompt in each line, or a .jsonl with one in each record")
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{where} is empty")
    if path.suffix == ".txt":
        return [line for _, line in numbered]
    return [_prompt_of(line, f"{where}, line {number}") for number, line in numbered]


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if has_half_pair(record):
        raise UserError(f"{where}: a text has half of a surrogate pair (as \\ud83d alone), which is not a character")
    keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    name = next((name for name in ("prompt", "messages") if isinstance(record, dict) and record.get(name)), None)
    if name is None:
        raise UserError(f"{where} has no `prompt` and no `messages`; it has {keys}")
    try:
        given = given_in(record, tuple(name for name in TEMPLATE_ARGUMENTS if name in record))
        system = next(filter(None, (optional_text(record.get(each), f"its {each}") for each in SYSTEMS)), "")
        if isinstance(record[name], str) and not (given or system):
            return str(record[name])
        messages = turns_in(record[name], "user", name)
    except BadRecord as bad:
        raise UserError(f"{where}: {bad}") from None
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    while messages and messages[-1]["role"] == "assistant":  # the reply that is known: another one is to be written
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}: nobody has said anything that could be replied to")
    return Conversation(messages, given)


def lines_of_stdin() -> Iterator[str]:
    """The lines that are typed, or come through a pipe."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  from now on input() has line editing and a history
    log_to_stderr("an empty line ends, /reset forgets what was said")
    with suppress(EOFError):
        while True:
            yield input("> ").strip()


def converse(writer: Writer, renderer: Renderer, lines: Iterator[str]) -> None:
    """Answer line after line, each with the conversation before it, until an empty line."""
    history: Messages = []
    for number, line in enumerate(lines):
        if not line:
            return
        if line == "/reset":
            history = []
            log_to_stderr("note: what was said is forgotten")
            continue
        messages = [*history, {"role": "user", "content": line}]
        ids, kept = latest(messages, writer, renderer)
        if ids is None:
            log_to_stderr(f"note: {writer.too_long(len(renderer.ids(messages[-1:])))}; it is ignored")
            continue
        if len(kept) < len(messages):
            log_to_stderr(f"note: exchanges that do not fit any more: the oldest {(len(messages) - len(kept)) // 2}")
        elif renderer.left_out:
            log_to_stderr(f"note: {renderer.left_out} tokens of what was said do not fit any more")
        reply = writer.write(ids, number)
        history = [*kept, {"role": "assistant", "content": reply.strip()}]


def latest(messages: Messages, writer: Writer, renderer: Renderer) -> tuple[list[int] | None, Messages]:
    """Return (ids, messages) of the latest exchanges that leave room for a reply; at least the last message, without
    ids where it is too long by itself."""
    reply_tokens = 1
    if writer.positions and not writer.has_encoder:
        reply_tokens = min(writer.max_new_tokens, writer.positions // 2)
    while True:
        ids = renderer.ids(messages)
        room = writer.room(len(ids))
        if room is None or room >= reply_tokens:
            return ids, messages
        if len(messages) <= 2:
            return (ids if room > 0 else None), messages
        messages = messages[2:]
