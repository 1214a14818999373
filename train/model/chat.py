"""Chat templates: which one a conversation is written with, and which part of what it writes is trained on.

A template (Jinja, as transformers has it) turns messages into one text. What is trained on is what the model itself
will have to write: each answer, and the mark by which it ends.
"""

import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from train.recipe.errors import UserError, first_line, nearest

TEMPLATES = Path(__file__).parent / "templates"
MARKS_TURNS = ("llama-2-chat",)  # templates of ours that write the beginning-of-text token themselves
PLACE = "\ue0f1{}\ue0f2"  # stands for an answer: private-use characters, which no template looks for or trims away

Message = dict[str, Any]  # role and content; some carry more, see train/data/chat/instructions.py
Span = tuple[int, int]  # a range of characters


@dataclass(frozen=True)
class Template:
    """A template that a tokenizer now carries: its name for messages, and a line for the log."""

    origin: str
    note: str


class BadTemplate(Exception):
    """A template that is not valid Jinja (`syntax`), or fails on a conversation; says why, and in which line."""

    def __init__(self, what: str, line: int | None = None, syntax: bool = False):
        super().__init__(f"line {line}: {what}" if line else what)
        self.syntax = syntax


# ---------------------------------------------------------------------------------------------------- which template


def named_template(name: str) -> str:
    """The text of a template: one of train/model/templates by its name, else a .jinja file by its path.

    Raises:
        UserError: there is no such template or file.
    """
    file = TEMPLATES / f"{name}.jinja" if name in known_templates() else Path(name).expanduser()
    if file.suffix != ".jinja":
        close = nearest(name, known_templates())
        raise UserError(
            f"chat_template = {name!r}: there is no such template. {f'Did you mean {close}? ' if close else ''}"
            f"There are {', '.join(known_templates())}; any other is named by its .jinja file"
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template = {name!r} cannot be read: {first_line(error)}") from None


def known_templates() -> list[str]:
    """The names of the templates that come with zerofit."""
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def install_template(tokenizer, wanted: str | None, default: str | None = None) -> Template:
    """Let the tokenizer carry the wanted template, else its own, else the default one; its export has it too.

    Raises:
        UserError: there is no template, or it is not valid Jinja; the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token is None:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-text token, without which a model does not learn "
            "to end its answers. Set tokenizer_name to one that has"
        )
    own = _own_template(tokenizer) if not wanted else tokenizer.chat_template
    name = wanted or (None if own else default)
    if not (own or name):
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: name one with --chat_template "
            f"({', '.join(known_templates())}, or a .jinja file)"
        )
    tokenizer.chat_template = _for_tokenizer(name, tokenizer) if name else own
    origin = f"chat_template = {name!r}" if name else "the tokenizer's own chat template"
    aside = " (the tokenizer has no template of its own)" if name != wanted else ""
    if wanted and own and own != tokenizer.chat_template:
        aside = " (in place of the tokenizer's own)"
    if problem := _syntax_error(tokenizer):
        raise UserError(f"{origin}, {problem}")
    return Template(origin, f"template  {name or origin}{aside}")


def _own_template(tokenizer) -> str | None:
    try:
        return tokenizer.get_chat_template() if tokenizer.chat_template else None
    except ValueError:  # several, and none is called default
        names = ", ".join(tokenizer.chat_template)
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path!r} has several chat templates ({names}) and no default one: "
            "save the one you want as a .jinja file and name that with --chat_template"
        ) from None


def _for_tokenizer(name: str, tokenizer) -> str:
    """A template's text; ours begin as the tokenizer itself begins a text, with the beginning-of-text token or not."""
    text = named_template(name)
    marks = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    return "{{- bos_token -}}" + text if marks and name in known_templates() and name not in MARKS_TURNS else text


def _syntax_error(tokenizer) -> BadTemplate | None:
    try:
        written(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except BadTemplate as bad:
        return bad if bad.syntax else None  # whether it takes this very conversation is not the question
    return None


# -------------------------------------------------------------------------------------------------- what it writes


def written(tokenizer, messages: list[Message], for_an_answer: bool = False) -> str:
    """The text of a conversation; `for_an_answer`: up to where the model is to write.

    Raises:
        BadTemplate: the template is not valid, or refuses the conversation.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=for_an_answer)
    except Exception as error:  # a template can raise whatever an expression in it can
        line, syntax = getattr(error, "lineno", None), isinstance(error, TemplateSyntaxError)
        frames = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"
        ]
        if not (syntax or frames):
            raise
        raise BadTemplate(first_line(error), line if syntax else frames[-1], syntax) from None


def question_ids(tokenizer, question: str, system_prompt: str | None = None) -> list[int]:
    """Token ids of a question, written so that the model answers it next."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    text = written(tokenizer, [*system, {"role": "user", "content": question}], for_an_answer=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer, messages: list[Message]) -> tuple[str, list[Span]]:
    """(text of a conversation, the parts of it that are trained on).

    A part is an answer with the mark by which it ends, up to and including the end-of-text token, or, where the
    template puts none there, all that it puts at the end of a turn. White space belongs to it where the template
    leaves it to the model to write: Llama-2's prompt ends with `[/INST]`, and the answer follows after a space.
    An assistant's message with `trained: False` is left out.

    How it is found: a place-holder for each answer shows what the template writes around them.

    Raises:
        BadTemplate: the template fails on the conversation, or changes an answer.
    """
    text = written(tokenizer, messages)
    if any("tool_calls" in message for message in messages):
        return text, _turn_by_turn(tokenizer, messages, text)
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    marked = [
        {**message, "content": PLACE.format(turn)} if turn in turns else message
        for turn, message in enumerate(messages)
    ]
    scaffold = written(tokenizer, marked)
    around = _around(scaffold, turns)
    spans = []
    for number, (turn, (start, stop)) in enumerate(zip(turns, _answers(text, around, messages, turns))):
        if messages[turn].get("trained", True):
            start -= _left_to_the_model(tokenizer, marked, turn, scaffold)
            ending = scaffold if turn == len(messages) - 1 else written(tokenizer, marked[: turn + 1])
            ending = ending.rpartition(PLACE.format(turn))[2]
            spans.append((start, stop + len(_end_mark(ending, around[number + 1], tokenizer))))
    return text, spans


def _turn_by_turn(tokenizer, messages: list[Message], text: str) -> list[Span]:
    """The answers of a conversation with calls of tools, which have no text to hold the place of: what each turn adds
    to the prompt before it, up to and including its last end-of-text token.

    Raises:
        BadTemplate: it does not write the calls, or a turn changes what it has written of the turns before.
    """
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, so_far = (
            written(tokenizer, messages[:turn], for_an_answer=True),
            written(tokenizer, messages[: turn + 1]),
        )
        added = so_far[len(prompt) :]
        body, mark, _ = added.rpartition(tokenizer.eos_token)
        added = body + mark or added.rstrip()
        if not so_far.startswith(prompt) or not text.startswith(prompt + added):
            raise BadTemplate(
                f"what it writes of turn {turn + 1} depends on later turns: tool_calls cannot be trained"
            )
        for call in message.get("tool_calls", ()):
            name = (call.get("function") or call).get("name")
            if not name or name not in added:
                raise BadTemplate(
                    f"it does not write the tool_calls of turn {turn + 1}. Name a template that does with "
                    "--chat_template, or write the calls into the content"
                )
        if message.get("trained", True):
            spans.append((len(prompt), len(prompt) + len(added)))
    return spans


def unended(tokenizer, template: Template) -> list[str]:
    """A warning where the template ends an answer with something else than the end-of-text token."""
    try:
        text, spans = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}])
    except BadTemplate:  # it takes other conversations only
        return []
    mark = text[spans[-1][0] : spans[-1][1]].rpartition("bcd")[2]
    if mark.endswith(tokenizer.eos_token):
        return []
    return [
        f"warning   {template.origin} ends an answer with {mark!r} and not with the end-of-text token "
        f"{tokenizer.eos_token!r}: whoever generates has to stop there (zerofit generate does, if it is one token)"
    ]


