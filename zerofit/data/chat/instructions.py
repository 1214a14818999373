"""Instructions, prompts and chats: the kind of records in a table, and each record as a list of messages.
Pairs (data/pairs.py) and multiple choice (data/labelled) read turns and texts with these functions, too.

A *message* is {"role": system, user, assistant or tool, "content": text} with all other keys of the record's turn,
such as tool_calls, reasoning_content or name, for the template. The message of an instruction has the record's
`instruction` and `input` besides its content. An answer inside a prompt has `trained: False`, and one that the record
itself excludes from training (weight, train, mask, ...) has `masked: True`.
"""

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from io import StringIO
from itertools import pairwise
from tokenize import NL, STRING, TokenError, generate_tokens
from typing import Any, NamedTuple

from datasets import Dataset, Value

from zerofit.data import tables
from zerofit.data.records import BadRecord
from zerofit.model.chat import TEMPLATE_ARGUMENTS, Conversation, Message, check_arguments, parse_tools
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import parse_json
from zerofit.recipe.tasks import ClmRecipe

DIALOGUE_COLUMNS = "dialogue dialog messages turns conversation conversations utterances contents history".split()
TURN_TEXT_KEYS = ("content", "message", "text", "value", "utterance", "parts")
PART_TEXT_KEYS = ("text", "value", "content")
TURN_ROLE_KEYS = ("role", "from", "speaker", "sender", "author")
PREFERENCE_COLUMNS = (
    ("chosen", "rejected"),
    ("response_a", "response_b"),
    ("response_0", "response_1"),
    ("conversation_a", "conversation_b"),
    ("answer_a", "answer_b"),
    ("output_1", "output_2"),
)
VERDICT_COLUMNS = ("label", "kto_tag")  # columns that say whether an answer is good or bad
TEXT_PART_TYPES = (None, "text", "input_text", "output_text")  # types of parts whose text is read
TRAIN_KEYS = (
    "weight",
    "train",
    "training",
    "trainable",
    "trained",
    "loss",
    "loss_mask",
    "loss_weight",
    "calculate_loss",
)
MASKED_KEYS = ("mask", "masked", "is_masked")
MASK_KEYS = (*TRAIN_KEYS, *MASKED_KEYS)  # keys of a turn that say whether it is trained on
YES_OR_NO = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}
# If turns have one of these roles, only these turns are replies.
ASSISTANTS = ("assistant", "gpt", "bot", "model", "ai", "chatgpt", "bing", "bard")
QUESTION_COLUMNS = ("instruction", "prompt", "question", "query", "input", "inputs")
ANSWER_COLUMNS = ("output", "completion", "response", "answer", "answers", "target", "targets")
AMBIGUOUS_COLUMNS = ("input", "inputs", "target", "targets")  # not read as a prompt if there is a column `text`
SPEAKER_COLUMNS = (("user", "assistant"), ("human", "assistant"))  # records with one column for each speaker
INPUT_COLUMNS = ("input", "context")
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message", "system_instruction", "systeminstruction")
NAMES_OF_ROLE = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": (*ASSISTANTS, "function_call"),  # a call written as text is trained on
    "tool": ("tool", "function", "observation", "ipython"),  # the answer of a tool
}
ROLE_OF_NAME = {name: role for role, names in NAMES_OF_ROLE.items() for name in names}
ROLE_OF_KEY = {**ROLE_OF_NAME, **dict.fromkeys(QUESTION_COLUMNS, "user"), **dict.fromkeys(ANSWER_COLUMNS, "assistant")}
RECORD_KINDS = {"messages": "a conversation", "instruction": "an instruction", "prompt": "a prompt and its answer"}
TURNS_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")  # only lists have it
LISTS_AS_TEXT = re.compile(r"\s*\[\s*[\[{]")  # the text of a list of pairs or turns
SPEAKER_PREFIX = re.compile(r"(?:^|(?:\r?\n){2})(Human|Assistant):[ ]?")
NUM_INSPECTED_RECORDS = 100  # records that are searched for turns with roles


