"""Conversations and other pairs of source and target: which columns hold them, what is asked and what is answered.

A *pair* is what an encoder-decoder model learns from: a source text and the target that follows from it. A
conversation of n turns gives up to n - 1 pairs: each turn after the first is a reply to the turns before it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from train.data.records import BadRecord
from train.data.sources import columns_present, name_for_the_cache, open_bytes, text_columns
from train.recipe.errors import UserError
from train.recipe.tasks import PairOptions

DIALOGUES = ("dialogue", "dialog", "messages", "turns", "conversation", "conversations", "utterances", "history")
REPLIES = ("response", "reply", "target")
SOURCES_AND_TARGETS = (
    ("source", "target"), ("input", "output"), ("document", "summary"), ("article", "highlights"), ("text", "summary"),
    ("dialogue", "summary"), ("prompt", "completion"), ("question", "answer"), ("context", "response"),
)  # fmt: skip
TEXT_OF_A_TURN = ("content", "message", "text", "value", "utterance")
ROLE_OF_A_TURN = ("role", "from", "speaker")
ASSISTANT = ("assistant", "gpt", "bot", "model")  # where these speak, they alone give the replies


@dataclass(frozen=True)
class Pair:
    """Turns (or one source text) and what follows from them."""

    source: list[str]
    target: str


@dataclass(frozen=True)
class Columns:
    """Where a table holds its pairs: a conversation with or without its reply, or a source and a target."""

    dialogue: str | None
    source: str | None
    target: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.dialogue, self.source, self.target) if name)

    @property
    def describe(self) -> str:
        """For the log."""
        if self.dialogue is None:
            return f"source {self.source}, target {self.target}"
        reply = f", reply {self.target}" if self.target else ", each turn after the first is a reply"
        return f"conversations {self.dialogue}{reply}"

    def pairs(self, record: dict[str, Any]) -> list[Pair]:
        """The pairs of a record. Raises BadRecord: there is none, or a text is empty."""
        if self.dialogue is None:
            source, target = record[self.source], record[self.target]
            for name, text in ((self.source, source), (self.target, target)):
                if blank(text):
                    raise BadRecord(f"the {name} is empty")
            return [Pair([source.strip()], target.strip())]
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
    if not dialogue and not recipe.source_column:
        dialogue = next((name for name in DIALOGUES if name in lists), None)
    if dialogue:
        return Columns(dialogue, None, recipe.target_column or next((name for name in REPLIES if name in texts), None))
    if recipe.source_column and recipe.target_column:
        return Columns(None, recipe.source_column, recipe.target_column)
    if not recipe.source_column and not recipe.target_column:
        for source, target in SOURCES_AND_TARGETS:
            if "instruction" in texts and source == "input":
                continue  # the question is in another column: whoever wants this names the columns
            if source in texts and target in texts:
                return Columns(None, source, target)
    if len(texts) == 2:
        source = recipe.source_column or next(name for name in texts if name != recipe.target_column)
        return Columns(None, source, recipe.target_column or next(name for name in texts if name != source))
    raise UserError(
        "no conversation and no source and target are found: name --dialogue_column, or --source_column and "
        f"--target_column; {columns_present(table)}"
    )


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
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return name_for_the_cache(Dataset.from_dict({"dialogue": conversations}), "keyed conversations", stamps)


def holds_lists(feature: Any) -> bool:
    """Whether a column of this feature holds lists."""
    return isinstance(feature, list) or hasattr(feature, "feature")


def turns_of(items: Any) -> Iterator[tuple[str | None, str | None]]:
    """(role, text) of each turn: plain texts, or objects with a text and perhaps a role."""
    if isinstance(items, dict):  # how some versions of the datasets library give a list of objects
        items = [dict(zip(items, values)) for values in zip(*items.values())]
    for item in items:
        if isinstance(item, dict):
            role = next((str(item[key]).lower() for key in ROLE_OF_A_TURN if item.get(key)), None)
            known = next((key for key in TEXT_OF_A_TURN if item.get(key) is not None), None)
            if known is None and not any(key in item for key in TEXT_OF_A_TURN):
                raise BadRecord(f"a turn has {', '.join(item)}, and none of {', '.join(TEXT_OF_A_TURN)} for its text")
            yield role, _plain(item.get(known))
        else:
            yield None, item


def _plain(content: Any) -> Any:
    """A turn's text, also where it comes in parts: [{"type": "text", "text": ...}, ...]."""
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        return "".join(part.get("text") or "" for part in content)
    return content


def blank(text: Any) -> bool:
    """Whether there is no text, or only white space."""
    return not isinstance(text, str) or not text.strip()
