"""Sources and targets for encoder-decoder models: the columns that hold them, the pairs of a record, and samples.

A *pair* is what an encoder-decoder model learns from: a source text and the target that follows from it. A
conversation of n turns gives up to n - 1 pairs: each turn after the first is a reply to the turns before it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerofit.data import tables
from zerofit.data.chat.instructions import (
    ASSISTANTS,
    DIALOGUE_COLUMNS,
    MASK_KEYS,
    first_answer,
    is_blank,
    is_trained,
    optional_text,
    parse_list,
    refuse_preferences,
    refuse_rejected,
    require_text,
    turns_of,
)
from zerofit.data.chat.samples import unread_note
from zerofit.data.lengths import choose_length, report_data_loss
from zerofit.data.mixture import mix_sources, options_of_sources
from zerofit.data.options import PART_NAMES, DataOptions
from zerofit.data.pack import TaskData, TokenizedDataset
from zerofit.data.records import BadRecord, RecordSet, read_parts
from zerofit.data.sources import read_source
from zerofit.model.families import family_of
from zerofit.model.tokenizer import (
    check_marked,
    describe_languages,
    end_with_eos,
    get_tokenizer,
    language_codes,
    set_languages,
)
from zerofit.recipe.data_options import FROM_MODEL
from zerofit.recipe.errors import UserError
from zerofit.recipe.tasks import Seq2SeqRecipe

REPLY_COLUMNS = ("response", "reply", "target")
PAIR_COLUMNS = (
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
TARGET_COLUMNS = {*REPLY_COLUMNS, "label", *(target for _, target in PAIR_COLUMNS)}  # also with an s at the end
LANGUAGE = re.compile(r"[a-z]{2}([-_][A-Za-z]+)?|[a-z]{3}_[A-Z][a-z]{3}")  # en, en_XX, zh-CN, eng_Latn
SAMPLE_COLUMNS = ("input_ids", "labels")  # columns of a sample
COUNT_COLUMNS = ("truncated", "source_tokens", "target_tokens")
PAIR_TABLE = Features(
    {
        **dict.fromkeys(SAMPLE_COLUMNS, tables.TOKEN_IDS),
        "target": Value("string"),
        **dict.fromkeys(COUNT_COLUMNS, Value("int32")),
    }
)


@dataclass(frozen=True)
class TextPair:
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
    answered: bool = True  # records have a target

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.dialogue, self.source, self.context, self.target, self.verdict) if name]

    @property
    def describe(self) -> str:
        if self.dialogue is None:
            target = f", target {self.target}" if self.answered else ""
            return f"source {self.source}{f' with {self.context}' if self.context else ''}{target}"
        reply = f"reply {self.target}" if self.target else "each turn after the first is a reply"
        return f"conversations {self.dialogue}, {reply if self.answered else 'to be answered'}"

    def texts(self, content: list[TextPair]) -> Iterator[str]:
        """Yield every text once."""
        yield from content[-1].source
        yield content[-1].target

    def read(self, record: dict[str, Any]) -> list[TextPair]:
        """Read the pairs of a record. With predict_file: one pair without a target; replies at the end of the
        conversation are dropped. Raises BadRecord: there is no pair, or a text is empty."""
        if self.answered:
            refuse_rejected(record, self.verdict)
        if self.dialogue is None:
            source = require_text(record[self.source or ""], f"the {self.source}").strip()
            if self.context and (given := optional_text(record[self.context], f"its {self.context}")):
                source = f"question: {source} context: {given.strip()}".strip()
            return [TextPair([source], self._target(record))]
        value = parse_list(record[self.dialogue], f"its {self.dialogue} is") or []
        if isinstance(value, str):
            raise BadRecord(f"its {self.dialogue} is a text, and no list of turns")
        turns = turns_of(value)
        while not self.answered and turns and turns[-1].role in ASSISTANTS:
            turns.pop()
        texts = [
            require_text(turn.text, f"turn {number} of its {self.dialogue}").strip()
            for number, turn in enumerate(turns, 1)
        ]
        if not texts:
            raise BadRecord(f"a conversation without a turn: its {self.dialogue} is empty")
        if self.target is not None or not self.answered:
            return [TextPair(texts, self._target(record))]
        has_assistant = any(turn.role in ASSISTANTS for turn in turns)
        replies = [place for place in range(1, len(turns)) if not has_assistant or turns[place].role in ASSISTANTS]
        if not replies:
            raise BadRecord(f"a reply with no history: turns in its {self.dialogue}: {len(turns)}")
        where = f"of its {self.dialogue}"
        trained = [place for place in replies if is_trained(turns[place].more, f"turn {place + 1} {where}")]
        if not trained:
            raise BadRecord(f"none of its replies is trained on ({', '.join(MASK_KEYS)})")
        return [TextPair(texts[:place], texts[place]) for place in trained]

    def _target(self, record: dict[str, Any]) -> str:
        if not self.answered:
            return ""
        return require_text(first_answer(record[self.target or ""]), f"the {self.target}").strip()


def find_columns(recipe: Seq2SeqRecipe, table: Dataset) -> PairReader:
    """Find the columns: those that options name, else those with known names, else the only columns of text. Raises
    UserError: a column does not exist, or none is found; the message lists the columns."""
    answered = not recipe.predict_file
    texts = tables.text_columns(table)
    dialogue = recipe.dialogue_column
    source = recipe.source_column
    target = recipe.target_column if answered else None
    if not (dialogue or source or recipe.target_column):
        source, target = _find_language_columns((recipe.source_lang, recipe.target_lang), answered, table)
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
            for name in (*DIALOGUE_COLUMNS, "content")
            if name in table.column_names and (tables.may_hold_turns(table.features[name]) or _are_lists(table, name))
        )
        dialogue = next(lists, None)
    if dialogue:
        reply = target or (tables.match_columns(REPLY_COLUMNS, texts) if answered else None)
        return PairReader(dialogue, None, reply, verdict=verdict, answered=answered)
    context = None
    if source is None and target is None:
        pairs_to_try: list[tuple[str, ...]] = [pair if answered else pair[:1] for pair in PAIR_COLUMNS]
        of_squad = {"question", "context"} <= {*table.column_names}
        if answered and of_squad and (answers := tables.match_columns(("answers", "answer"), table.column_names)):
            source = "question"
            target = answers
            context = "context"
        elif not answered and {"question", "context"} <= set(texts):
            source = "question"
            context = "context"
        else:
            # The question of an instruction is in another column than `input`; options can still name the columns.
            pairs_to_try = [pair for pair in pairs_to_try if pair[0] != "input" or "instruction" not in texts]
            values = [name for name in table.column_names if tables.holds_values(table, name)]
            source, target = (*(tables.match_columns(pairs_to_try, values) or ()), None, None)[:2]
    known_names = set(chain.from_iterable(PAIR_COLUMNS))  # each may hold numbers
    texts = [name for name in texts if name in known_names or name in tables.word_columns(table)]
    if (source is None or target is None) and answered and len(texts) == 2:
        for name in () if source or target else texts:
            tables.check_name(name, "source_column and --target_column")
        texts.sort(key=lambda name: bool({name, name.removesuffix("s")} & TARGET_COLUMNS))  # targets last
        source = source or next(name for name in texts if name != target)
        target = target or next(name for name in texts if name != source)
    if source is None and not answered and len(texts) == 1:
        source = texts[0]
    if source is None or (answered and target is None):
        unread = [name for name in table.column_names if name in known_names and not tables.holds_values(table, name)]
        detail = f" ({' and '.join(unread)}: no text each, but lists or objects)" if unread else ""
        raise UserError(f"no pairs{detail}: name --source_column and --target_column; {tables.list_columns(table)}")
    return PairReader(None, source, target, context, verdict, answered)


def _are_lists(table: Dataset, name: str) -> bool:
    """Return whether the texts of a column are those of lists, as pandas writes lists in a .csv file."""
    first = [text for text in table[name][: tables.NUM_CHECKED_RECORDS] if not is_blank(text)]
    return bool(first) and all(re.match(r"""\s*\[\s*['"{\[]""", text) for text in first)


def _find_language_columns(
    languages: tuple[str | None, str | None], answered: bool, table: Dataset
) -> tuple[str | None, str | None]:
    """Return the columns of source_lang and target_lang, if each language has its own column (as in wmt). Raises
    UserError: columns are named after languages, and it is unclear which belongs to which option."""
    codes = [code for code in languages if code]
    columns = [
        name for name in tables.text_columns(table) if (LANGUAGE.fullmatch(name) and name != "id") or name in codes
    ]
    if not codes or len(columns) < 1 + answered:
        return None, None
    matched = [language_column(code, columns) for code in languages]
    if len(columns) == 2 and matched.count(None) == 1 and None in languages:
        (other,) = {*columns} - {*matched}
        matched = [column or other for column in matched]
    source, target = matched if answered else (matched[0], None)
    if answered and (source is None or target in (None, source)):
        raise UserError(
            f"the columns {', '.join(columns)} are named after languages, and it is unclear which of them are the "
            f"languages {' and '.join(codes)}: name --source_column and --target_column"
        )
    return source, target


def language_column(code: str | None, columns: list[str]) -> str | None:
    """Return the column of a language code: `en` matches en, en_XX and eng_Latn. None if not exactly one matches."""
    if code is None:
        return None
    for matches in (
        lambda name: name == code,
        lambda name: re.split("[-_]", name.lower())[0] == re.split("[-_]", code.lower())[0],
        lambda name: name[:2].lower() == code[:2].lower(),
    ):
        if candidates := [name for name in columns if matches(name)]:
            return candidates[0] if len(candidates) == 1 else None
    return None


@dataclass(kw_only=True)
class PairData(TaskData):
    """The data of the task of sources and targets."""

    widths: tuple[int, int]  # the longest source and target, in tokens
    targets: list[str] = field(default_factory=list)  # the full target of each held-out sample as text
    cut: int = 0  # texts of the latest evaluation that were cut at their longest length

    @property
    def longest(self) -> dict[str, int]:
        """Return the maximum number of tokens of a training sample, by column."""
        return dict(zip(("input_ids", "labels"), self.widths))


def prepare_pairs(recipe: Seq2SeqRecipe, config: PretrainedConfig) -> PairData:
    """Read, check, split and tokenise; the first process of the machine works, the others use its cache.

    The held-out part is drawn by records: no turn of a held-out conversation is trained on. Raises UserError: columns
    are not found, a text is empty, a reply has no history.
    """
    options = DataOptions.of(recipe)
    sources: dict[str, PairData] = {}
    with tables.one_process_at_a_time(options.cache):
        for name, of_source in options_of_sources(options, recipe).items():
            parts, columns, encoder, notes = open_pairs(recipe, of_source, config)
            encoded = of_source.limited(
                {
                    part: each.encode(encoder.encode, PAIR_TABLE, encoder.key, of_source.cache)
                    for part, each in parts.items()
                }
            )
            widths = encoder.widths
            sides = dict(zip(("source", "target"), widths))
            if columns.dialogue:  # a dialogue's latest turns are kept, which is intended
                sides.pop("source")
            for (part, table), (side, width) in product(encoded.items(), sides.items()):
                option = f"max_{side}_length"
                lengths = np.asarray(table.with_format("numpy")[f"{side}_tokens"][:])
                problem = f"{PART_NAMES[part]} {side}s are cut at {width} tokens ({option})"
                lost = int((lengths > width).sum())
                allowed = recipe.allow_data_loss or side == "source"
                notes += report_data_loss(allowed, lost, len(table), problem, lengths, option=option, config=config)
            samples = {part: TokenizedDataset(table, SAMPLE_COLUMNS) for part, table in encoded.items()}
            data = PairData(train=samples.get("train"), tokenizer=encoder.tokenizer, widths=widths, notes=notes)
            data.validation = samples.get("validation")
            if "validation" in encoded:
                data.targets = encoded["validation"]["target"][:]
            sources[name] = data
    if not recipe.mixture:
        return sources[""]
    targets = [target for data in sources.values() for target in data.targets]
    return mix_sources(sources, recipe, targets=targets)


def open_pairs(
    recipe: Seq2SeqRecipe, options: DataOptions, config: PretrainedConfig
) -> tuple[dict[str, RecordSet], PairReader, "PairEncoder", list[str]]:
    """Return (the records of each part, their columns, what makes token ids of them, notes)."""
    source_width, target_width = (
        choose_length(option, getattr(recipe, option), recipe.source(option), config)
        for option in ("max_source_length", "max_target_length")
    )
    source = read_source(options, unit_of=(lambda files: "line") if recipe.predict_file else None)
    source.parts = {part: split_translation_columns(table) for part, table in source.parts.items()}
    columns = find_columns(recipe.columns_in(source.first.column_names), source.first)
    texts = [tables.texts_of(columns.columns)]  # the names of classes are texts, too
    source.parts = {part: tables.with_class_names(table, texts) for part, table in source.parts.items()}
    parts, notes = read_parts(source, dict.fromkeys(source.parts, columns), options)
    first = next(iter(parts.values()))
    tokenizer = get_tokenizer(options.recipe, config, first.texts, tables.table_key(first.table), pairs=True)
    prefix = set_languages(tokenizer, recipe.source_lang, recipe.target_lang, recipe.source_prefix)
    separator = turn_separator(config, tokenizer, recipe.turn_separator)
    for option, column in (("source_lang", columns.source), ("target_lang", columns.target)):
        code = getattr(recipe, option)
        is_set = code and recipe.source(option) != FROM_MODEL
        if is_set and not language_codes(tokenizer) and not (column and language_column(code, [column])):
            raise UserError(
                f"{option} = {code!r} has no effect: the tokenizer marks no languages, and there is no column of this "
                "name. T5 reads --source_prefix 'translate English to German: '"
            )
    sources = (pair.source[0] for part in parts.values() for pairs in part.contents() for pair in pairs)
    check_marked(tokenizer, prefix, sources)
    described = [f"data      {source.describe(columns)}", *describe_languages(tokenizer)]
    unread = source.names(name for name in source.first.column_names if name not in columns.columns)
    tasks = getattr(config, "task_specific_params", None) or {}
    prefixes = [(settings or {}).get("prefix") or "" for settings in tasks.values()]
    if (trained := [repr(each) for each in prefixes if each.strip()]) and not prefix:  # T5 was trained with prefixes
        described.append(f"note      source_prefix is empty; the model was trained with {', '.join(trained)}")
    notes = described + unread_note(unread, ()) + notes
    return parts, columns, PairEncoder(tokenizer, prefix, separator, (source_width, target_width)), notes


def split_translation_columns(table: Dataset) -> Dataset:
    """Return the table with one column per language for {"translation": {"en": ..., "de": ...}}, as in wmt."""
    feature = table.features.get("translation")
    if not (isinstance(feature, dict) or hasattr(feature, "languages")):
        return table
    flat = table.flatten()
    names = {name: name.removeprefix("translation.") for name in flat.column_names}
    new = list(names.values())
    renamed = {name: new_name for name, new_name in names.items() if name != new_name and new.count(new_name) == 1}
    return tables.derive_table_key(flat.rename_columns(renamed), table)


def turn_separator(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, given: str | None = None) -> str:
    """Return the text between two turns of a conversation: `given`, or by default that of the model."""
    if given is not None:
        return given
    return family_of(config).turn_separator or tokenizer.sep_token or tokenizer.eos_token or "\n"


class PairEncoder:
    """Convert pairs to token ids. Sources and targets end with the end-of-text token: without it a model never learns
    to stop. Raises UserError: the prefix leaves no room for a source. `separator`: between two turns. `widths`: the
    longest source and target in tokens, special tokens included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prefix: str, separator: str, widths: tuple[int, int]):
        self.tokenizer = tokenizer
        self.prefix = prefix
        self.separator = separator
        self.widths = widths
        end_with_eos(tokenizer)
        self.marks = [self._marks(**kind) for kind in ({"text": "a"}, {"text_target": "a"})]
        self.key = (tables.tokenizer_hash(tokenizer), self.prefix, self.separator, self.marks, widths)
        self.room = widths[0] - sum(map(len, self.marks[0]))  # tokens of a source without its special tokens
        # The tokens that prefix and separator add to a text; alone they may be more, such as a space at the end.
        text, prefixed, two = map(len, self._ids(["a", f"{self.prefix}a", f"a{self.separator}a"]))
        self.prefix_size = prefixed - text
        self.separator_size = two - 2 * text
        if self.prefix_size >= self.room:
            raise UserError(f"source_prefix = {self.prefix!r} fills max_source_length = {widths[0]}: shorten it")

    def _marks(self, **text: str) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a text."""
        plain = self.tokenizer(**text, add_special_tokens=False)["input_ids"]
        marked = self.tokenizer(**text)["input_ids"]
        place = next(i for i in range(len(marked)) if marked[i : i + len(plain)] == plain)
        return marked[:place], marked[place + len(plain) :]

    def encode(self, records: list[list[TextPair]], names: list[str]) -> tables.Columns:
        """Return a row for each pair of the records: input_ids, labels, target (the full text), truncated (tokens
        cut), and the numbers of tokens of the full source and target."""
        pairs = list(chain.from_iterable(records))
        sources, lost = self.sources([pair.source for pair in pairs])
        before, after = self.marks[1]
        room = self.widths[1] - len(before) - len(after)
        targets = self._ids([pair.target for pair in pairs], "text_target")
        return {
            "input_ids": sources,
            "labels": [[*before, *ids[:room], *after] for ids in targets],
            "target": [pair.target for pair in pairs],
            "truncated": [n + max(0, len(ids) - room) for n, ids in zip(lost, targets)],
            "source_tokens": [len(ids) + n for ids, n in zip(sources, lost)],
            "target_tokens": [len(ids) + len(before) + len(after) for ids in targets],
        }

    def sources(self, histories: list[list[str]]) -> tuple[list[list[int]], list[int]]:
        """Return (ids, number of tokens cut) of each source. A conversation keeps the latest turns that fit, or the
        end of its last turn if that alone does not fit. A single text keeps its beginning."""
        before, after = self.marks[0]
        room = self.room
        prefix = self.prefix_size
        between = self.separator_size
        unique_turns = list(dict.fromkeys(turn for turns in histories for turn in turns))
        size = dict(zip(unique_turns, map(len, self._ids(unique_turns))))
        kept_turns: list[list[str]] = []
        lost: list[int] = []
        for turns in histories:
            used = prefix + size[turns[-1]]
            first = len(turns) - 1
            while first > 0 and used + between + size[turns[first - 1]] <= room:
                first -= 1
                used += between + size[turns[first]]
            kept_turns.append(turns[first:])
        rows = self._ids([self._joined(turns) for turns in kept_turns])
        for index, turns in enumerate(histories):
            while len(rows[index]) > room and len(kept_turns[index]) > 1:  # joined, the turns may take more tokens
                kept_turns[index] = kept_turns[index][1:]
                rows[index] = self._ids([self._joined(kept_turns[index])])[0]
            ids = rows[index]
            dropped = turns[: len(turns) - len(kept_turns[index])]
            lost.append(sum(size[turn] + between for turn in dropped) + max(0, len(ids) - room))
            if len(ids) > room:
                rows[index] = [*ids[:prefix], *ids[len(ids) - (room - prefix) :]] if len(turns) > 1 else ids[:room]
        return [[*before, *ids, *after] for ids in rows], lost

    def _joined(self, turns: list[str]) -> str:
        return self.prefix + self.separator.join(turns)

    def _ids(self, texts: list[str], kind: str = "text") -> list[list[int]]:
        return self.tokenizer(**{kind: texts}, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