def _around(scaffold: str, turns: list[int]) -> list[str]:
    """What stands before, between and after the answers."""
    pieces, rest = [], scaffold
    for turn in turns:
        before, place, rest = rest.partition(PLACE.format(turn))
        if not place or PLACE.format(turn) in rest:
            raise BadTemplate(f"it does not write turn {turn + 1}, an answer, once and in its order")
        pieces.append(before)
    return [*pieces, rest]


def _answers(text: str, around: list[str], messages: list[Message], turns: list[int]) -> list[Span]:
    """Where the answers are: each as it is, or without the white space at its ends."""
    spans, place = [], len(around[0])
    whole = text.startswith(around[0])
    for turn, after in zip(turns, around[1:]):
        answer = messages[turn]["content"]
        forms = (answer, answer.strip(), answer.lstrip(), answer.rstrip())
        form = next((form for form in forms if text.startswith(form + after, place)), None)
        if form is None or not whole:
            raise BadTemplate(
                f"it changes turn {turn + 1}, an answer: what is trained on cannot be told in its text. Name one that "
                "writes answers as they are, e.g. --chat_template instruction"
            )
        spans.append((place, place + len(form)))
        place += len(form) + len(after)
    if place != len(text):
        raise BadTemplate("what it writes after the last answer depends on the answer")
    return spans


def _left_to_the_model(tokenizer, marked: list[Message], turn: int, scaffold: str) -> int:
    """The characters of white space between what the model is prompted with and the answer."""
    before = scaffold.partition(PLACE.format(turn))[0]
    prompt = written(tokenizer, marked[:turn], for_an_answer=True)
    gap = before[len(prompt) :]
    return len(gap) if before.startswith(prompt) and gap.isspace() else 0


def _end_mark(ending: str, after: str, tokenizer) -> str:
    """What ends an answer: of what the template writes after it, the part that does not depend on a turn to come."""
    common = ending[: next((i for i, (a, b) in enumerate(zip(ending, after)) if a != b), len(after))]
    end = common.find(tokenizer.eos_token)
    if end >= 0:
        return common[: end + len(tokenizer.eos_token)]
    for token in tokenizer.get_added_vocab() if len(common) < min(len(ending), len(after)) else ():
        for text in (ending, after):  # <|im_start|> and <|endoftext|> have <| in common, which is neither
            begin = text.rfind(token, 0, len(common) + len(token) - 1)
            if 0 <= begin < len(common) < begin + len(token):
                common = common[:begin]
    return common
