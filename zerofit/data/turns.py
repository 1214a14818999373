"""Turns of a conversation and answers to a question, in the formats of data sets; refusal of preference data.

Chats (data/chat), pairs (data/pairs) and multiple choice (data/labelled) read records with these functions.
"""

import ast
import contextlib
from decimal import Decimal
from io import StringIO
from itertools import pairwise
from tokenize import NL, STRING, TokenError, generate_tokens
from typing import Any, NamedTuple

from datasets import Dataset, Value

from zerofit.data.records import BadRecord
from zerofit.data.tables import LOOKED_AT, columns_present, match_columns, text_columns, text_of
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import parse_json

DIALOGUES = "dialogue dialog messages turns conversation conversations utterances contents history".split()
TEXT_OF_A_TURN = ("content", "message", "text", "value", "utterance", "parts")
TEXT_OF_A_PART = ("text", "value", "content")
ROLE_OF_A_TURN = ("role", "from", "speaker", "sender", "author")
PREFERENCES = (
    ("chosen", "rejected"),
    ("response_a", "response_b"),
    ("response_0", "response_1"),
    ("conversation_a", "conversation_b"),
    ("answer_a", "answer_b"),
    ("output_1", "output_2"),
)
VERDICTS = ("label", "kto_tag")  # columns that say whether an answer is good or bad
TEXT_PARTS = (None, "text", "input_text", "output_text")  # types of parts whose text is read
TRAINED = ("weight", "train", "training", "trainable", "trained", "loss", "loss_mask", "loss_weight", "calculate_loss")
MASKED = ("mask", "masked", "is_masked")
MASKS = (*TRAINED, *MASKED)  # keys of a turn that say whether it is trained on
YES_OR_NO = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}
# If there are turns of these, only they are replies.
ASSISTANT = ("assistant", "gpt", "bot", "model", "ai", "chatgpt", "bing", "bard")


def refuse_preferences(table: Dataset, remedy: str) -> str | None:
    """The column that says whether an answer is good or bad, if there is one. Raises UserError: each record has a
    preferred and a rejected answer."""
    if pair := match_columns(PREFERENCES, table.column_names):
        what = f"the records are preferences ({', '.join(pair)}): train/dpo.py reads them as chosen and rejected"
        raise UserError(f"{what}. Or name columns with {remedy}; {columns_present(table)}")
    return next((name for name in VERDICTS if name in table.column_names and _holds_booleans(table, name)), None)


def _holds_booleans(table: Dataset, name: str) -> bool:
    """Return whether a column holds true and false; in a .csv file they are texts."""
    if name in text_columns(table):
        return {str(value).lower() for value in table[name][:LOOKED_AT]} <= {"true", "false"}
    return table.features[name] == Value("bool")


def refuse_rejected(record: dict[str, Any], verdict: str | None) -> None:
    """Raises BadRecord if the record marks its answer as a bad one."""
    if verdict and str(record[verdict]).lower() == "false":
        raise BadRecord(f"its answer is a rejected one ({verdict}: false), as in data of preferences for KTO")


def question_answering_columns(table: Dataset) -> tuple[str, str, str] | None:
    """The columns (question, answer, context) of records in SQuAD's format; None for other records."""
    names = table.column_names
    answer = match_columns(("answers", "answer"), names)
    return ("question", answer, "context") if answer and {"question", "context"} <= set(names) else None


def first_answer(value: Any) -> Any:
    """A text; of several, the first: ["..."], {"text": ["..."]} as in SQuAD on the hub, or the text of such an object
    (pandas' to_csv), [{"text": "..."}] as in its files. Turns with roles as they are. Raises BadRecord: that text is
    not JSON, and no Python."""
    if isinstance(value, str) and "answer_start" in value:
        value = unpacked(value, "its answers are", "{")
    while isinstance(value, (list, dict)) and not role_of(value[0] if isinstance(value, list) and value else value):
        value = value.get("text") if isinstance(value, dict) else value[0] if value else None
    return value


class Turn(NamedTuple):
    """A turn of a conversation. `more`: its other values, such as tool_calls; in a table every turn and every call has
    the keys of all, so keys without a value are left out."""

    role: str | None
    text: str | None
    more: dict[str, Any]


def listed(items: Any) -> list[Any]:
    """The turns as a list, also where the datasets library has made an object of lists of a list of objects."""
    return [dict(zip(items, values)) for values in zip(*items.values())] if isinstance(items, dict) else items


def role_of(turn: Any) -> str | None:
    """The role of a turn in lower case; None if it has none."""
    named = (turn.get(key) for key in ROLE_OF_A_TURN) if isinstance(turn, dict) else ()
    return next((str(name).lower() for name in named if name), None)


