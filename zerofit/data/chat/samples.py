"""Instructions, chats and pairs of answers for the causal task: from records to token ids with labels for the answers,
and to samples, a row each or several in a block. A conversation is never split over two blocks.

Pairs of answers to one prompt, for DPO and its kin, as people have them: `prompt` (or `question`, `instruction` with
`input`, `conversations`) besides `chosen` and `rejected`, each of these a text, a turn or the turns of a whole
conversation; or whole conversations without a prompt. Prompts and conversations may be texts with "Human:" and
"Assistant:" in front of each turn.
"""

import contextlib
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerofit.data.chat.instructions import (
    MASK_KEYS,
    RecordForm,
    check_order,
    first_form,
    holds_turns,
    split_turns,
    template_columns,
    template_values,
    turns_in,
)
from zerofit.data.lengths import report_data_loss
from zerofit.data.options import PART_NAMES, DataOptions
from zerofit.data.pack import DatasetStats, Documents, Sample, SampleSet, TextData
from zerofit.data.records import BadRecord, read_parts
from zerofit.data.sources import Source
from zerofit.data.tables import TOKEN_IDS, Columns, list_columns, table_key, texts_of, tokenizer_hash, with_class_names
from zerofit.model import chat
from zerofit.model.loss import IGNORE
from zerofit.model.tokenizer import get_tokenizer, padding_token
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import counted
from zerofit.recipe.tasks import ClmRecipe

CHOSEN = "chosen"
REJECTED = "rejected"
ConversationPair = tuple[chat.Conversation, chat.Conversation]
CHAT_TABLE = Features(
    {
        "input_ids": TOKEN_IDS,
        "labels": TOKEN_IDS,
        "truncated": Value("int32"),
        "trained": Value("int32"),
        "is_cut": Value("bool"),
        "unread": Value("string"),
    }
)
PREFERENCE_TABLE = Features({**CHAT_TABLE, "rejected_ids": TOKEN_IDS, "rejected_labels": TOKEN_IDS})
Rendered = tuple[str, list[chat.Span], list[chat.Span]]  # text, answers, and what is never trained on
NUM_SEARCHED_TEXTS = 1000  # texts that are searched for what the template writes
# How much of a sample is shown: runs of trained or other tokens, and characters at each end of a run.
SHOWN_RUNS = 6
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class PreferenceForm:
    """The columns from which the pairs of a table are read."""

    prompt: RecordForm | None  # how its prompts are read; None: both answers are whole conversations
    system_prompt: str | None  # for conversations without one
    plain: bool  # prompt and answers are texts, which can be concatenated without a template
    given: tuple[str, ...] = ()  # the columns that a template takes besides the messages, such as tools

    @property
    def columns(self) -> list[str]:
        return [*(self.prompt.columns if self.prompt else ()), CHOSEN, REJECTED, *self.given]

    @property
    def describe(self) -> str:
        return (
            f"data      each record is a pair of answers, of which the first is preferred ({', '.join(self.columns)})"
        )

    def texts(self, content: ConversationPair) -> Iterator[str]:
        return (message["content"] for conversation in content for message in conversation)

    def read(self, record: dict[str, Any]) -> ConversationPair:
        """Return the two conversations of a record; only what is not common to both is compared. Raises BadRecord: a
        text is empty, a role is out of order, there is no prompt, the prompts differ, or both answers are the same."""
        chosen, rejected = (self._conversation(record, column) for column in (CHOSEN, REJECTED))
        common = 0
        for first, second in zip(chosen, rejected):
            same_text = all(first[key] == second[key] for key in ("role", "content"))
            if first != second and (first["role"] == "assistant" or not same_text):  # in answers other keys count, too
                break
            common += 1
        if common == min(len(chosen), len(rejected)):
            reason = "its two answers are the same"
            raise BadRecord(
                reason if len(chosen) == len(rejected) else "one conversation is the beginning of the other"
            )
        if (role := chosen[common]["role"]) != "assistant":
            raise BadRecord(f"turn {common + 1}, the {role}'s, differs: both answers must be to one prompt")
        values = template_values(record, self.given)
        pair = []
        for conversation in (chosen, rejected):
            before = conversation[:common]
            after = conversation[common:]
            if all(turn.get("masked") for turn in after if turn["role"] == "assistant"):
                raise BadRecord(f"nothing is compared: all answers are masked ({', '.join(MASK_KEYS)})")
            before = [{**turn, "trained": False} if turn["role"] == "assistant" else turn for turn in before]
            pair.append(chat.Conversation([*before, *after], values))
        return pair[0], pair[1]

    def _conversation(self, record: dict[str, Any], column: str) -> list[chat.Message]:
        value = record[column]
        if isinstance(value, dict) and not any(isinstance(each, list) for each in value.values()):
            value = [value]  # one turn
        is_spoken = self.prompt is None or self.prompt.spoken
        turns = turns_in(split_turns(value) if is_spoken else value, "assistant", column)
        if turns and turns[0]["role"] == "system":
            beginning = []
        elif turns and turns[0]["role"] != "assistant":  # a whole conversation, except for the system's turn
            beginning = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            if self.prompt is not None:
                with contextlib.suppress(BadRecord):  # the rest of its prompt is not needed
                    beginning = [turn for turn in self.prompt.read(record)[:1] if turn["role"] == "system"]
        elif self.prompt is None:
            raise BadRecord(f"its {column} is an answer without a prompt (a column prompt, question or instruction)")
        else:
            beginning = self.prompt.read(record)
        conversation = [{name: turn[name] for name in turn if name != "trained"} for turn in (*beginning, *turns)]
        check_order(conversation)
        return conversation