def refuse_preferences(table: Dataset, remedy: str) -> str | None:
    """Return the column that says whether an answer is good or bad, if there is one. Raises UserError: each record has
    a preferred and a rejected answer."""
    if columns := tables.match_columns(PREFERENCE_COLUMNS, table.column_names):
        problem = f"the records are preferences ({', '.join(columns)}): train/dpo.py reads them as chosen and rejected"
        raise UserError(f"{problem}. Or name columns with {remedy}; {tables.list_columns(table)}")
    flags = [name for name, kind in table.features.items() if kind == Value("bool")]
    for name in set(VERDICT_COLUMNS).intersection(tables.text_columns(table)):  # a .csv file has texts
        if {str(value).lower() for value in table[name][: tables.NUM_CHECKED_RECORDS]} <= {"true", "false"}:
            flags.append(name)
    return tables.match_columns(VERDICT_COLUMNS, flags)


def refuse_rejected(record: dict[str, Any], verdict: str | None) -> None:
    """Raises BadRecord if the record marks its answer as a bad one."""
    if verdict and str(record[verdict]).lower() == "false":
        raise BadRecord(f"its answer is a rejected one ({verdict}: false), as in data of preferences for KTO")


def first_answer(value: Any) -> Any:
    """Return the first answer of a value: of ["..."]; of {"text": ["..."]} as in SQuAD on the hub, also as text
    (pandas' to_csv); of [{"text": "..."}] as in SQuAD's files. Turns with roles are returned unchanged. Raises
    BadRecord: a text looks like such an object and is neither JSON nor Python."""
    if isinstance(value, str) and "answer_start" in value:
        value = parse_list(value, "its answers are", "{")
    while isinstance(value, (list, dict)) and not role_of(value[0] if isinstance(value, list) and value else value):
        value = value.get("text") if isinstance(value, dict) else value[0] if value else None
    return value


class Turn(NamedTuple):
    """A turn of a conversation. `more`: its other values, such as tool_calls; in a table every turn and every call has
    the keys of all, so keys without a value are left out."""

    role: str | None
    text: str | None
    more: dict[str, Any]


def as_turn_list(items: Any) -> list[Any]:
    """Return the turns as a list. The datasets library stores a list of objects as an object of lists."""
    return [dict(zip(items, values)) for values in zip(*items.values())] if isinstance(items, dict) else items


def role_of(turn: Any) -> str | None:
    """Return the role of a turn in lower case; None if it has none."""
    role_names = (turn.get(key) for key in TURN_ROLE_KEYS) if isinstance(turn, dict) else ()
    return next((str(name).lower() for name in role_names if name), None)


def is_trained(more: dict[str, Any], where: str) -> bool:
    """Return whether a turn may be trained on: no key of it, such as weight, train or mask, says otherwise. Raises
    BadRecord: a key has another value than yes or no."""
    trained = []
    for key in MASK_KEYS:
        if key not in more:
            continue
        answer = YES_OR_NO.get(str(more[key]).strip().lower())
        if answer is None or (key in MASKED_KEYS and str(more[key]).strip() in ("0", "1", "0.0", "1.0")):
            expected = "true or false" if key in MASKED_KEYS else "0 or 1, or true or false"
            raise BadRecord(f"{where}: {key} = {more[key]!r}, where {expected} is read (whether it is trained on)")
        trained.append(answer != (key in MASKED_KEYS))
    return all(trained)


def drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def turns_of(items: Any) -> list[Turn]:
    """Return the turns of a list, which are plain texts, or objects with a text and perhaps a role. Raises BadRecord:
    an object has no text, or more than text."""
    turns = []
    for item in as_turn_list(items):
        if not isinstance(item, dict):
            turns.append(Turn(None, item, {}))
            continue
        role, text = (
            next((key for key in keys if item.get(key) is not None), None) for keys in (TURN_ROLE_KEYS, TURN_TEXT_KEYS)
        )
        if text is None and not any(key in item for key in TURN_TEXT_KEYS):
            raise BadRecord(f"a turn has {', '.join(item)}, and none of {', '.join(TURN_TEXT_KEYS)} for its text")
        remaining_fields = {key: value for key, value in item.items() if key not in (role, text)}
        turns.append(Turn(role_of(item), _join_parts(item.get(text)), drop_nulls(remaining_fields)))
    return turns


