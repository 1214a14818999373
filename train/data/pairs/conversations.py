"""Conversations and other pairs of source and target: which columns hold them, what is asked and what is answered.

A *pair* is what an encoder-decoder model learns from: a source text and the target that follows from it. A
conversation of n turns gives up to n - 1 pairs: each turn after the first is a reply to the turns before it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, Value

from train.data.encodings import open_bytes
from train.data.records import BadRecord
from train.data.sources import columns_present, name_for_the_cache, text_columns
from train.recipe.errors import UserError
from train.recipe.tasks import PairOptions

DIALOGUES = ("dialogue", "dialog", "messages", "turns", "conversation", "conversations", "utterances", "history")
REPLIES = ("response", "reply", "target")
SOURCES_AND_TARGETS = (
    ("source", "target"), ("input", "output"), ("document", "summary"), ("article", "highlights"), ("text", "summary"),
    ("dialogue", "summary"), ("prompt", "completion"), ("question", "answer"), ("context", "response"),
)  # fmt: skip
TEXT_OF_A_TURN = ("content", "message", "text", "value", "utterance")
TEXT_OF_A_PART = ("text", "value", "content")
ROLE_OF_A_TURN = ("role", "from", "speaker")
PREFERENCES = (("chosen", "rejected"), ("response_a", "response_b"), ("response_0", "response_1"),
               ("conversation_a", "conversation_b"), ("answer_a", "answer_b"), ("output_1", "output_2"))  # fmt: skip
VERDICTS = ("label", "kto_tag")  # columns that call an answer a good one or a bad one
ASSISTANT = ("assistant", "gpt", "bot", "model")  # where these speak, they alone give the replies


@dataclass(frozen=True)
class Pair:
    """Turns (or one source text) and what follows from them."""

    source: list[str]
    target: str


@dataclass(frozen=True)
class Columns:
    """Where a table holds its pairs: a conversation with or without its reply, or a source and a target.

    Args:
        context: what a source asks about, which is put behind it, as run_seq2seq_qa.py does.
        verdict: whether the answer is a good one.
    """

    dialogue: str | None
    source: str | None
    target: str | None
    context: str | None = None
    verdict: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.dialogue, self.source, self.context, self.target, self.verdict) if name)

    @property
    def describe(self) -> str:
        """For the log."""
        if self.dialogue is None:
            return f"source {self.source}{f' with {self.context}' if self.context else ''}, target {self.target}"
        reply = f", reply {self.target}" if self.target else ", each turn after the first is a reply"
        return f"conversations {self.dialogue}{reply}"

    @property
    def describe_sources(self) -> str:
        """The same where nothing is known of replies."""
        return f"source {self.source}" if self.dialogue is None else f"conversations {self.dialogue}, to be answered"

    def asked(self, record: dict[str, Any]) -> list[str]:
        """The turns of a record to which a reply is due, or its one source; replies that it has at its end, as roles
        tell, are left out. Raises BadRecord: there is none, or a text is empty."""
        if self.dialogue is None:
            return [self._source(record)]
        turns = list(turns_of(record[self.dialogue] or []))
        while turns and turns[-1][0] in ASSISTANT:
            turns.pop()
        if not turns:
            raise BadRecord(f"its {self.dialogue} has no turn that could be replied to")
        for number, (_, text) in enumerate(turns, 1):
            if blank(text):
                raise BadRecord(f"turn {number} of its {self.dialogue} is empty")
        return [text.strip() for _, text in turns]

    def _source(self, record: dict[str, Any]) -> str:
        """The text of a source. Raises BadRecord: it is empty."""
        source = record[self.source]
        if blank(source):
            raise BadRecord(f"the {self.source} is empty")
        if self.context and not blank(record[self.context]):
            return f"question: {source.strip()} context: {record[self.context].strip()}".strip()
        return source.strip()

    def pairs(self, record: dict[str, Any]) -> list[Pair]:
        """The pairs of a record. Raises BadRecord: there is none, or a text is empty."""
        refuse_rejected(record, self.verdict)
        if self.dialogue is None:
            source, target = self._source(record), first_answer(record[self.target])
            if blank(target):
                raise BadRecord(f"the {self.target} is empty")
            return [Pair([source], target.strip())]
        turns = list(turns_of(record[self.dialogue] or []))
        for number, (_, text) in enumerate(turns, 1):
            if blank(text):
                raise BadRecord(f"turn {number} of its {self.dialogue} is empty")
        texts = [text.strip() for _, text in turns]
        if self.target is not None:
            reply = record[self.target]
            if blank(reply):
                raise BadRecord(f"the {self.target} is empty")
            if not texts:
                raise BadRecord(f"a reply with no history: its {self.dialogue} has no turn")
            return [Pair(texts, reply.strip())]
        assistants = any(role in ASSISTANT for role, _ in turns)
        places = [place for place in range(1, len(turns)) if not assistants or turns[place][0] in ASSISTANT]
        if not places:
            what = "a reply with no history" if turns else "a conversation without a turn"
            raise BadRecord(f"{what}: its {self.dialogue} has {len(turns)} turn{'s' if len(turns) != 1 else ''}")
        return [Pair(texts[:place], texts[place]) for place in places]


def find_columns(recipe: PairOptions, table: Dataset) -> Columns:
    """The columns that the recipe names, else those of known names, else the only two columns of text.

    Raises:
        UserError: a column is not there, or none is found; the message lists those there are.
    """
    present = table.column_names
    for option in ("dialogue_column", "source_column", "target_column"):
        name = getattr(recipe, option)
        if name and name not in present:
            raise UserError(f"{option} = {name!r}: there is no such column; {columns_present(table)}")
    texts = text_columns(table)
    lists = [name for name in present if name not in texts and holds_lists(table.features[name])]
    dialogue = recipe.dialogue_column
    if dialogue and dialogue not in lists:
        raise UserError(f"dialogue_column = {dialogue!r} holds no list of turns; {columns_present(table)}")
    for option in ("source_column", "target_column"):
        name = getattr(recipe, option)
        if name and name not in texts:
            raise UserError(f"{option} = {name!r} holds no text; {columns_present(table)}")
    verdict = None
    if not recipe.source_column:
        verdict = refuse_preferences(table, "--source_column and --target_column")
    if not dialogue and not recipe.source_column:
        dialogue = next((name for name in DIALOGUES if name in lists), None)
    if dialogue:
        reply = recipe.target_column or next((name for name in REPLIES if name in texts), None)
        return Columns(dialogue, None, reply, verdict=verdict)
    if recipe.source_column and recipe.target_column:
        return Columns(None, recipe.source_column, recipe.target_column)
    if not recipe.source_column and not recipe.target_column:
        if asked := asks_about_a_text(table):
            return Columns(None, *asked)
        for source, target in SOURCES_AND_TARGETS:
            if "instruction" in texts and source == "input":
                continue  # the question is in another column: whoever wants this names the columns
            if source in texts and target in texts:
                return Columns(None, source, target, verdict=verdict)
    if len(texts) == 2:
        source = recipe.source_column or next(name for name in texts if name != recipe.target_column)
        return Columns(None, source, recipe.target_column or next(name for name in texts if name != source))
    raise UserError(
        "no conversation and no source and target are found: name --dialogue_column, or --source_column and "
        f"--target_column; {columns_present(table)}"
    )


def refuse_preferences(table: Dataset, remedy: str) -> str | None:
    """The column that calls answers good or bad ones, if there is one and some are bad.

    Raises:
        UserError: each record has a preferred and a rejected answer.
    """
    for good, bad in PREFERENCES:
        if {good, bad} <= set(table.column_names):
            raise UserError(
                f"the records are preferences: two answers each, of which one is better ({good}, {bad}), as for DPO "
                "or a reward model, which is not trained here. To train on the better answers alone, write them into "
                f"a file of prompts and answers, or name columns with {remedy}; {columns_present(table)}"
            )
    verdicts = [name for name in VERDICTS if name in table.column_names and table.features[name] == Value("bool")]
    return verdicts[0] if verdicts else None


def refuse_rejected(record: dict[str, Any], verdict: str | None) -> None:
    """Raises BadRecord if the record says of its answer that it is a bad one."""
    if verdict and record[verdict] is False:
        raise BadRecord(f"its answer is a rejected one ({verdict}: false), as in data of preferences for KTO")


def asks_about_a_text(table: Dataset) -> tuple[str, str, str] | None:
    """(question, answer, context) of records as SQuAD has them; None where they are not such."""
    there = table.column_names
    answer = next((name for name in ("answers", "answer") if name in there), None)
    return ("question", answer, "context") if answer and {"question", "context"} <= set(there) else None


def first_answer(value: Any) -> Any:
    """A text; of several, the first: ["..."], {"text": ["..."]} as in SQuAD on the hub, [{"text": "..."}] as in its
    files."""
    while isinstance(value, (list, dict)):
        value = value.get("text") if isinstance(value, dict) else value[0] if value else None
    return value


def read_conversation_files(paths: list[Path]) -> Dataset | None:
    """Conversations in files of a form of their own: ParlAI's text, Topical-Chat's JSON. None for any other."""
    with open_bytes(paths[0]) as file:
        first = file.readline(1 << 16).removeprefix(b"\xef\xbb\xbf")
    names = {field.partition(b":")[0] for field in first.split(b"\t")}
    parlai = b"text" in names and names & {b"labels", b"eval_labels"}
    return read_parlai(paths) if parlai else read_keyed_conversations(paths)


def read_parlai(paths: list[Path]) -> Dataset:
    """ParlAI's text: fields `name:value` between tabs, a line for each exchange, `episode_done:True` in the last of a
    conversation. Where there are several labels, the first is the answer.

    Source: https://parl.ai/docs/tutorial_task.html (ParlAI dialog format).
    """
    conversations: list[list[dict[str, str]]] = [[]]
    for path in paths:
        with open_bytes(path) as file:
            for number, line in enumerate(file.read().decode("utf-8-sig").splitlines(), 1):
                fields = dict(field.partition(":")[::2] for field in line.split("\t"))
                if not line.strip():
                    continue
                labels = fields.get("labels", fields.get("eval_labels"))
                if "text" not in fields or labels is None:
                    raise UserError(f"{path}, line {number}: a line of ParlAI's text has `text:` and `labels:`")
                turns = {"user": fields["text"], "assistant": labels.split("|")[0]}
                conversations[-1] += [
                    {"role": role, "text": text.replace("\\n", "\n").replace("__PIPE__", "|")}
                    for role, text in turns.items()
                ]
                if fields.get("episode_done") == "True":
                    conversations.append([])
        if conversations[-1]:
            conversations.append([])
    return _named_after({"dialogue": conversations[:-1]}, paths)


def _named_after(columns: dict[str, list], paths: list[Path]) -> Dataset:
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return name_for_the_cache(Dataset.from_dict(columns), "conversations", stamps)


def find_sources(recipe: PairOptions, table: Dataset) -> Columns:
    """The column of what is to be answered: the one that the recipe names, else one of a known name, else the only
    column of text.

    Raises:
        UserError: it is not there, or none is found.
    """
    texts, present = text_columns(table), table.column_names
    for option, known in (("dialogue_column", present), ("source_column", texts)):
        name = getattr(recipe, option)
        if name and name not in known:
            raise UserError(f"{option} = {name!r}: there is no such column; {columns_present(table)}")
    lists = [name for name in present if holds_lists(table.features[name])]
    dialogue = recipe.dialogue_column or next((name for name in DIALOGUES if name in lists), None)
    if dialogue and not recipe.source_column:
        return Columns(dialogue, None, None)
    if {"question", "context"} <= set(texts) and not recipe.source_column:
        return Columns(None, "question", None, "context")
    known = [source for source, _ in SOURCES_AND_TARGETS if source in texts]
    source = recipe.source_column or (texts[0] if len(texts) == 1 else next(iter(known), None))
    if source is None or (source == "input" and "instruction" in texts and not recipe.source_column):
        raise UserError(
            "no conversation and no source is found: name --dialogue_column or --source_column; "
            f"{columns_present(table)}"
        )
    return Columns(None, source, None)


def read_keyed_conversations(paths: list[Path]) -> Dataset | None:
    """The form of Topical-Chat: one JSON object, {id: {"content": [{"message": ...}, ...]}}. None for any other form.

    Source: https://github.com/alexa/Topical-Chat (conversations/*.json).
    """
    conversations: list[list[str]] = []
    for path in paths:
        with open_bytes(path) as file:
            if file.read(64).lstrip()[:1] != b"{":
                return None
            file.seek(0)
            try:
                found = json.load(file)
            except ValueError:
                return None  # JSON lines, or broken: the datasets library will say
        held = found.values()
        if not found or not all(isinstance(value, dict) and isinstance(value.get("content"), list) for value in held):
            return None
        try:
            conversations += [[text for _, text in turns_of(value["content"])] for value in held]
        except BadRecord:
            return None
    return _named_after({"dialogue": conversations}, paths)


def holds_lists(feature: Any) -> bool:
    """Whether a column of this feature holds lists."""
    return isinstance(feature, list) or hasattr(feature, "feature")


def roles_of(items: Any) -> list[str | None]:
    """Whose each turn is; None where it does not say."""
    return [
        next((str(item[key]).lower() for key in ROLE_OF_A_TURN if item.get(key)), None)
        if isinstance(item, dict) else None for item in _listed(items)
    ]  # fmt: skip


def _listed(items: Any) -> list:
    if isinstance(items, dict):  # how some versions of the datasets library give a list of objects
        return [dict(zip(items, values)) for values in zip(*items.values())]
    return items


def calls_of(items: Any) -> list[Any]:
    """The structured `tool_calls` of each turn. A table gives every call the keys of all calls: what has no value is
    left out again."""
    turns = [item if isinstance(item, dict) else {} for item in _listed(items)]
    return [_without_nothing(turn.get("tool_calls") or []) for turn in turns]


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value


def turns_of(items: Any) -> Iterator[tuple[str | None, str | None]]:
    """(role, text) of each turn: plain texts, or objects with a text and perhaps a role."""
    for item, role in zip(_listed(items), roles_of(items)):
        if isinstance(item, dict):
            known = next((key for key in TEXT_OF_A_TURN if item.get(key) is not None), None)
            if known is None and not any(key in item for key in TEXT_OF_A_TURN):
                raise BadRecord(f"a turn has {', '.join(item)}, and none of {', '.join(TEXT_OF_A_TURN)} for its text")
            yield role, _plain(item.get(known))
        else:
            yield None, item


def _plain(content: Any) -> Any:
    """A turn's text, also where it comes in parts: [{"type": "text", "text": ...}, ...], or with "value" for "text".

    Raises:
        BadRecord: no part is a text.
    """
    parts = [content] if isinstance(content, dict) else content
    if not isinstance(parts, list) or not parts or not all(isinstance(part, (dict, str)) for part in parts):
        return content
    texts = [_of_part(part) for part in parts]
    if all(text is None for text in texts):
        kinds = dict.fromkeys(str(part.get("type") or ", ".join(part)) for part in parts)
        raise BadRecord(f"a turn holds {' and '.join(kinds)}, and no text ({' or '.join(TEXT_OF_A_PART)})")
    return "".join(filter(None, texts))


def _of_part(part: dict[str, Any] | str) -> str | None:
    if isinstance(part, str):
        return part
    text = next((part[key] for key in TEXT_OF_A_PART if part.get(key) is not None), None)
    if isinstance(text, dict):  # {"type": "text", "text": {"value": ..., "annotations": []}}
        return _of_part(text)
    return text if isinstance(text, str) else None


def blank(text: Any) -> bool:
    """Whether there is no text, or only white space."""
    return not isinstance(text, str) or not text.strip()