def find_preferences(recipe: ClmRecipe, table: Dataset) -> PreferenceForm:
    """Return the columns of preference pairs. Raises UserError: the columns do not exist."""
    if missing := [name for name in (CHOSEN, REJECTED) if name not in table.column_names]:
        raise UserError(
            f"preference_loss: the records have no column {' and no column '.join(missing)}. It reads the columns "
            f"chosen and rejected, two answers to a prompt; {list_columns(table)}"
        )
    prompt = first_form(recipe, table, answered=False)
    plain = not any(holds_turns(table, name) for name in (CHOSEN, REJECTED)) and prompt is not None and prompt.plain
    return PreferenceForm(prompt, recipe.system_prompt, plain, template_columns(table))


def prepare_chat(
    recipe: ClmRecipe,
    options: DataOptions,
    config: PretrainedConfig,
    source: Source,
    forms: Mapping[str, RecordForm | PreferenceForm],
    *,
    block_size: int,
) -> TextData:
    """Check, split, render, tokenise and pack conversations, or pairs of answers. Raises UserError: a record that
    cannot be used; no template, or one that fails; no answer is left. `config`: the model's. `forms`: the form of the
    records of each part; they may differ."""
    form = next(iter(forms.values()))
    compares = isinstance(form, PreferenceForm)
    named = {name: with_class_names(table, [texts_of(forms[name].columns)]) for name, table in source.parts.items()}
    parts, notes = read_parts(replace(source, parts=named), dict(forms), options)  # names of classes are texts, too
    parts = options.limited(parts)
    first_part, first = next(iter(parts.items()))
    tokenizer = get_tokenizer(recipe, config, first.texts, f"{table_key(first.table)} {form}")
    template, note = chat.install_template(tokenizer, recipe.chat_template, "none" if form.plain else None)
    notes = [note, form.describe, *notes, *chat.warn_of_missing_end_token(tokenizer, template)]
    notes += chat.warn_of_repeated_prompt(tokenizer, template, islice(first.texts(), NUM_SEARCHED_TEXTS))
    encoder = ChatEncoder(tokenizer, template, block_size, recipe.train_on_prompt and not compares)
    encode, features = (encode_pairs, PREFERENCE_TABLE) if compares else (encode_conversations, CHAT_TABLE)
    sets: dict[str, Conversations] = {}
    unread: list[str] = []
    for name, part in parts.items():
        table = part.encode(partial(encode, encoder), features, encoder.key, options.cache)
        notes += chat_truncation_notes(recipe.allow_data_loss, config, table, name, block_size)
        sets[name] = (PreferencePairs if compares else Conversations)(table)
        unread += (key for keys in table["unread"] for key in keys.split())
    columns = dict.fromkeys(name for table in source.parts.values() for name in table.column_names)
    read = {name for form in forms.values() for name in form.columns}
    notes += unread_note([name for name in columns if name not in read], unread)
    sample = sets[first_part][0]
    lines = show_sample(sample, tokenizer, template, PART_NAMES[first_part])
    if compares:
        rejected = {"input_ids": sample["rejected_ids"], "labels": sample["rejected_labels"]}
        lines += ["sample    the same with the rejected answer:", *show_sample(rejected, tokenizer, template)[1:]]
    packed: dict[str, SampleSet] = dict(sets)
    if not compares and recipe.packing != "none":
        filler = padding_token(tokenizer)
        packed = {name: PackedConversations(conversations, block_size, filler) for name, conversations in sets.items()}
    data = TextData(train=packed.get("train"), tokenizer=tokenizer, block_size=block_size, notes=notes, is_chat=True)
    return replace(data, validation=packed.get("validation"), shown=lines)