def _join_parts(content: Any) -> Any:
    """Return a turn's text, joined if it comes in parts: [{"type": "text", "text": ...}, ...], or with "value" for
    "text". Raises BadRecord: a part is something else, such as a picture."""
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list) or not parts or not all(isinstance(part, (dict, str)) for part in parts):
        return content
    texts: list[str] = []
    other_kinds: dict[str, None] = {}
    for part in parts:
        text = _part_text(part)
        kind = part.get("type") if isinstance(part, dict) else "text"
        texts.append(text or "")
        if kind not in TEXT_PART_TYPES:
            other_kinds[str(kind)] = None
        elif kind is None and text is None and (keys := [key for key, value in part.items() if value is not None]):
            other_kinds[", ".join(keys)] = None
    if other_kinds:
        raise BadRecord(f"a turn holds {' and '.join(other_kinds)}: only text is read ({' or '.join(PART_TEXT_KEYS)})")
    return "".join(texts)


def optional_text(value: Any, noun: str) -> str:
    """Return a text that a record may have, which may be a number or a list of parts; "" if there is none. Raises
    BadRecord: it is something else. `noun`: its name in the message."""
    if role_of(value):
        value = turns_of([value])[0].text
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        value = _join_parts(value)
    value = number_as_text(value)
    if not isinstance(value, str) and drop_nulls(value):
        raise BadRecord(f"{noun} is a list or an object, and only a text is read there")
    return "" if is_blank(value) else value


def _part_text(part: dict[str, Any] | str) -> str | None:
    if isinstance(part, str):
        return part
    text = next((part[key] for key in PART_TEXT_KEYS if part.get(key) is not None), None)
    if isinstance(text, dict):  # {"type": "text", "text": {"value": ..., "annotations": []}}
        return _part_text(text)
    return text if isinstance(text, str) else None


def parse_list(value: Any, subject: str = "its turns are", begins: str = "[") -> Any:
    """Return the list in a text that is a list in JSON or Python; another value unchanged. Raises BadRecord: it is not
    valid."""
    if isinstance(value, str) and value.lstrip()[:1] in tuple(begins):
        try:
            return parse_json(value)
        except ValueError:
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TokenError):
                parsed = ast.literal_eval(value.strip())  # pandas' to_csv writes lists so
                kinds = [token.type for token in generate_tokens(StringIO(value.strip()).readline) if token.type != NL]
                if (STRING, STRING) not in pairwise(kinds):  # which Python would join
                    return parsed
            raise BadRecord(f"{subject} the text of a list that is not valid JSON") from None
    return value


def is_blank(text: Any) -> bool:
    """Return whether there is no text, or only white space."""
    return not isinstance(text, str) or not text.strip()


def number_as_text(value: Any) -> Any:
    """Return a number as text, and any other value unchanged: an answer of digits is read as a number."""
    return tables.text_of(value) if isinstance(value, (int, float, Decimal)) else value


def require_text(value: Any, noun: str) -> str:
    """Return a text, or a number as text. Raises BadRecord: it is empty, or no text. `noun`: its name in messages."""
    text = number_as_text(value)
    if is_blank(text):
        is_other = value is not None and not isinstance(value, str)
        raise BadRecord(f"{noun} is a {type(value).__name__}, and no text" if is_other else f"{noun} is empty")
    return str(text)


