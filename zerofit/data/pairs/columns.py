"""The columns that hold pairs of source and target, and the pairs of a record.

A *pair* is what an encoder-decoder model learns from: a source text and the target that follows from it. A
conversation of n turns gives up to n - 1 pairs: each turn after the first is a reply to the turns before it.
"""

from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from zerofit.data.records import BadRecord
from zerofit.data.tables import check_name, columns_present, text_columns
from zerofit.data.turns import (
    ASSISTANT,
    DIALOGUES,
    blank,
    first_answer,
    holds_lists,
    question_answering_columns,
    refuse_preferences,
    refuse_rejected,
    turns_of,
)
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import PairOptions

REPLIES = ("response", "reply", "target")
SOURCES_AND_TARGETS = (
    ("source", "target"),
    ("input", "output"),
    ("document", "summary"),
    ("article", "highlights"),
    ("text", "summary"),
    ("dialogue", "summary"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("context", "response"),
)


@dataclass(frozen=True)
class Pair:
    """Turns (or one source text) and the target."""

    source: list[str]
    target: str


@dataclass(frozen=True)
class PairColumns:
    """The columns that options name."""

    dialogue_column: str | None = None
    source_column: str | None = None
    target_column: str | None = None

    @classmethod
    def of(cls, recipe: PairOptions) -> "PairColumns":
        return cls(recipe.dialogue_column, recipe.source_column, recipe.target_column)


@dataclass(frozen=True)
class Columns:
    """The columns of the pairs: a conversation with or without its reply, or a source and a target.

    Args:
        context: the text that a question is about; it is appended to the source, as in run_seq2seq_qa.py.
        verdict: says whether the answer is a good one.
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
        """The same without the replies."""
        return f"source {self.source}" if self.dialogue is None else f"conversations {self.dialogue}, to be answered"

    def prompt_turns(self, record: dict[str, Any]) -> list[str]:
        """The turns of a record that need a reply, or its source; replies at its end, by their roles, are removed.
        Raises BadRecord: there is none, or a text is empty."""
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
        has_assistant = any(role in ASSISTANT for role, _ in turns)
        places = [place for place in range(1, len(turns)) if not has_assistant or turns[place][0] in ASSISTANT]
        if not places:
            what = "a reply with no history" if turns else "a conversation without a turn"
            raise BadRecord(f"{what}: its {self.dialogue} has {len(turns)} turn{'s' if len(turns) != 1 else ''}")
        return [Pair(texts[:place], texts[place]) for place in places]


def find_columns(named: PairColumns, table: Dataset) -> Columns:
    """The columns that options name, else those of known names, else the only two columns of text.

    Raises:
        UserError: a column does not exist, or none is found; the message lists the columns.
    """
    present = table.column_names
    for option in ("dialogue_column", "source_column", "target_column"):
        name = getattr(named, option)
        if name and name not in present:
            raise UserError(f"{option} = {name!r}: there is no such column; {columns_present(table)}")
    texts = text_columns(table)
    lists = [name for name in present if name not in texts and holds_lists(table.features[name])]
    dialogue = named.dialogue_column
    if dialogue and dialogue not in lists:
        raise UserError(f"dialogue_column = {dialogue!r} holds no list of turns; {columns_present(table)}")
    for option in ("source_column", "target_column"):
        name = getattr(named, option)
        if name and name not in texts:
            raise UserError(f"{option} = {name!r} holds no text; {columns_present(table)}")
    verdict = None
    if not named.source_column:
        verdict = refuse_preferences(table, "--source_column and --target_column")
    if not dialogue and not named.source_column:
        dialogue = next((name for name in DIALOGUES if name in lists), None)
    if dialogue:
        reply = named.target_column or next((name for name in REPLIES if name in texts), None)
        return Columns(dialogue, None, reply, verdict=verdict)
    if named.source_column and named.target_column:
        return Columns(None, named.source_column, named.target_column)
    if not named.source_column and not named.target_column:
        if columns := question_answering_columns(table):
            return Columns(None, *columns)
        for source, target in SOURCES_AND_TARGETS:
            if "instruction" in texts and source == "input":
                continue  # the question is in another column; options can still name the columns
            if source in texts and target in texts:
                return Columns(None, source, target, verdict=verdict)
    if len(texts) == 2:
        for name in () if named.source_column or named.target_column else texts:
            check_name(name, "source_column and --target_column")
        source = named.source_column or next(name for name in texts if name != named.target_column)
        return Columns(None, source, named.target_column or next(name for name in texts if name != source))
    raise UserError(
        "no conversation and no source and target are found: name --dialogue_column, or --source_column and "
        f"--target_column; {columns_present(table)}"
    )


def find_sources(named: PairColumns, table: Dataset) -> Columns:
    """The column of the sources of predict_file: that of an option, else one with a known name, else the only column
    of text.

    Raises:
        UserError: the column does not exist, or none is found.
    """
    texts, present = text_columns(table), table.column_names
    for option, known in (("dialogue_column", present), ("source_column", texts)):
        name = getattr(named, option)
        if name and name not in known:
            raise UserError(f"{option} = {name!r}: there is no such column; {columns_present(table)}")
    lists = [name for name in present if holds_lists(table.features[name])]
    dialogue = named.dialogue_column or next((name for name in DIALOGUES if name in lists), None)
    if dialogue and not named.source_column:
        return Columns(dialogue, None, None)
    if {"question", "context"} <= set(texts) and not named.source_column:
        return Columns(None, "question", None, "context")
    known = [source for source, _ in SOURCES_AND_TARGETS if source in texts]
    source = named.source_column or (texts[0] if len(texts) == 1 else next(iter(known), None))
    if source is None or (source == "input" and "instruction" in texts and not named.source_column):
        raise UserError(
            "no conversation and no source is found: name --dialogue_column or --source_column; "
            f"{columns_present(table)}"
        )
    return Columns(None, source, None)