def unread_note(columns: list[str], keys: Iterable[str]) -> list[str]:
    """Return a note for the log about columns and keys of turns that are not read. `keys`: once per record with it."""
    counted_keys = [f"{key} ({counted(count, 'record')})" for key, count in sorted(Counter(keys).items())]
    lists = [f"{noun} {', '.join(names)}" for noun, names in (("columns", columns), ("keys", counted_keys)) if names]
    return [f"note      not read: {'; '.join(lists)}"] if lists else []


class ChatEncoder:
    """Conversations -> token ids, with a label for each that is trained on.

    A conversation is tokenized as one text, as in generation. A token is trained on if any of its characters is: if
    one token has the prompt's last space and the answer's first word, the model must generate both.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, block_size: int, train_on_prompt: bool):
        if not tokenizer.is_fast:
            raise UserError(f"{tokenizer.name_or_path!r} has no tokenizer.json, which chats need: set tokenizer_name")
        self.tokenizer = tokenizer
        self.template = template
        self.block_size = block_size
        self.train_on_prompt = train_on_prompt
        code = sha256(Path(chat.__file__).read_bytes()).hexdigest()
        special = sorted(tokenizer.special_tokens_map.items())
        self.key = (tokenizer_hash(tokenizer), special, tokenizer.chat_template, block_size, train_on_prompt, code)

    def render(self, messages: list[chat.Message], where: str) -> Rendered:
        """Return the text of a conversation, the answers in it, and those that are never trained on. Raises UserError
        if the template fails on it."""
        try:
            text, spans = chat.render(self.tokenizer, messages)
            if not (self.train_on_prompt and any(message.get("masked") for message in messages)):
                return text, spans, []
            inverted = [{**turn, "trained": turn.get("masked", False), "masked": False} for turn in messages]
            _, excluded = chat.render(self.tokenizer, chat.Conversation(inverted, getattr(messages, "given", {})))
            return text, spans, excluded
        except chat.BadTemplate as bad:
            raise UserError(f"{where}: {self.template} fails on it: {bad}") from None

    def encode(self, rendered: list[Rendered]) -> dict[str, list[Any]]:
        """Return the columns of CHAT_TABLE except `unread`. A row without trained tokens in block_size is empty."""
        rows: dict[str, list[Any]] = {name: [] for name in CHAT_TABLE if name != "unread"}
        settings = {"add_special_tokens": False, "return_offsets_mapping": True, "return_attention_mask": False}
        encoded = self.tokenizer([text for text, *_ in rendered], **settings, verbose=False)
        for row, (_, spans, excluded) in enumerate(rendered):
            ids = np.array(encoded["input_ids"][row])
            answer = overlap(encoded["offset_mapping"][row], spans)
            trained = ~overlap(encoded["offset_mapping"][row], excluded) if self.train_on_prompt else answer.copy()
            trained[0] = False  # no token predicts the first one
            count = int(trained[: self.block_size].sum())
            length = min(len(ids), self.block_size) if count else 0
            rows["input_ids"].append(ids[:length])
            rows["labels"].append(np.where(trained, ids, IGNORE)[:length])
            rows["truncated"].append(len(ids) - length)
            rows["trained"].append(count)
            rows["is_cut"].append(bool(count and answer[self.block_size :].any()))
        return rows


def encode_conversations(encoder: ChatEncoder, conversations: list[chat.Conversation], names: list[str]) -> Columns:
    rendered = [encoder.render(*pair) for pair in zip(conversations, names)]
    unread = [chat.unread_keys(encoder.tokenizer, each, text) for each, (text, *_) in zip(conversations, rendered)]
    return {**encoder.encode(rendered), "unread": [" ".join(keys) for keys in unread]}


def encode_pairs(encoder: ChatEncoder, pairs: list[ConversationPair], names: list[str]) -> dict[str, list[Any]]:
    """Return the columns of PREFERENCE_TABLE. If one answer of a pair has no trained token within block_size, the pair
    has no tokens: there is nothing to compare."""
    chosen, rejected = (encode_conversations(encoder, list(side), names) for side in zip(*pairs))
    for row, trained in enumerate(zip(chosen["trained"], rejected["trained"])):
        for side in (chosen, rejected) if not all(trained) else ():
            side["truncated"][row] += len(side["input_ids"][row])
            side["input_ids"][row] = side["labels"][row] = np.zeros(0, dtype=np.int64)
            side["trained"][row] = 0
            side["is_cut"][row] = False
    both = {name: list(zip(chosen[name], rejected[name])) for name in ("truncated", "trained", "is_cut", "unread")}
    return {
        "input_ids": chosen["input_ids"],
        "labels": chosen["labels"],
        "rejected_ids": rejected["input_ids"],
        "rejected_labels": rejected["labels"],
        "truncated": list(map(sum, both["truncated"])),
        "trained": list(map(sum, both["trained"])),
        "is_cut": list(map(any, both["is_cut"])),
        "unread": [" ".join(sorted({*" ".join(keys).split()})) for keys in both["unread"]],
    }


def overlap(offsets: list[chat.Span], spans: list[chat.Span]) -> np.ndarray:
    """Return (tokens,) whether a token has a character in one of the spans.

    If a character takes several tokens, each of them has that character's range.
    """
    starts, stops = np.array(offsets).reshape(-1, 2).T
    covered = np.zeros(len(starts), dtype=bool)
    for begin, end in spans:
        covered |= (starts < end) & (stops > begin)
    return covered


class Conversations:
    """Conversations with their labels, one per sample; the collator pads them. `table`: columns of token ids, which
    are all empty for a skipped record; truncated, the number of tokens cut from each; trained, the number of labels
    that are trained on."""

    def __init__(self, table: Dataset, columns: tuple[str, ...] = ("input_ids", "labels")):
        self.columns = {name: Documents(table, name) for name in columns}
        lengths = [column.lengths for name, column in self.columns.items() if name.endswith("_ids")]
        self.rows = np.flatnonzero(lengths[0])
        self.lengths = self.sort_key = np.maximum.reduce(lengths)[self.rows]
        numbers = table.select_columns(["truncated", "trained"]).with_format("numpy")
        truncated, trained = (int(numbers[name][:].sum()) for name in ("truncated", "trained"))
        num_tokens = int(np.sum(lengths))
        self.stats = DatasetStats(
            documents=len(table),
            tokens=num_tokens + truncated,
            samples=len(self),
            truncated=truncated,
            trained=trained,
            padding=1 - num_tokens / (len(self) * int(self.lengths.max())),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = int(self.rows[index])
        return {name: column.row(row) for name, column in self.columns.items()}


class PreferencePairs(Conversations):
    """Pairs of answers with their labels, one pair a sample; the collator pads them.

    Args:
        table: with the columns of PREFERENCE_TABLE; all ids of a pair are empty where it is skipped.
    """

    def __init__(self, table: Dataset):
        super().__init__(table, ("input_ids", "labels", "rejected_ids", "rejected_labels"))
        self.key = table_key(table)  # the table's fingerprint: pairs are made again when it changes
        # (pairs, 2) log-probabilities of the answers before training; zeros where the loss needs none
        self.reference = np.zeros((len(self.rows), 2), dtype=np.float32)
        self.stats = replace(self.stats, padding=None)  # it depends on the batches

    def __getitem__(self, index: int) -> Sample:
        return {**super().__getitem__(index), "reference": self.reference[index]}


class PackedConversations:
    """Blocks of block_size tokens, each with as many complete conversations as fit, filled up with masked tokens.

    None is split: the second half of an answer teaches nothing without its question. position_ids restart at each
    conversation and at the filling, which keeps attention inside each.
    """

    def __init__(self, conversations: Conversations, block_size: int, filler: int):
        self.conversations = conversations
        self.block_size = block_size
        self.filler = filler
        self.lengths = self.sort_key = None
        self.blocks = best_fit(conversations.lengths, block_size)
        kept = int(conversations.lengths.sum())
        padding = 1 - kept / (len(self.blocks) * block_size)
        self.stats = replace(conversations.stats, samples=len(self.blocks), padding=padding)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Sample:
        samples = [self.conversations[member] for member in self.blocks[index]]
        lengths = [len(sample["input_ids"]) for sample in samples]
        missing = self.block_size - sum(lengths)
        return {
            "input_ids": np.concatenate([*(sample["input_ids"] for sample in samples), np.full(missing, self.filler)]),
            "labels": np.concatenate([*(sample["labels"] for sample in samples), np.full(missing, IGNORE)]),
            "position_ids": np.concatenate([np.arange(length) for length in (*lengths, missing)]),
            "num_tokens": np.array(sum(lengths)),
        }


def best_fit(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Pack by best fit decreasing: the indices in each block, no block longer than `size`.

    Each length in turn, the longest first, goes into the block that it fills up best. That takes at most 11/9 of the
    fewest blocks possible, plus four (Johnson et al. 1974, doi:10.1137/0203025), and is the same every time.
    """
    blocks: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # tokens of room: the blocks that have as many
    rooms: list[int] = []  # the keys of with_room, sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            block = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            room = size
            block = len(blocks)
            blocks.append([])
        blocks[block].append(index)
        remaining = room - length
        if remaining and remaining not in with_room:
            with_room[remaining] = []
            insort(rooms, remaining)
        if remaining:
            with_room[remaining].append(block)
    return blocks


