"""Chat templates: which one a conversation is written with, and which part of its text is trained on.

A template (Jinja, as in transformers) turns messages into one text. Training is on what the model will have to write
itself: each answer, and the mark at its end.
"""

import inspect
import json
import re
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
ANSWER_PLACEHOLDER = "\ue0f1{}\ue0f2"  # for an answer: private-use characters, which no template compares or strips

Message = dict[str, Any]  # role and content; some carry more, see zerofit/data/chat/instructions.py
Span = tuple[int, int]  # a range of characters
TEMPLATE_ARGUMENTS = ("tools", "functions", "documents", "chat_template_kwargs")  # columns of records
ZEROFIT_KEYS = set("role content tool_calls instruction input trained masked".split())  # read by zerofit itself
PROBE = {"zerofit": 'a "b"'}  # arguments of a call


class Conversation(list[Message]):
    """The messages of a conversation, and what its record passes to the template (`given`): tools, documents,
    arguments."""

    def __init__(self, messages: Iterable[Message], given: dict[str, Any] | None = None):
        super().__init__(messages)
        self.given = given or {}


class BadTemplate(Exception):
    """The error of a template that is not valid Jinja (`syntax`), or fails on a conversation: why, in which line."""

    def __init__(self, problem: str, line: int | None = None, syntax: bool = False):
        super().__init__(f"line {line}: {problem}" if line else problem)
        self.syntax = syntax


# ---------------------------------------------------------------------------------------------------- which template


def read_template(name: str) -> str:
    """Return the text of a template: one of zerofit/model/templates by its name, else a .jinja file by its path.
    Raises UserError where there is none."""
    file = TEMPLATE_FOLDER / f"{name}.jinja" if name in known_templates() else Path(name).expanduser()
    if file.suffix != ".jinja":
        raise UserError(f"chat_template = {name!r}: known are {', '.join(known_templates())}, or a .jinja file")
    try:
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template = {name!r} cannot be read: {first_line(error)}") from None


def known_templates() -> list[str]:
    """Return the names of the templates that zerofit has."""
    return sorted(file.stem for file in TEMPLATE_FOLDER.glob("*.jinja"))


def install_template(
    tokenizer: "PreTrainedTokenizerBase", requested: str | None, default: str | None = None
) -> tuple[str, str]:
    """Give the tokenizer the requested template, else keep its own, else give it the default one; it is exported with
    the tokenizer. Returns its name for messages, and a line for the log. Raises UserError where there is no template,
    it is not valid Jinja, or the tokenizer has no end-of-text token."""
    if tokenizer.eos_token is None:
        raise UserError(f"{tokenizer.name_or_path!r} has no end-of-text token. Set another tokenizer_name")
    stored = tokenizer.chat_template
    name = requested or (None if stored else default)
    if not (stored or name):
        raise UserError(f"no chat template: set --chat_template ({', '.join(known_templates())}, or a .jinja file)")
    if name:
        text = read_template(name)
        adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        if adds_bos and name in known_templates() and "bos_token" not in text:
            text = "{{- bos_token -}}" + text  # it begins like the tokenizer's texts
        tokenizer.chat_template = text
    elif isinstance(stored, dict) and "default" not in stored:  # one of several may be for records with tools
        raise UserError(f"several chat templates ({', '.join(stored)}): name a .jinja file with --chat_template")
    origin = f"chat_template = {name!r}" if name else "the tokenizer's own chat template"
    try:
        apply_template(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except BadTemplate as bad:
        if bad.syntax:  # without a syntax error it may refuse this conversation and accept others
            raise UserError(f"{origin}, {bad}") from None
    return origin, f"template  {name or origin}"


# ----------------------------------------------------------------------------- what a record gives to the template


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Return definitions of tools as templates take them: {"type": "function", "function": {...}}. Raises ValueError
    where the value is not a list of objects."""
    value = json.loads(value) if isinstance(value, str) else value
    definitions = []
    for tool in [value] if isinstance(value, dict) else value:
        tool = json.loads(tool) if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise ValueError("expected a list of definitions, each an object with a name")
        if "name" in tool and "function" not in tool:
            tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        definitions.append(tool)
    return definitions


def check_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a record for its template (chat_template_kwargs). Raises ValueError where they are not
    an object, or one of them is a parameter of apply_chat_template itself."""
    from transformers import PreTrainedTokenizerBase

    reserved = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"tools", "documents"}
    if not isinstance(value, dict):
        raise ValueError("expected an object of names and values")
    if reserved_names := (reserved | {"messages"}) & value.keys():
        raise ValueError(f"{min(reserved_names)} is not for a template")
    return value