@dataclass(frozen=True)
class RecordForm:
    """The kind of a table's records, and their columns."""

    kind: str  # instruction, prompt or messages
    question: str  # the column of the instruction, of the prompt, or of the turns
    answer: str | None = None  # the column of the answer; None if it is one of the turns
    input: str | None = None
    history: str | None = None
    system: str | None = None
    system_prompt: str | None = None  # for conversations without one
    verdict: str | None = None  # the column that says whether the answer is a good one
    plain: bool = False  # prompt and answer are texts, which can be concatenated without a template
    spoken: bool = False  # prompts have "Human:" and "Assistant:" in front of each turn
    answered: bool = True  # records have an answer to train on; an answer that is there anyway is removed
    given: tuple[str, ...] = ()  # the columns that a template takes besides the messages, such as tools

    @property
    def columns(self) -> list[str]:
        names = (self.system, self.history, self.question, self.input, self.answer, self.verdict, *self.given)
        return [name for name in names if name]

    @property
    def describe(self) -> str:
        return f"data      each record is {RECORD_KINDS[self.kind]} ({', '.join(self.columns)})"

    def texts(self, content: list[Message]) -> Iterator[str]:
        return (message["content"] for message in content)

    def read(self, record: dict[str, Any]) -> Conversation:
        """Return the conversation of a record, up to its answer or with it. Raises BadRecord: a text is empty, a role
        is unknown or out of order, there is no answer."""
        if self.answered:
            refuse_rejected(record, self.verdict)
        if self.kind == "instruction":
            instruction = require_text(record[self.question], f"the {self.question}")
            message: Message = {"role": "user", "content": instruction, "instruction": instruction}
            if self.input and (extra_input := optional_text(record[self.input], f"its {self.input}")):
                message |= {"input": extra_input, "content": f"{instruction}\n\n{extra_input}"}
            turns = [message]
        else:
            value = record[self.question] or ([] if self.kind == "messages" else None)
            value = parse_list(value) if self.kind == "messages" else split_turns(value) if self.spoken else value
            turns = turns_in(value, "user", self.question)
        if self.kind == "prompt":
            turns = [{**turn, "trained": False} if turn["role"] == "assistant" else turn for turn in turns]
        turns = [*self._history(record), *turns]
        if self.answer:
            answer = first_answer(record[self.answer])
            turns += turns_in(split_turns(answer) if self.spoken else answer, "assistant", self.answer)
        while not self.answered and turns and turns[-1]["role"] == "assistant":
            turns = turns[:-1]
        check_order(turns, self.answered)
        if self.answered and all(turn.get("masked") for turn in turns if turn["role"] == "assistant"):
            raise BadRecord(f"none of its answers is trained on ({', '.join(MASK_KEYS)})")
        system_text = optional_text(record[self.system], f"the {self.system}") if self.system else ""
        system = system_text or self.system_prompt
        if turns[0]["role"] == "system":
            if system_text:
                raise BadRecord(f"two system texts: in the column {self.system} and in the first turn")
            first = turns[0]
            turns = turns[1:]
            system = first["content"] or system
        else:
            first = {"role": "system"}
        begin = [{**first, "content": system or ""}] if system or len(first) > 2 else []
        return Conversation([*begin, *turns], template_values(record, self.given))

    def _history(self, record: dict[str, Any]) -> list[Message]:
        turns = []
        entries = as_turn_list(parse_list(record[self.history]) or []) if self.history else []
        if entries and isinstance(entries[0], dict):
            return turns_in(entries, "user", "history")
        for number, pair in enumerate(entries, 1):
            if not isinstance(pair, list) or len(pair) != 2:
                raise BadRecord(f"entry {number} of its {self.history} is not a pair of question and answer")
            for role, text, name in zip(("user", "assistant"), pair, ("question", "answer")):
                content = require_text(text, f"the {name} in entry {number} of its {self.history}")
                turns.append({"role": role, "content": content})
        return turns


def split_turns(text: Any) -> Any:
    """Return the turns of a text that has "Human:" and "Assistant:" in front of each, without an empty last turn of
    the assistant; another text is stripped."""
    if not isinstance(text, str):
        return text
    preamble, *parts = SPEAKER_PREFIX.split(text.rstrip())
    if preamble.strip() or "Human" not in parts[::2]:
        return text.strip()
    turns = [{"role": role, "content": content.strip()} for role, content in zip(parts[::2], parts[1::2])]
    return turns[:-1] if parts[-2:] == ["Assistant", ""] else turns


