"""Chat templates: which one a conversation is written with, and which part of its text is trained on.

A template (Jinja, as in transformers) turns messages into one text. Training is on what the model will have to write
itself: each answer, and the mark at its end.
"""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.limits import BeyondLimits, limited

TEMPLATES = Path(__file__).parent / "templates"
PLACEHOLDER = "\ue0f1{}\ue0f2"  # for an answer: private-use characters, which no template compares or strips

Message = dict[str, Any]  # role and content; some carry more, see zerofit/data/chat/instructions.py
Span = tuple[int, int]  # a range of characters


@dataclass(frozen=True)
class Template:
    """The template of a tokenizer: its name for messages, and a line for the log."""

    origin: str
    note: str


class BadTemplate(Exception):
    """A template is not valid Jinja (`syntax`), or fails on a conversation: why, and in which line."""

    def __init__(self, problem: str, line: int | None = None, syntax: bool = False):
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.syntax = syntax


# ---------------------------------------------------------------------------------------------------- which template


def named_template(name: str) -> str:
    """The text of a template: one of zerofit/model/templates by its name, else a .jinja file by its path.

    Raises:
        UserError: there is no such template or file.
    """
    file = TEMPLATES / f"{name}.jinja" if name in known_templates() else Path(name).expanduser()
    if file.suffix != ".jinja":
        raise UserError(f"chat_template = {name!r}: known are {', '.join(known_templates())}, or a .jinja file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template = {name!r} cannot be read: {first_line(error)}") from None


def known_templates() -> list[str]:
    """The names of the templates that zerofit has."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def install_template(tokenizer, requested: str | None, default: str | None = None) -> Template:
    """Give the tokenizer the requested template, else its own, else the default one; it is exported with it.

    Raises:
        UserError: there is no template, or it is not valid Jinja; the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token is None:
        raise UserError(f"{tokenizer.name_or_path!r} has no end-of-text token. Set another tokenizer_name")
    template_of_tokenizer = _own_template(tokenizer) if not requested else tokenizer.chat_template
    name = requested or (None if template_of_tokenizer else default)
    if not (template_of_tokenizer or name):
        raise UserError(f"no chat template: set --chat_template ({', '.join(known_templates())}, or a .jinja file)")
    tokenizer.chat_template = _for_tokenizer(name, tokenizer) if name else template_of_tokenizer
    origin = f"chat_template = {name!r}" if name else "the tokenizer's own chat template"
    aside = " (the tokenizer has no template of its own)" if name != requested else ""
    if requested and template_of_tokenizer and template_of_tokenizer != tokenizer.chat_template:
        aside = " (in place of the tokenizer's own)"
    if problem := _syntax_error(tokenizer):
        raise UserError(f"{origin}, {problem}")
    return Template(origin, f"template  {name or origin}{aside}")


def _own_template(tokenizer) -> str | None:
    try:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    except ValueError:  # several, and none is called default
        names = ", ".join(tokenizer.chat_template)
        raise UserError(f"several chat templates ({names}): name a .jinja file with --chat_template") from None


def _for_tokenizer(name: str, tokenizer) -> str:
    """A template's text. The templates of zerofit begin like the tokenizer's texts: some tokenizers put the
    beginning-of-text token there."""
    text = named_template(name)
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return "{{- bos_token -}}" + text if adds_bos and name in known_templates() and "bos_token" not in text else text


def _syntax_error(tokenizer) -> BadTemplate | None:
    try:
        apply_template(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except BadTemplate as bad:
        return bad if bad.syntax else None  # it may refuse this conversation and accept others
    return None


# -------------------------------------------------------------------------------------------------- its text


def apply_template(tokenizer, messages: list[Message], add_generation_prompt: bool = False) -> str:
    """The text of a conversation; `add_generation_prompt`: up to the place of the next answer.

    Raises:
        BadTemplate: the template is not valid, or refuses the conversation.
        UserError: it takes too much time or memory for one conversation.
    """
    try:
        with limited():
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except BeyondLimits as error:
        raise UserError(f"chat template of {tokenizer.name_or_path!r}: {error}. Set --chat_template") from None
    except Exception as error:  # an expression in a template can raise anything
        line, syntax = getattr(error, "lineno", None), isinstance(error, TemplateSyntaxError)
        frames = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"
        ]
        if not (syntax or frames):
            raise
        raise BadTemplate(first_line(error), line if syntax else frames[-1], syntax) from None


