"""Pairs of answers to one prompt, the chosen one and the rejected one, for DPO and its kin: how they are read.

Records as people have them: `prompt` (or `question`, `instruction` with `input`, `conversations`) beside `chosen` and
`rejected`, each of these a text, a turn or the turns of a whole conversation; or whole conversations without a prompt.
Prompts and conversations may be texts with "Human:" and "Assistant:" in front of each turn.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from datasets import Dataset

from zerofit.data.chat.instructions import (
    Form,
    check_order,
    first_form,
    given_columns,
    given_in,
    holds_turns,
    spoken,
    turns_in,
)
from zerofit.data.records import BadRecord
from zerofit.data.tables import columns_present
from zerofit.data.turns import MASKS
from zerofit.model.chat import Conversation, Message
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import ClmRecipe

CHOSEN, REJECTED = "chosen", "rejected"
Pair = tuple[Conversation, Conversation]


@dataclass(frozen=True)
class PreferenceForm:
    """The columns from which the pairs of a table are read."""

    prompt: Form | None  # how its prompts are read; None: both answers are whole conversations
    system_prompt: str | None  # for conversations without one
    plain: bool  # prompt and answers are texts, which can be concatenated without a template
    given: tuple[str, ...] = ()  # the columns of what a template takes beside the messages, such as tools

    @property
    def columns(self) -> list[str]:
        return [*(self.prompt.columns if self.prompt else ()), CHOSEN, REJECTED, *self.given]

    @property
    def describe(self) -> str:
        """Describe the columns of the pairs, for the log."""
        return (
            f"data      each record is a pair of answers, of which the first is preferred ({', '.join(self.columns)})"
        )

    def texts(self, content: Pair) -> Iterator[str]:
        return (message["content"] for conversation in content for message in conversation)

    def read(self, record: dict[str, Any]) -> Pair:
        """The two conversations of a record; only what is not common to both is compared. Raises BadRecord: a text is
        empty, a role is out of order, there is no prompt, the prompts differ, or both answers are the same."""
        chosen, rejected = (self._conversation(record, column) for column in (CHOSEN, REJECTED))
        common = sum(1 for _ in takewhile(lambda pair: _is_same(*pair), zip(chosen, rejected)))
        if common == min(len(chosen), len(rejected)):
            same = "its two answers are the same"
            raise BadRecord(same if len(chosen) == len(rejected) else "one conversation is the beginning of the other")
        if (role := chosen[common]["role"]) != "assistant":
            raise BadRecord(f"turn {common + 1}, the {role}'s, differs: both answers must be to one prompt")
        given, pair = given_in(record, self.given), []
        for conversation in (chosen, rejected):
            turns = [
                {**turn, "trained": False} if place < common and turn["role"] == "assistant" else turn
                for place, turn in enumerate(conversation)
            ]
            answers = [turn for turn in turns if turn["role"] == "assistant"]
            kept = [turn for turn in answers if turn.get("trained", True)]
            if kept and all(turn.get("masked") for turn in kept):
                raise BadRecord(f"nothing is compared: all answers are masked ({', '.join(MASKS)})")
            pair.append(Conversation(turns, given))
        return pair[0], pair[1]

    def _conversation(self, record: dict[str, Any], column: str) -> list[Message]:
        value = record[column]
        if isinstance(value, dict) and not any(isinstance(each, list) for each in value.values()):
            value = [value]  # one turn
        is_spoken = self.prompt is None or self.prompt.spoken
        turns = turns_in(spoken(value) if is_spoken else value, "assistant", column)
        if turns and turns[0]["role"] != "assistant":  # a whole conversation
            begins = [] if turns[0]["role"] == "system" else self._system(record)
        elif self.prompt is None:
            raise BadRecord(f"its {column} is an answer without a prompt (a column prompt, question or instruction)")
        else:
            begins = self.prompt.read(record)
        conversation = [{name: turn[name] for name in turn if name != "trained"} for turn in (*begins, *turns)]
        check_order(conversation)
        return conversation

    def _system(self, record: dict[str, Any]) -> list[Message]:
        """The system's turn of a record whose answers are whole conversations without one."""
        if self.prompt is not None:
            with contextlib.suppress(BadRecord):  # the rest of its prompt is not needed
                return [turn for turn in self.prompt.read(record)[:1] if turn["role"] == "system"]
        return [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []


def _is_same(one: Message, other: Message) -> bool:
    """Return whether turns are the same; keys beside the text, such as an id, count in answers alone."""
    return one == other or (one["role"] != "assistant" and all(one[key] == other[key] for key in ("role", "content")))


def find_preferences(recipe: ClmRecipe, table: Dataset) -> PreferenceForm:
    """Raises UserError: the columns do not exist."""
    if missing := [name for name in (CHOSEN, REJECTED) if name not in table.column_names]:
        raise UserError(
            f"preference_loss: the records have no column {' and no column '.join(missing)}. It reads the columns "
            f"chosen and rejected, two answers to a prompt; {columns_present(table)}"
        )
    prompt = first_form(recipe, table, answered=False)
    plain = not any(holds_turns(table, name) for name in (CHOSEN, REJECTED)) and prompt is not None and prompt.plain
    return PreferenceForm(prompt, recipe.system_prompt, plain, given_columns(table))