def adapt_messages(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> Conversation:
    """Return a conversation as the tokenizer's template reads it: a message's tools become an argument of the
    template, unless the template looks for them in messages; arguments of calls become objects or JSON texts, as the
    template writes them."""
    conversation = Conversation(messages, _given_to(tokenizer, messages))
    if not any(message.get("tool_calls") for message in messages):
        return conversation
    takes_objects, takes_texts = (_writes(tokenizer, conversation, probe) for probe in (PROBE, json.dumps(PROBE)))
    if takes_objects == takes_texts:
        return conversation

    def as_taken(arguments: Any) -> Any:
        if takes_texts:
            return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
        with suppress(ValueError, TypeError):
            parsed = json.loads(arguments)
            return parsed if isinstance(parsed, dict) else arguments
        return arguments

    return _with_arguments(conversation, as_taken)


def unread_keys(tokenizer: "PreTrainedTokenizerBase", messages: list[Message], text: str | None = None) -> list[str]:
    """Return the keys of messages, and of the arguments from their record, that the template does not mention. `text`:
    the output of the template; if given, the roles of messages whose text is missing there are added, such as
    system.content."""
    values = _given_to(tokenizer, messages)
    keys = {key for message in messages for key in message if key not in ZEROFIT_KEYS} | values.keys()
    hoisted = {"functions"} if "tools" in values else set()
    unread = {key for key in keys - hoisted if not re.search(rf"\b{re.escape(key)}\b", _source(tokenizer))}
    if text is None:
        return sorted(unread)
    for message in messages:  # a template may leave out the reasoning of an answer
        if message["role"] != "assistant" and "instruction" not in message and message["content"].strip() not in text:
            unread.add(f"{message['role']}.content")
    return sorted(unread)


def _given_to(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> dict[str, Any]:
    """Return the arguments of a template in addition to the messages: what the record gives, and the tools of a
    message, unless the template looks for them there."""
    values = dict(getattr(messages, "given", {}))
    for message in messages if "tools" not in values else ():
        for name in ("tools", "functions"):
            read_there = rf"(\.|\[['\"]|get\(['\"]){name}\b"
            if message.get(name) and not re.search(read_there, _source(tokenizer)):
                with suppress(ValueError, TypeError):
                    values["tools"] = parse_tools(message[name])
    return values


def _source(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text of the tokenizer's templates, without comments."""
    texts = tokenizer.chat_template or ""
    return re.sub(r"{#.*?#}", "", texts if isinstance(texts, str) else "\n".join(texts.values()), flags=re.DOTALL)


def _function_of(call: dict[str, Any]) -> dict[str, Any]:
    return call["function"] if isinstance(call.get("function"), dict) else call


def _with_arguments(conversation: Conversation, convert: Callable[[Any], Any]) -> Conversation:
    """Return the conversation with the arguments of each call replaced by `convert(arguments)`."""
    messages = []
    for message in conversation:
        calls = []
        for call in message.get("tool_calls", ()):
            function = _function_of(call)
            if "arguments" in function:
                edited = {**function, "arguments": convert(function["arguments"])}
                call = edited if function is call else {**call, "function": edited}
            calls.append(call)
        messages.append({**message, "tool_calls": calls} if "tool_calls" in message else message)
    return Conversation(messages, conversation.given)


def _writes(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, probe: Any) -> bool:
    """Return whether the template writes arguments of this form as an object: neither encoded twice nor as Python
    would."""
    try:
        text = apply_template(tokenizer, _with_arguments(conversation, lambda _: probe), given=conversation.given)
    except BadTemplate:
        return False
    (name,) = PROBE
    return json.dumps(PROBE) in text or not (isinstance(probe, str) or f"'{name}'" in text or name not in text)


# -------------------------------------------------------------------------------------------------- its text


def apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: list[Message],
    add_generation_prompt: bool = False,
    given: dict[str, Any] | None = None,
) -> str:
    """Return the text of a conversation; with `add_generation_prompt` up to the place of the next answer. `given`:
    further arguments of the template, such as tools.

    Raises:
        BadTemplate: the template is not valid, or refuses the conversation.
    """
    apply: Callable[..., Any] = tokenizer.apply_chat_template  # which returns a text with tokenize=False
    try:
        return apply(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **(given or {}))
    except Exception as error:  # an expression in a template can raise anything
        line = getattr(error, "lineno", None)
        syntax = isinstance(error, TemplateSyntaxError)
        frames = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"
        ]
        if not (syntax or frames):
            raise
        raise BadTemplate(first_line(error), line if syntax else frames[-1], syntax) from None


def render(tokenizer: "PreTrainedTokenizerBase", messages: list[Message]) -> tuple[str, list[Span]]:
    """Return (text of a conversation, the parts of it that are trained on).

    A part is all that a turn adds to its generation prompt, such as an empty <think> block, an answer, calls of tools,
    and the mark at its end: up to and including the end-of-text token, or, if the template has none there, all that it
    writes at the end of a turn. An assistant's message with `trained: False` or `masked: True` is skipped.

    What a turn adds to the prompt before it is found with a placeholder in the place of the answer, so that the
    text around it is known; of calls of tools, which a placeholder cannot replace, it is all up to the last
    end-of-text token. Raises BadTemplate: the template fails on the conversation, changes an answer, or does not
    write its calls.
    """
    conversation = adapt_messages(tokenizer, messages)
    text = apply_template(tokenizer, conversation, given=conversation.given)
    spans: list[Span] = []
    stop = 0
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = apply_template(tokenizer, conversation[:turn], add_generation_prompt=True, given=conversation.given)
        added = ""
        if "tool_calls" in message:
            so_far = apply_template(tokenizer, conversation[: turn + 1], given=conversation.given)
            if so_far.startswith(prompt):
                body, mark, _ = so_far[len(prompt) :].rpartition(tokenizer.eos_token)
                added = body + mark or so_far[len(prompt) :].rstrip()
        if added and text.startswith(prompt + added):
            start = len(prompt)
            stop = len(prompt) + len(added)
        else:
            start, stop = _find_answer(text, tokenizer, conversation, turn, prompt=prompt, begin=stop)
        for call in message.get("tool_calls", ()):
            name = _function_of(call).get("name")
            if not name or name not in text[start:stop]:
                raise BadTemplate(f"it does not write the tool_calls of turn {turn + 1}. Name another --chat_template")
        if message.get("trained", True) and not message.get("masked"):
            spans.append((start, stop))
    return text, spans


def _find_answer(
    text: str, tokenizer: "PreTrainedTokenizerBase", messages: Conversation, turn: int, *, prompt: str, begin: int
) -> Span:
    """Return the place of an answer in the text of a conversation. It is found by putting another answer there: what
    follows it does not change. The place begins after its generation prompt, or, where later turns change the text
    before it (such as the reasoning of earlier answers, which is dropped), after that prompt's last words. `prompt`:
    the text up to the place of the answer."""
    marked: list[Message] = list(messages)
    marked[turn] = {"role": "assistant", "content": ANSWER_PLACEHOLDER.format(turn)}
    placeholder = ANSWER_PLACEHOLDER.format(turn)
    before, written, after = apply_template(tokenizer, marked, given=messages.given).partition(placeholder)
    if not written or placeholder in after:
        raise BadTemplate(f"it does not write turn {turn + 1}, an answer, exactly once")
    stop = len(text) - len(after)
    start = len(prompt)
    if not text.startswith(prompt):
        earlier = apply_template(tokenizer, messages[:turn], given=messages.given)
        answer_opening = prompt[len(earlier) :] if prompt.startswith(earlier) else ""  # the text that begins an answer
        place = text.find(answer_opening, begin, stop) if answer_opening else -1
        start = place + len(answer_opening) if place >= 0 else _common_prefix(before, text)
    if not (begin <= start <= stop and text.endswith(after) and _ends_with(text[start:stop], messages[turn])):
        raise BadTemplate(f"it changes turn {turn + 1}, an answer. Use e.g. --chat_template instruction")
    ending = after
    if turn < len(messages) - 1:
        ending = apply_template(tokenizer, marked[: turn + 1], given=messages.given).rpartition(placeholder)[2]
    return start, stop + len(_end_mark(ending, after, tokenizer))


def _ends_with(written: str, message: Message) -> bool:
    """Return whether the output of a template ends with an answer, or with the part after its reasoning."""
    answer = message["content"].rstrip()
    written = written.rstrip()
    if "tool_calls" in message or not answer:
        return True
    num_common = _common_prefix(answer[::-1], written[::-1])
    before_common = answer[: len(answer) - num_common].rstrip(" ")
    return num_common > 0 and (not before_common or before_common[-1] in "\n>")


def warn_of_missing_end_token(tokenizer: "PreTrainedTokenizerBase", template: str) -> list[str]:
    """Return a warning if the template ends an answer with something other than the end-of-text token."""
    question = [{"role": "user", "content": "a"}]
    try:
        text, spans = render(tokenizer, [*question, {"role": "assistant", "content": "bcd"}])
    except BadTemplate:  # it accepts other conversations only
        return []
    mark = text[spans[-1][0] : spans[-1][1]].rpartition("bcd")[2]
    prompt = apply_template(tokenizer, question, add_generation_prompt=True)
    notes = []
    if not text.startswith(prompt):
        begins = prompt[_common_prefix(prompt, text) :]
        notes.append(
            f"warning   {template} begins an answer with {begins!r} in generation, and not in conversations: "
            "the model is not trained on answers that begin so"
        )
    if not mark.endswith(tokenizer.eos_token):
        notes.append(
            f"warning   {template} ends an answer with {mark!r} and not with the end-of-text token "
            f"{tokenizer.eos_token!r}: generation has to stop there (zerofit generate does, if it is one token)"
        )
    return notes


def warn_of_repeated_prompt(tokenizer: "PreTrainedTokenizerBase", template: str, texts: Iterable[str]) -> list[str]:
    """Return a warning if the template seems to be applied to a text already: its beginning of a question is in it."""
    placeholder = ANSWER_PLACEHOLDER.format(0)
    before = ""
    with suppress(BadTemplate):  # it accepts other conversations only
        before = apply_template(tokenizer, [{"role": "user", "content": placeholder}]).partition(placeholder)[0]
    mark = before.removeprefix(tokenizer.bos_token or "").strip().rpartition("\n")[2]
    if not mark or not any(mark in text for text in texts):
        return []
    return [f"warning   texts have {mark!r}, which {template} writes again. As they are: --chat_template none"]


def _end_mark(ending: str, after: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the mark at the end of an answer: the text after it, as far as that does not depend on a next turn."""
    common = ending[: _common_prefix(ending, after)]
    end = common.find(tokenizer.eos_token)
    if end >= 0:
        return common[: end + len(tokenizer.eos_token)]
    for token in tokenizer.get_added_vocab() if len(common) < min(len(ending), len(after)) else ():
        for text in (ending, after):  # <|im_start|> and <|endoftext|> have <| in common, which is part of each
            begin = text.rfind(token, 0, len(common) + len(token) - 1)
            if 0 <= begin < len(common) < begin + len(token):
                common = common[:begin]
    return common


def _common_prefix(first: str, second: str) -> int:
    """Return the number of characters that two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
