"""Pairs of answers to one prompt, the chosen one and the rejected one: from records to token ids, for DPO and its kin.

Records as people have them: `prompt` (or `question`, `instruction` with `input`, `conversations`) beside `chosen` and
`rejected`, each of these a text, a turn or the turns of a whole conversation; or whole conversations without a prompt;
or texts with "Human:" and "Assistant:" in front of each turn.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

from zerofit.data.chat.instructions import (
    KINDS,
    Form,
    FormOptions,
    check_order,
    form_of,
    given_columns,
    given_in,
    turns_in,
)
from zerofit.data.chat.prepare import ChatEncoder, read_chats, show, truncation_notes, unread_note
from zerofit.data.options import PARTS, DataOptions
from zerofit.data.pack import DatasetStats, Documents, Sample, TextData
from zerofit.data.records import BadRecord, Part
from zerofit.data.sources import Source
from zerofit.data.tables import columns_present, holds_lists
from zerofit.data.token_tables import IDS
from zerofit.data.turns import MASKED, TRAINED, placeholders_of, refuse_placeholders
from zerofit.model.chat import Conversation, Message, unread_keys
from zerofit.recipe.errors import UserError

CHOSEN, REJECTED = "chosen", "rejected"
SPOKEN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")
TABLE = Features(
    {"input_ids": IDS, "labels": IDS, "rejected_ids": IDS, "rejected_labels": IDS,
     "truncated": Value("int32"), "trained": Value("int32"), "is_cut": Value("bool"), "unread": Value("string")}
)  # fmt: skip
Pair = tuple[Conversation, Conversation]


@dataclass(frozen=True)
class PreferenceForm:
    """How the pairs of a table are read.

    Args:
        prompt: how its prompts are read; None: both answers are whole conversations.
        system_prompt: for conversations without one.
        plain: prompt and answers are texts, which can be concatenated without a template.
        given: the columns of what a template takes beside the messages, such as tools.
        media: the columns of pictures and the like, which go into a text at a placeholder.
    """

    prompt: Form | None
    system_prompt: str | None
    plain: bool
    given: tuple[str, ...] = ()
    media: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        return [*(self.prompt.columns if self.prompt else ()), CHOSEN, REJECTED, *self.given]

    @property
    def describe(self) -> str:
        """For the log."""
        return (
            f"data      each record is a pair of answers, of which the first is preferred ({', '.join(self.columns)})"
        )

    def texts(self, content: Pair) -> Iterator[str]:
        return (message["content"] for conversation in content for message in conversation)

    def read(self, record: dict[str, Any]) -> Pair:
        """The two conversations of a record; only what is not common to both is compared.

        Raises:
            BadRecord: a text is empty, a role is out of order, there is no prompt, or both answers are the same.
        """
        chosen, rejected = (self._conversation(record, column) for column in (CHOSEN, REJECTED))
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected)))
        if common == max(len(chosen), len(rejected)):
            raise BadRecord("its two answers are the same")
        given, pair = given_in(record, self.given), []
        for conversation in (chosen, rejected):
            refuse_placeholders([turn["content"] for turn in conversation], self.media)
            turns = [
                {**turn, "trained": False} if place < common and turn["role"] == "assistant" else turn
                for place, turn in enumerate(conversation)
            ]
            answers = [turn for turn in turns if turn["role"] == "assistant"]
            kept = [turn for turn in answers if turn.get("trained", True)]
            if kept and all(turn.get("masked") for turn in kept):
                raise BadRecord(f"nothing is compared: all answers are masked ({', '.join((*TRAINED, *MASKED))})")
            pair.append(Conversation(turns, given))
        return pair[0], pair[1]

    def _conversation(self, record: dict[str, Any], column: str) -> list[Message]:
        value = record[column]
        if isinstance(value, dict) and not any(isinstance(each, list) for each in value.values()):
            value = [value]  # one turn
        spoken = [] if self.prompt or not isinstance(value, str) else _spoken(value)
        turns = spoken or turns_in(value, "assistant", column)
        if turns and turns[0]["role"] != "assistant":  # a whole conversation
            begins = [] if turns[0]["role"] == "system" or not self.system_prompt else [self._system()]
        elif self.prompt is None:
            raise BadRecord(f"its {column} is an answer without a prompt (a column prompt, question or instruction)")
        else:
            begins = self.prompt.read(record)
        conversation = [{name: turn[name] for name in turn if name != "trained"} for turn in (*begins, *turns)]
        check_order(conversation)
        return conversation

    def _system(self) -> Message:
        return {"role": "system", "content": self.system_prompt}


def _spoken(text: str) -> list[Message]:
    """The turns of a text that has "Human:" and "Assistant:" in front of each; none of another text."""
    before, *parts = SPOKEN.split(text)
    if before.strip() or "Human" not in parts[::2]:
        return []
    names, texts = parts[::2], parts[1::2]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [turn for name, said in zip(names, texts) for turn in turns_in(said.strip(), roles[name], f"{name}'s turn")]


def find_preferences(options: FormOptions, table: Dataset) -> PreferenceForm:
    """Raises UserError: the columns do not exist."""
    if missing := [name for name in (CHOSEN, REJECTED) if name not in table.column_names]:
        raise UserError(
            f"preference_loss: the records have no column {' and no column '.join(missing)}. It reads the columns "
            f"chosen and rejected, two answers to a prompt; {columns_present(table)}"
        )
    unanswered = replace(options, answered=False)
    prompt = next(filter(None, (form_of(kind, unanswered, table) for kind in KINDS)), None)
    if prompt is not None:
        prompt = replace(prompt, answered=False)
    lists = any(
        holds_lists(table.features[name]) or isinstance(table.features[name], dict) for name in (CHOSEN, REJECTED)
    )
    plain = not lists and prompt is not None and prompt.plain
    return PreferenceForm(prompt, options.system_prompt, plain, given_columns(table), placeholders_of(table))


# ------------------------------------------------------------------------------------------------------------- samples


class PreferencePairs:
    """Pairs of answers with their labels, one pair a sample; the collator pads them.

    Args:
        table: of TABLE; all ids of a pair are empty where it is skipped.

    Attributes:
        reference: (pairs, 2) fp32 log-probabilities of the answers before training; zeros where the loss needs none.
        key: what the pairs depend on.
    """

    def __init__(self, table: Dataset):
        names = ("input_ids", "labels", "rejected_ids", "rejected_labels")
        self.columns = {name: Documents(table, name) for name in names}
        self.key: str = table._fingerprint
        lengths = [self.columns[name].lengths for name in ("input_ids", "rejected_ids")]
        self.rows = np.flatnonzero(lengths[0])
        self.lengths = self.sort_key = np.maximum(*lengths)[self.rows]
        self.reference = np.zeros((len(self.rows), 2), dtype=np.float32)
        numbers = table.select_columns(["truncated", "trained"]).with_format("numpy")
        truncated, trained = (int(numbers[name][:].sum()) for name in ("truncated", "trained"))
        self.stats = DatasetStats(
            documents=len(table),
            tokens=sum(map(int, map(np.sum, lengths))) + truncated,
            samples=len(self.rows),
            truncated=truncated,
            trained=trained,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = int(self.rows[index])
        sample = {name: column.row(row) for name, column in self.columns.items()}
        return {**sample, "reference": self.reference[index]}


def prepare_preferences(
    options: DataOptions,
    config: Any,
    source: Source,
    forms: dict[str, PreferenceForm],
    block_size: int,
    chat_template: str | None,
) -> TextData:
    """Check, split, render and tokenise pairs of answers.

    Args:
        config: the model's.
        forms: the form of the records of each part.

    Raises:
        UserError: a record that cannot be used; no template, or one that fails; no answer is left.
    """
    parts, encoder, notes = read_chats(
        options, config, source, forms, block_size, chat_template, train_on_prompt=False
    )
    tokenizer, template, first_of = encoder.tokenizer, encoder.template, next(iter(parts))
    sets: dict[str, PreferencePairs] = {}
    unread: list[str] = []
    for name, part in parts.items():
        table = part.encode(_encoder_of(part, encoder), TABLE, ("preferences", *encoder.key), options.cache)
        notes += truncation_notes(options.allow_data_loss, config, table, name, block_size)
        sets[name] = PreferencePairs(table)
        unread += (key for keys in table["unread"] for key in keys.split())
    notes += unread_note(encoder.unread_columns, unread)
    sample = sets[first_of][0]
    shown = show(sample, tokenizer, template, PARTS[first_of])
    rejected = {"input_ids": sample["rejected_ids"], "labels": sample["rejected_labels"]}
    shown += ["sample    the same with the rejected answer:", *show(rejected, tokenizer, template)[1:]]
    return TextData(sets.get("train"), sets.get("validation"), tokenizer, block_size, notes, shown, is_chat=True)


def _encoder_of(part: Part, encoder: ChatEncoder) -> Any:
    def encode(pairs: list[Pair], places: list[int]) -> dict[str, list[Any]]:
        where = [f"{part.where}, record {part.numbers[place] + 1}" for place in places]
        rendered = [[encoder.render(pair[side], name) for pair, name in zip(pairs, where)] for side in (0, 1)]
        unread = [
            [unread_keys(encoder.tokenizer, pair[side], text) for pair, (text, *_) in zip(pairs, rendered[side])]
            for side in (0, 1)
        ]
        chosen, rejected = map(encoder.encode, rendered)
        for row, (left, right) in enumerate(zip(chosen["trained"], rejected["trained"])):
            if not (left and right):  # nothing is left of one of them, and so nothing to compare
                for each in (chosen, rejected):
                    lost = len(each["input_ids"][row])
                    each["input_ids"][row] = each["labels"][row] = np.zeros(0, dtype=np.int64)
                    each["trained"][row], each["is_cut"][row] = 0, False
                    each["truncated"][row] += lost
        return {
            "input_ids": chosen["input_ids"],
            "labels": chosen["labels"],
            "rejected_ids": rejected["input_ids"],
            "rejected_labels": rejected["labels"],
            "truncated": [sum(both) for both in zip(chosen["truncated"], rejected["truncated"])],
            "trained": [sum(both) for both in zip(chosen["trained"], rejected["trained"])],
            "is_cut": [any(both) for both in zip(chosen["is_cut"], rejected["is_cut"])],
            "unread": [" ".join(sorted({*left, *right})) for left, right in zip(*unread)],
        }

    return encode