def question_ids(tokenizer, question: str, system_prompt: str | None = None) -> list[int]:
    """Token ids of a question, up to the place of its answer."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    text = apply_template(tokenizer, [*system, {"role": "user", "content": question}], add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer, messages: list[Message]) -> tuple[str, list[Span]]:
    """(text of a conversation, the parts of it that are trained on).

    A part is an answer with the mark at its end: up to and including the end-of-text token, or, if the template has
    none there, all that it writes at the end of a turn. It includes the white space between the prompt and the answer,
    which the model has to write. An assistant's message with `trained: False` is skipped.

    To find them, the template is applied to placeholders for the answers: so the text around them is known.

    Raises:
        BadTemplate: the template fails on the conversation, or changes an answer.
    """
    text = apply_template(tokenizer, messages)
    if any("tool_calls" in message for message in messages):
        return text, _turn_by_turn(tokenizer, messages, text)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    marked = [
        {**message, "content": PLACEHOLDER.format(turn)} if turn in turns else message
        for turn, message in enumerate(messages)
    ]
    skeleton = apply_template(tokenizer, marked)
    around = _texts_around(skeleton, turns)
    spans = []
    for number, (turn, (start, stop)) in enumerate(zip(turns, _find_answers(text, around, messages, turns))):
        if messages[turn].get("trained", True):
            start -= _leading_space(tokenizer, marked, turn, skeleton)
            ending = skeleton if turn == len(messages) - 1 else apply_template(tokenizer, marked[: turn + 1])
            ending = ending.rpartition(PLACEHOLDER.format(turn))[2]
            spans.append((start, stop + len(_end_mark(ending, around[number + 1], tokenizer))))
    return text, spans


def _turn_by_turn(tokenizer, messages: list[Message], text: str) -> list[Span]:
    """The answers of a conversation with tool calls, which have no text that a placeholder could replace: what each
    turn adds to the prompt before it, up to and including its last end-of-text token.

    Raises:
        BadTemplate: it does not write the calls, or a turn changes the text of the turns before.
    """
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, so_far = (
            apply_template(tokenizer, messages[:turn], add_generation_prompt=True),
            apply_template(tokenizer, messages[: turn + 1]),
        )
        added = so_far[len(prompt) :]
        body, mark, _ = added.rpartition(tokenizer.eos_token)
        added = body + mark or added.rstrip()
        if not so_far.startswith(prompt) or not text.startswith(prompt + added):
            raise BadTemplate(f"its text of turn {turn + 1} depends on later turns: tool_calls cannot be trained")
        for call in message.get("tool_calls", ()):
            name = (call.get("function") or call).get("name")
            if not name or name not in added:
                raise BadTemplate(f"it does not write the tool_calls of turn {turn + 1}. Name another --chat_template")
        if message.get("trained", True):
            spans.append((len(prompt), len(prompt) + len(added)))
    return spans


def missing_end_token(tokenizer, template: Template) -> list[str]:
    """A warning if the template ends an answer with something else than the end-of-text token."""
    try:
        text, spans = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}])
    except BadTemplate:  # it accepts other conversations only
        return []
    mark = text[spans[-1][0] : spans[-1][1]].rpartition("bcd")[2]
    if mark.endswith(tokenizer.eos_token):
        return []
    return [
        f"warning   {template.origin} ends an answer with {mark!r} and not with the end-of-text token "
        f"{tokenizer.eos_token!r}: generation has to stop there (zerofit generate does, if it is one token)"
    ]


def _texts_around(skeleton: str, turns: list[int]) -> list[str]:
    """The texts before, between and after the answers."""
    pieces, rest = [], skeleton
    for turn in turns:
        before, placeholder, rest = rest.partition(PLACEHOLDER.format(turn))
        if not placeholder or PLACEHOLDER.format(turn) in rest:
            raise BadTemplate(f"it does not write turn {turn + 1}, an answer, exactly once and in order")
        pieces.append(before)
    return [*pieces, rest]


def _find_answers(text: str, around: list[str], messages: list[Message], turns: list[int]) -> list[Span]:
    """The answers' places in the text: each answer unchanged, or without the white space at its ends."""
    spans, position = [], len(around[0])
    begins_as_expected = text.startswith(around[0])
    for turn, after in zip(turns, around[1:]):
        answer = messages[turn]["content"]
        forms = (answer, answer.strip(), answer.lstrip(), answer.rstrip())
        form = next((form for form in forms if text.startswith(form + after, position)), None)
        if form is None or not begins_as_expected:
            raise BadTemplate(f"it changes turn {turn + 1}, an answer. Use e.g. --chat_template instruction")
        spans.append((position, position + len(form)))
        position += len(form) + len(after)
    if position != len(text):
        raise BadTemplate("its text after the last answer depends on the answer")
    return spans


def _leading_space(tokenizer, marked: list[Message], turn: int, skeleton: str) -> int:
    """The number of white-space characters between the prompt and the answer."""
    before = skeleton.partition(PLACEHOLDER.format(turn))[0]
    prompt = apply_template(tokenizer, marked[:turn], add_generation_prompt=True)
    gap = before[len(prompt) :]
    return len(gap) if before.startswith(prompt) and gap.isspace() else 0


def _end_mark(ending: str, after: str, tokenizer) -> str:
    """The mark at the end of an answer: the text after it, as far as that does not depend on a next turn."""
    common = ending[: next((i for i, (a, b) in enumerate(zip(ending, after)) if a != b), len(after))]
    end = common.find(tokenizer.eos_token)
    if end >= 0:
        return common[: end + len(tokenizer.eos_token)]
    for token in tokenizer.get_added_vocab() if len(common) < min(len(ending), len(after)) else ():
        for text in (ending, after):  # <|im_start|> and <|endoftext|> have <| in common, which is part of each
            begin = text.rfind(token, 0, len(common) + len(token) - 1)
            if 0 <= begin < len(common) < begin + len(token):
                common = common[:begin]
    return common
