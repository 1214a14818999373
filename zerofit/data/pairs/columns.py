"""The columns that hold pairs of source and target, and the pairs of a record.

A *pair* is what an encoder-decoder model learns from: a source text and the target that follows from it. A
conversation of n turns gives up to n - 1 pairs: each turn after the first is a reply to the turns before it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from datasets import Dataset

from zerofit.data import tables
from zerofit.data.records import BadRecord
from zerofit.data.turns import (
    ASSISTANT,
    DIALOGUES,
    MASKS,
    blank,
    checked_text,
    first_answer,
    is_trained,
    optional_text,
    question_answering_columns,
    refuse_preferences,
    refuse_rejected,
    turns_of,
    unpacked,
)
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import Seq2SeqRecipe

REPLIES = ("response", "reply", "target")
SOURCES_AND_TARGETS = (
    ("source", "target"),
    ("input", "output"),
    ("document", "summary"),
    ("article", "highlights"),
    ("article", "abstract"),
    ("text", "summary"),
    ("dialogue", "summary"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("context", "response"),
)
TARGETS = {*REPLIES, "label", *(target for _, target in SOURCES_AND_TARGETS)}  # also with an s behind them


@dataclass(frozen=True)
class Pair:
    """Turns (or one source text) and the target; empty where the model answers."""

    source: list[str]
    target: str


@dataclass(frozen=True)
class PairReader:
    """The columns of the pairs: a conversation with or without its reply, or a source and a target. `context`: the
    text that a question is about; it is appended to the source, as in run_seq2seq_qa.py."""

    dialogue: str | None
    source: str | None
    target: str | None
    context: str | None = None
    verdict: str | None = None  # says whether the answer is a good one
    answered: bool = True  # whether records have a target

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.dialogue, self.source, self.context, self.target, self.verdict) if name]

    @property
    def describe(self) -> str:
        """Describe the columns of the pairs, for the log."""
        if self.dialogue is None:
            target = f", target {self.target}" if self.answered else ""
            return f"source {self.source}{f' with {self.context}' if self.context else ''}{target}"
        reply = f"reply {self.target}" if self.target else "each turn after the first is a reply"
        return f"conversations {self.dialogue}, {reply if self.answered else 'to be answered'}"

    def texts(self, content: list[Pair]) -> Iterator[str]:
        """Every text once."""
        yield from content[-1].source
        yield content[-1].target

    def read(self, record: dict[str, Any]) -> list[Pair]:
        """Read the pairs of a record. With predict_file: one pair without a target, where replies at the end of the
        conversation are dropped. Raises BadRecord: there is none, or a text is empty."""
        if self.answered:
            refuse_rejected(record, self.verdict)
        if self.dialogue is None:
            return [Pair([self._source(record)], self._target(record))]
        held = unpacked(record[self.dialogue], f"its {self.dialogue} is") or []
        if isinstance(held, str):
            raise BadRecord(f"its {self.dialogue} is a text, and no list of turns")
        turns = turns_of(held)
        while not self.answered and turns and turns[-1].role in ASSISTANT:
            turns.pop()
        texts = [
            checked_text(turn.text, f"turn {number} of its {self.dialogue}").strip()
            for number, turn in enumerate(turns, 1)
        ]
        if not texts:
            raise BadRecord(f"a conversation without a turn: its {self.dialogue} is empty")
        if self.target is not None or not self.answered:
            return [Pair(texts, self._target(record))]
        has_assistant = any(turn.role in ASSISTANT for turn in turns)
        replies = [place for place in range(1, len(turns)) if not has_assistant or turns[place].role in ASSISTANT]
        if not replies:
            raise BadRecord(f"a reply with no history: turns in its {self.dialogue}: {len(turns)}")
        where = f"of its {self.dialogue}"
        trained = [place for place in replies if is_trained(turns[place].more, f"turn {place + 1} {where}")]
        if not trained:
            raise BadRecord(f"none of its replies is trained on ({', '.join(MASKS)})")
        return [Pair(texts[:place], texts[place]) for place in trained]

    def _source(self, record: dict[str, Any]) -> str:
        source = checked_text(record[self.source or ""], f"the {self.source}").strip()
        if self.context and (given := optional_text(record[self.context], f"its {self.context}")):
            return f"question: {source} context: {given.strip()}".strip()
        return source

    def _target(self, record: dict[str, Any]) -> str:
        if not self.answered:
            return ""
        return checked_text(first_answer(record[self.target or ""]), f"the {self.target}").strip()


def find_columns(recipe: Seq2SeqRecipe, table: Dataset) -> PairReader:
    """The columns that options name, else those of known names, else the only column(s) of text. Raises UserError: a
    column does not exist, or none is found; the message lists the columns."""
    answered, texts = not recipe.predict_file, tables.text_columns(table)
    dialogue, source = recipe.dialogue_column, recipe.source_column
    target = recipe.target_column if answered else None
    if not (dialogue or source or recipe.target_column):
        source, target = _of_languages((recipe.source_lang, recipe.target_lang), answered, table)
    is_named = source is not None
    tables.check_column(table, "dialogue_column", dialogue, "list of turns")
    tables.check_column(table, "source_column", source, "text or number")
    tables.check_column(table, "target_column", target, "text or number")
    verdict = None
    if answered and not is_named:
        verdict = refuse_preferences(table, "--source_column and --target_column")
    if dialogue is None and not is_named:
        lists = (
            name
            for name in (*DIALOGUES, "content")
            if name in table.column_names and (tables.may_hold_turns(table.features[name]) or _are_lists(table, name))
        )
        dialogue = next(lists, None)
    if dialogue:
        reply = target or (tables.match_columns(REPLIES, texts) if answered else None)
        return PairReader(dialogue, None, reply, verdict=verdict, answered=answered)
    context = None
    if source is None and target is None:
        known: list[tuple[str, ...]] = [pair if answered else pair[:1] for pair in SOURCES_AND_TARGETS]
        if answered and (columns := question_answering_columns(table)):
            source, target, context = columns
        elif not answered and {"question", "context"} <= set(texts):
            source, context = "question", "context"
        else:
            # The question of an instruction is in another column than `input`; options can still name the columns.
            known = [pair for pair in known if pair[0] != "input" or "instruction" not in texts]
            values = [name for name in table.column_names if tables.holds_values(table, name)]
            source, target = (*(tables.match_columns(known, values) or ()), None, None)[:2]
    of_known = set(chain.from_iterable(SOURCES_AND_TARGETS))  # of which each may hold numbers
    texts = [name for name in texts if name in of_known or name in tables.worded_columns(table)]
    if (source is None or target is None) and answered and len(texts) == 2:
        for name in () if source or target else texts:
            tables.check_name(name, "source_column and --target_column")
        texts.sort(key=lambda name: bool({name, name.removesuffix("s")} & TARGETS))  # else in the file's order
        source = source or next(name for name in texts if name != target)
        target = target or next(name for name in texts if name != source)
    if source is None and not answered and len(texts) == 1:
        source = texts[0]
    if source is None or (answered and target is None):
        others = [name for name in table.column_names if name in of_known and not tables.holds_values(table, name)]
        what = f" ({' and '.join(others)}: no text each, but lists or objects)" if others else ""
        raise UserError(f"no pairs{what}: name --source_column and --target_column; {tables.columns_present(table)}")
    return PairReader(None, source, target, context, verdict, answered)


def _are_lists(table: Dataset, name: str) -> bool:
    """Return whether the texts of a column are those of lists, as pandas writes lists in a .csv file."""
    first = [text for text in table[name][: tables.LOOKED_AT] if not blank(text)]
    return bool(first) and all(re.match(r"""\s*\[\s*['"{\[]""", text) for text in first)


LANGUAGE = re.compile(r"[a-z]{2}([-_][A-Za-z]+)?|[a-z]{3}_[A-Z][a-z]{3}")  # en, en_XX, zh-CN, eng_Latn


def _of_languages(
    languages: tuple[str | None, str | None], answered: bool, table: Dataset
) -> tuple[str | None, str | None]:
    """The columns of source_lang and target_lang, where texts stand in a column for each language (as those of wmt).
    Raises UserError: columns are named after languages, and it is unclear which belongs to which option."""
    given = [code for code in languages if code]
    columns = [
        name for name in tables.text_columns(table) if (LANGUAGE.fullmatch(name) and name != "id") or name in given
    ]
    if not given or len(columns) < 1 + answered:
        return None, None
    found = [column_of(code, columns) for code in languages]
    if len(columns) == 2 and found.count(None) == 1 and None in languages:
        (other,) = {*columns} - {*found}
        found = [column or other for column in found]
    source, target = found if answered else (found[0], None)
    if answered and (source is None or target in (None, source)):
        raise UserError(
            f"the columns {', '.join(columns)} are named after languages, and it is unclear which of them are the "
            f"languages {' and '.join(given)}: name --source_column and --target_column"
        )
    return source, target


def column_of(code: str | None, columns: list[str]) -> str | None:
    """The column of a language: en of en, en_XX and eng_Latn, where only one can be meant."""
    if code is None:
        return None
    for same in (
        lambda name: name == code,
        lambda name: re.split("[-_]", name.lower())[0] == re.split("[-_]", code.lower())[0],
        lambda name: name[:2].lower() == code[:2].lower(),
    ):
        if found := [name for name in columns if same(name)]:
            return found[0] if len(found) == 1 else None
    return None