def chat_truncation_notes(
    allow_data_loss: bool, config: PretrainedConfig, table: Dataset, part: str, block_size: int
) -> list[str]:
    """Return log lines about answers that are longer than block_size. Raises UserError if none is left, or too few."""
    columns = table.select_columns(["truncated", "trained", "is_cut"]).with_format("numpy")[:]
    skipped = int((columns["trained"] == 0).sum())
    cut = int(columns["is_cut"].sum())
    if skipped == len(table):
        longest = columns["truncated"].max(initial=0)
        raise UserError(f"block_size = {block_size}: no answer lies within it. Choose up to {longest:,}")
    samples = f"{PART_NAMES[part]} samples"
    beyond = f"block_size = {block_size} tokens"
    lengths = Documents(table).lengths + columns["truncated"]
    notes = []
    for lost, what in (
        (skipped, f"{samples} are skipped: their answer lies beyond {beyond}"),
        (cut, f"{samples} have their answer cut at {beyond}"),
    ):
        notes += report_data_loss(allow_data_loss, lost, len(table), what, lengths, option="block_size", config=config)
    return notes


def show_sample(
    sample: dict[str, np.ndarray], tokenizer: PreTrainedTokenizerBase, template: str, part: str = "training"
) -> list[str]:
    """Return the first runs of a sample as text, with marks around what is trained on (held out: predicted)."""
    trained = sample["labels"] != IGNORE
    ends = [*(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(trained)]
    so_far = ""
    text = ""
    for end in ends[:SHOWN_RUNS]:
        decoded = str(tokenizer.decode(sample["input_ids"][:end], clean_up_tokenization_spaces=False))
        run = decoded[len(so_far) :]
        run = f"{run[:SHOWN_CHARACTERS]} […] {run[-SHOWN_CHARACTERS:]}" if len(run) > 2 * SHOWN_CHARACTERS else run
        text += f"⟦{run}⟧" if trained[end - 1] else run
        so_far = decoded
    text += " …" if len(ends) > SHOWN_RUNS else ""
    meaning = "is trained on" if part == PART_NAMES["train"] else "is predicted"
    heading = f"sample    the first {part} sample, written by {template}; the text in ⟦ ⟧ {meaning}:"
    return [heading, *("  | " + line for line in text.splitlines())]
