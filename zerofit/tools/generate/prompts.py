"""The prompts of `zerofit generate`: from the command line or a file."""

import json
from pathlib import Path
from typing import Any

from zerofit.data.rendering import Prompt
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import parse_json
from zerofit.tools.generate.generate_options import GenerateOptions

ROLES = ("system", "user", "assistant")


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """The prompts of --prompt or --prompt_file; none where there is a chat.

    Raises:
        UserError: the file cannot be read, or a record of it holds no prompt; the message has its line.
    """
    if options.prompt_file is None:
        return [Prompt(text) for text in options.prompt or ()]
    where = f"prompt_file = {options.prompt_file!r}"
    path = Path(options.prompt_file).expanduser()
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"{where}: expected a .txt with a prompt in each line, or a .jsonl with one in each record")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{where} is empty")
    if path.suffix == ".txt":
        return [Prompt(line) for _, line in numbered]
    return [_prompt_of(line, f"{where}, line {number}") for number, line in numbered]


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return Prompt(record["prompt"])
    messages = record.get("messages") if isinstance(record, dict) else None
    if messages is None:
        raise UserError(f"{where} has no `prompt` and no `messages`; it has {keys}")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise UserError(f'{where}: messages must be a list of {{"role": "user", "content": "..."}}')
    messages = [{name: message[name] for name in ("role", "content")} for message in messages]
    while messages and messages[-1]["role"] == "assistant":  # the reply that is known: another one is to be written
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}: nobody has said anything that could be replied to")
    return Prompt(messages=tuple(messages))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