def template_values(record: dict[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    """Return the values that a record gives to the template besides its messages: tools, documents, and arguments of
    its own. Raises BadRecord: it is not of the form that templates take."""
    given: dict[str, Any] = {}
    for name in columns:
        value = drop_nulls(parse_list(record[name], f"its {name} are", "{["))
        if value in (None, "", [], {}):
            continue
        try:
            if name == "chat_template_kwargs":
                given |= check_arguments(value)
            elif name == "documents":
                given[name] = value
            else:
                given["tools"] = parse_tools(value)
        except ValueError as error:
            raise BadRecord(f"its {name}: {error}") from None
    return given


def turns_in(value: Any, role: str, column: str) -> list[Message]:
    """Return the messages in a column, which holds a list of turns, such a list as text, or one text of a `role`.
    Raises BadRecord: a turn has no text, or no known role."""
    if isinstance(value, str) and TURNS_AS_TEXT.match(value):
        value = parse_list(value, f"the {column} is")
    if not isinstance(value, (list, dict)):
        return [{"role": role, "content": require_text(value, f"the {column}")}]
    messages = []
    for number, (name, text, more) in enumerate(turns_of(_with_roles(value)), 1):
        if name is None:
            raise BadRecord(f"turn {number} of its {column} has no role ({' or '.join(TURN_ROLE_KEYS)})")
        if name not in ROLE_OF_NAME:
            known_roles = "; ".join(f"{role}: {', '.join(names)}" for role, names in NAMES_OF_ROLE.items())
            raise BadRecord(f"turn {number} of its {column} has the role {name!r}. Known are {known_roles}")
        where = f"turn {number} of its {column} ({name})"
        is_answer = ROLE_OF_NAME[name] == "assistant"
        calls: list[dict[str, Any]] = []
        if is_answer:
            calls = parse_list(more.pop("tool_calls", None) or [], f"{where}: its tool_calls are")
            if isinstance(more.get("function_call"), dict) and not calls:  # OpenAI's older form
                calls = [{"type": "function", "function": more.pop("function_call")}]
            if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
                raise BadRecord(f"{where}: its tool_calls are not a list of objects")
        flags = {key: more.pop(key) for key in MASK_KEYS if key in more}
        if is_answer and not is_trained(flags, where):
            more["masked"] = True
        elif not is_answer and flags and is_trained(flags, where):
            more |= flags  # the template gets them; only answers are trained on
        if is_blank(text) and (calls or ROLE_OF_NAME[name] == "system"):
            text = ""
        elif text is None:
            raise BadRecord(f"{where} has no text and no tool_calls")
        else:
            text = require_text(text, where)
        message = {"role": ROLE_OF_NAME[name], "content": text, **more}
        messages.append({**message, "tool_calls": calls} if calls else message)
    return messages


def _with_roles(turns: Any) -> list[Any]:
    """Return the turns as a list. {"human": "Hi?", "assistant": "Ho."} and {"input": "Hi?", "output": "Ho."} are
    two."""
    result: list[Any] = []
    for turn in as_turn_list(turns):
        if not isinstance(turn, dict) or role_of(turn):
            result.append(turn)
            continue
        texts = {key.lower(): text for key, text in turn.items() if text is not None}
        turns_of_item = [{"role": role, "content": texts[name]} for name, role in ROLE_OF_KEY.items() if name in texts]
        result += turns_of_item if len(turns_of_item) == len(texts) > 0 else [turn]
    return result


def check_order(messages: list[Message], answered: bool = True) -> None:
    """Raises BadRecord unless the roles are (system,) user, assistant, user, assistant, ..., assistant; without
    `answered` the last assistant is missing. Between two turns of the assistant, tools may replace the user."""
    if not messages:
        raise BadRecord("a conversation without a turn")
    begin = int(messages[0]["role"] == "system")
    previous = "assistant"
    for number, message in enumerate(messages[begin:], begin + 1):
        expected = "user" if previous == "assistant" else "assistant"
        if message["role"] == "tool" and (previous == "tool" or (previous == "assistant" and number > begin + 1)):
            previous = "tool"
            continue
        if message["role"] == "system":
            raise BadRecord(f"turn {number} is the system's, which can only be the first")
        if message["role"] != expected:
            raise BadRecord(f"turn {number} is the {message['role']}'s, where one of the {expected} was due")
        previous = expected
    if not answered and messages[-1]["role"] == "system":
        raise BadRecord("no turn that could be answered")
    if answered and messages[-1]["role"] != "assistant":
        raise BadRecord(f"no answer: the last turn, number {len(messages)}, is the {messages[-1]['role']}'s")


def find_form(recipe: ClmRecipe, table: Dataset) -> RecordForm | None:
    """Return the form of the records, by the names of the columns. None: the records are plain text."""
    if recipe.text_column:
        return None
    answered = not recipe.predict_file
    verdict = refuse_preferences(table, "--text_column") if answered else None
    form = first_form(recipe, table, answered)
    if form is None:
        return None
    given = tuple(name for name in template_columns(table) if name not in form.columns)
    return replace(form, verdict=verdict, given=given)


def first_form(recipe: ClmRecipe, table: Dataset, answered: bool) -> RecordForm | None:
    """Return the first of the possible forms whose columns exist. `answered`: whether records must have an answer."""
    names = table.column_names
    system = tables.match_columns(SYSTEM_COLUMNS, names)
    form = partial(RecordForm, system=system, system_prompt=recipe.system_prompt, answered=answered)
    lists = [name for name in DIALOGUE_COLUMNS if name in names and tables.may_hold_turns(table.features[name])]
    packed = [name for name in DIALOGUE_COLUMNS if name in tables.text_columns(table)]
    for name in (*lists, *packed):
        if name != "history" and _has_roles(table[name][:NUM_INSPECTED_RECORDS]):
            return form("messages", name)
    candidates = [name for name in names if "text" not in names or name not in AMBIGUOUS_COLUMNS]
    question = tables.match_columns(QUESTION_COLUMNS, candidates)
    answer = tables.match_columns(ANSWER_COLUMNS, candidates)
    if question is None or (answered and answer is None):
        question, answer = tables.match_columns(SPEAKER_COLUMNS, names) or (None, None)
    if question is None:
        return None
    answer = answer if answered else None
    history = "history" if "history" in names and holds_turns(table, "history", LISTS_AS_TEXT) else None
    given = tables.match_columns(INPUT_COLUMNS, [name for name in names if name != question])
    turns = [name for name in (question, answer, history) if name and holds_turns(table, name)]
    if question == "instruction" or (given and question not in turns):
        return form("instruction", question, answer, given, history=history)
    texts = [] if turns or recipe.chat_template == "none" else table[question][:NUM_INSPECTED_RECORDS]
    is_spoken = any(isinstance(split_turns(text), list) for text in texts)
    return form("prompt", question, answer, history=history, plain=not (turns or is_spoken), spoken=is_spoken)


def template_columns(table: Dataset) -> tuple[str, ...]:
    """Return the columns that templates take besides the messages, with lists, objects or their JSON texts."""
    names = [name for name in TEMPLATE_ARGUMENTS if name in table.column_names]
    values = {name: [value for value in table[name][:NUM_INSPECTED_RECORDS] if value] for name in names}
    return tuple(
        name
        for name in names
        if all(isinstance(value, (list, dict)) or str(value).lstrip().startswith(("[", "{")) for value in values[name])
    )


def holds_turns(table: Dataset, name: str, form: re.Pattern[str] = TURNS_AS_TEXT) -> bool:
    """Return whether a column holds turns, and not one text: as a list, an object, or the text of a list of `form`."""
    kind = table.features[name]
    texts = table[name][:NUM_INSPECTED_RECORDS] if name in tables.text_columns(table) else []
    return tables.holds_lists(kind) or isinstance(kind, dict) or any(text and form.match(text) for text in texts)


def _has_roles(conversations: list[Any]) -> bool:
    """Return whether turns have a known role."""
    try:
        if any(isinstance(items, str) and TURNS_AS_TEXT.match(items) for items in conversations):
            return True
        lists = [items for items in map(parse_list, conversations) if isinstance(items, (list, dict))]
        return any(role in ROLE_OF_NAME for items in lists for role in map(role_of, _with_roles(items)))
    except BadRecord:
        return False
