"""A conversation with a model: each line that is typed is answered, with the lines before it as far as they fit."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from zerofit.data.rendering import Messages, Renderer
from zerofit.record.terminal import say_aside
from zerofit.tools.generate.text_writer import Writer


def lines_of_stdin() -> Iterator[str]:
    """The lines that are typed, or come through a pipe."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # not on every system
            import readline  # noqa: F401  from now on input() has line editing and a history
        say_aside("an empty line ends, /reset forgets what was said")
    while True:
        if interactive:
            try:
                line = input("> ")
            except EOFError:
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
        yield line.strip()


def converse(writer: Writer, renderer: Renderer, lines: Iterator[str]) -> None:
    """Answer line after line, each with the conversation before it, until an empty line."""
    history: Messages = []
    for number, line in enumerate(lines):
        if not line:
            return
        if line == "/reset":
            history = []
            say_aside("note: what was said is forgotten")
            continue
        messages = [*history, {"role": "user", "content": line}]
        ids, kept = latest(messages, writer, renderer)
        if ids is None:
            say_aside(f"note: {writer.too_long(len(renderer.ids_of(messages[-1:])))}; it is ignored")
            continue
        if len(kept) < len(messages):
            dropped = (len(messages) - len(kept)) // 2
            say_aside(
                f"note: the oldest {'exchange does' if dropped == 1 else f'{dropped} exchanges do'} not fit any more"
            )
        elif renderer.left_out:
            say_aside(f"note: {renderer.left_out} tokens of what was said do not fit any more")
        reply = writer.write(ids, number)
        history = [*kept, {"role": "assistant", "content": reply.strip()}]


def latest(messages: Messages, writer: Writer, renderer: Renderer) -> tuple[list[int] | None, Messages]:
    """(ids, messages) of the latest exchanges that leave room for a reply; at least the last message.

    ids is None: the last message by itself is too long.
    """
    reply_tokens = 1
    if writer.positions and not writer.has_encoder:
        reply_tokens = min(writer.max_new_tokens, writer.positions // 2)
    while True:
        ids = renderer.ids_of(messages)
        room = writer.room(len(ids))
        if room is None or room >= reply_tokens:
            return ids, messages
        if len(messages) <= 2:
            return (ids if room > 0 else None), messages
        messages = messages[2:]