def is_trained(more: dict[str, Any], where: str) -> bool:
    """Return whether a turn may be trained on: no key of it, such as weight, train or mask, says otherwise. Raises
    BadRecord: a key has another value than yes or no."""
    answers = []
    for key in MASKS:
        if key not in more:
            continue
        answer = YES_OR_NO.get(str(more[key]).strip().lower())
        if answer is None or (key in MASKED and str(more[key]).strip() in ("0", "1", "0.0", "1.0")):
            expected = "true or false" if key in MASKED else "0 or 1, or true or false"
            raise BadRecord(f"{where}: {key} = {more[key]!r}, where {expected} is read (whether it is trained on)")
        answers.append(answer != (key in MASKED))
    return all(answers)


def without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nothing(item) for key, item in value.items() if item is not None}
    return [without_nothing(item) for item in value] if isinstance(value, list) else value


def turns_of(items: Any) -> list[Turn]:
    """Turns that are plain texts, or objects with a text and perhaps a role. Raises BadRecord: an object has no text,
    or more than text."""
    turns = []
    for item in listed(items):
        if not isinstance(item, dict):
            turns.append(Turn(None, item, {}))
            continue
        role, text = (
            next((key for key in keys if item.get(key) is not None), None) for keys in (ROLE_OF_A_TURN, TEXT_OF_A_TURN)
        )
        if text is None and not any(key in item for key in TEXT_OF_A_TURN):
            raise BadRecord(f"a turn has {', '.join(item)}, and none of {', '.join(TEXT_OF_A_TURN)} for its text")
        more = {key: value for key, value in item.items() if key not in (role, text)}
        turns.append(Turn(role_of(item), _plain(item.get(text)), without_nothing(more)))
    return turns


def _plain(content: Any) -> Any:
    """A turn's text, also where it comes in parts: [{"type": "text", "text": ...}, ...], or with "value" for "text".
    Raises BadRecord: a part is something else, such as a picture."""
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list) or not parts or not all(isinstance(part, (dict, str)) for part in parts):
        return content
    texts, others = list[str](), dict[str, None]()
    for part in parts:
        text, kind = _of_part(part), part.get("type") if isinstance(part, dict) else "text"
        texts.append(text or "")
        if kind not in TEXT_PARTS:
            others[str(kind)] = None
        elif kind is None and text is None and (named := [key for key, value in part.items() if value is not None]):
            others[", ".join(named)] = None
    if others:
        raise BadRecord(f"a turn holds {' and '.join(others)}: only text is read ({' or '.join(TEXT_OF_A_PART)})")
    return "".join(texts)


def optional_text(value: Any, what: str) -> str:
    """A text that a record may have, also a number, or in parts; "" where it has none. Raises BadRecord: it is
    something else. `what`: its name in the message."""
    if role_of(value):
        value = turns_of([value])[0].text
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        value = _plain(value)
    value = worded(value)
    if not isinstance(value, str) and without_nothing(value):
        raise BadRecord(f"{what} is a list or an object, and only a text is read there")
    return "" if blank(value) else value


def _of_part(part: dict[str, Any] | str) -> str | None:
    if isinstance(part, str):
        return part
    text = next((part[key] for key in TEXT_OF_A_PART if part.get(key) is not None), None)
    if isinstance(text, dict):  # {"type": "text", "text": {"value": ..., "annotations": []}}
        return _of_part(text)
    return text if isinstance(text, str) else None


def unpacked(value: Any, what: str = "its turns are", begins: str = "[") -> Any:
    """Turns that are stored as the text of a list, in JSON or in Python, as in tables without lists."""
    if isinstance(value, str) and value.lstrip()[:1] in tuple(begins):
        try:
            return parse_json(value)
        except ValueError:
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError, TokenError):
                found = ast.literal_eval(value.strip())  # pandas' to_csv writes lists so
                kinds = [token.type for token in generate_tokens(StringIO(value.strip()).readline) if token.type != NL]
                if (STRING, STRING) not in pairwise(kinds):  # which Python would join
                    return found
            raise BadRecord(f"{what} the text of a list that is not valid JSON") from None
    return value


def blank(text: Any) -> bool:
    """Return whether there is no text, or only white space."""
    return not isinstance(text, str) or not text.strip()


def worded(value: Any) -> Any:
    """A number as text, any other value as it is: an answer of digits is read as a number."""
    return text_of(value) if isinstance(value, (int, float, Decimal)) else value


def checked_text(value: Any, what: str) -> str:
    """A text, or a number as one. Raises BadRecord: it is empty, or no text. `what`: its name in the message."""
    text = worded(value)
    if blank(text):
        is_other = value is not None and not isinstance(value, str)
        raise BadRecord(f"{what} is a {type(value).__name__}, and no text" if is_other else f"{what} is empty")
    return str(text)
