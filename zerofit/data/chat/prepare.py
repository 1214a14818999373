"""Instructions and chats for the causal task: from records to token ids, with labels for the answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Value

from zerofit.data.chat.instructions import Form
from zerofit.data.difficulty import SCORE, score_column, scores_of
from zerofit.data.lengths import report_data_loss
from zerofit.data.options import PARTS, DataOptions, PartOptions
from zerofit.data.pack import Conversations, PackedConversations, SampleSet, TextData
from zerofit.data.records import check_records, read_good, records_in, records_of
from zerofit.data.sources import Source
from zerofit.data.tables import limit_parts, split_parts
from zerofit.data.token_row import Documents
from zerofit.data.token_tables import IDS, TableCache, encode_table, fingerprint
from zerofit.model import chat
from zerofit.model.chat import BadTemplate, Template, install_template, missing_end_token, render
from zerofit.model.loss import IGNORE
from zerofit.model.tokenizer import get_tokenizer, padding_token
from zerofit.recipe.errors import UserError

TABLE = Features(
    {"input_ids": IDS, "labels": IDS, "truncated": Value("int32"), "trained": Value("int32"), "is_cut": Value("bool")}
)
SHOWN = 1600  # about how many characters of a sample to show


@dataclass
class NumberedRecords:
    """Records of a part, the number of each in its source, and the source's name."""

    table: Dataset
    numbers: np.ndarray
    where: str

    def __len__(self) -> int:
        return len(self.table)

    def select(self, indices: Iterable[int]) -> "NumberedRecords":
        return NumberedRecords(self.table.select(indices), self.numbers[indices], self.where)


@dataclass(frozen=True)
class ChatSettings:
    """How conversations become samples.

    Args:
        template: chat_template.
        packing: none: a row for each; else several in a block.
    """

    template: str | None
    train_on_prompt: bool
    packing: str
    block_size: int


def prepare_chat(
    options: DataOptions, config, source: Source, forms: dict[str, Form], settings: ChatSettings
) -> TextData:
    """Check, split, render, tokenise and pack conversations.

    Args:
        config: the model's.
        forms: the form of the records of each part; they may differ.

    Raises:
        UserError: a record without an answer, a role out of order; no template, or one that fails; no answer is left.
    """
    form, block_size = next(iter(forms.values())), settings.block_size
    notes = [form.describe]
    for part in source.parts:
        notes += check_records(source, part, forms[part].messages, forms[part], options.rules, options.cache)
    score = score_column(options.difficulty, source.first)
    parts = _split(options.parts, source, forms, score)
    first_of = next(iter(parts))
    train = parts[first_of].table
    tokenizer = get_tokenizer(options.tokenizer, config, lambda: _texts(train, form), f"{train._fingerprint} {form}")
    template = install_template(tokenizer, settings.template, "none" if form.plain else None)
    notes = [template.note, *notes, *missing_end_token(tokenizer, template)]
    sets: dict[str, Conversations] = {}
    for name, part in parts.items():
        encoder = ChatEncoder(tokenizer, forms.get(name, form), template, block_size, settings.train_on_prompt)
        of_part = score if name == "train" else None
        table = _encode(part, encoder, options.cache, of_part)
        notes += truncation_notes(options.rules.allow_data_loss, config, table, name, block_size)
        sets[name] = Conversations(table, scores_of(table, of_part and SCORE))
    shown = show(sets[first_of][0], tokenizer, template, PARTS[first_of])
    filler = padding_token(tokenizer)
    packed: dict[str, SampleSet] = dict(sets)
    if settings.packing != "none":
        packed = {name: PackedConversations(held, block_size, filler) for name, held in sets.items()}
    return TextData(packed.get("train"), packed.get("validation"), tokenizer, block_size, notes, shown, is_chat=True)


def _split(
    options: PartOptions, source: Source, forms: dict[str, Form], score: str | None
) -> dict[str, NumberedRecords]:
    """The parts of the run, cut to max_*_samples."""
    columns = {name: list(form.columns) for name, form in forms.items()}
    if score and score not in columns["train"]:
        columns["train"].append(score)
    parts = {
        name: NumberedRecords(table.select_columns(columns[name]), np.arange(len(table)), source.where(name))
        for name, table in source.parts.items()
    }
    return limit_parts(split_parts(parts, options), options)


def _texts(table: Dataset, form: Form):
    """Every text, to train a tokenizer."""
    for _, _, messages in read_good(records_in(table), form.messages):
        yield from (message["content"] for message in messages)


# --------------------------------------------------------------------------------------------------------- token ids


class ChatEncoder:
    """Conversations -> token ids, with a label for each that is trained on.

    A conversation is tokenized as one text, as in generation. A token is trained on if any of its characters is: if
    one token has the prompt's last space and the answer's first word, the model must generate both.
    """

    def __init__(self, tokenizer, form: Form, template: Template, block_size: int, train_on_prompt: bool):
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) does not return the "
                "characters of a token, so answers and prompts cannot be separated. Set tokenizer_name to one with a "
                "tokenizer.json"
            )
        self.tokenizer, self.form, self.template = tokenizer, form, template
        self.block_size, self.train_on_prompt = block_size, train_on_prompt
        code = sha256(Path(chat.__file__).read_bytes()).hexdigest()
        special = sorted(tokenizer.special_tokens_map.items())
        self.key = (fingerprint(tokenizer), special, tokenizer.chat_template, form, block_size, train_on_prompt, code)

    def render(self, messages: list[chat.Message], where: str) -> tuple[str, list[chat.Span]]:
        """The text of a conversation and the answers in it. Raises UserError if the template fails on it."""
        try:
            return render(self.tokenizer, messages)
        except BadTemplate as bad:
            raise UserError(f"{where}: {self.template.origin} fails on it: {bad}") from None

    def encode(self, rendered: list[tuple[str, list[chat.Span]]]) -> dict[str, list]:
        """The columns of TABLE; a record without a trained token within block_size gets no tokens."""
        rows: dict[str, list] = {name: [] for name in TABLE}
        texts = [text for text, _ in rendered]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True,
                                 return_attention_mask=False, verbose=False) if texts else {}  # fmt: skip
        for row, (_, spans) in enumerate(rendered):
            ids, answer = np.array(encoded["input_ids"][row]), overlap(encoded["offset_mapping"][row], spans)
            trained = np.ones_like(answer) if self.train_on_prompt else answer.copy()
            trained[0] = False  # nothing predicts it
            count = int(trained[: self.block_size].sum())
            length = min(len(ids), self.block_size) if count else 0
            rows["input_ids"].append(ids[:length])
            rows["labels"].append(np.where(trained, ids, IGNORE)[:length])
            rows["truncated"].append(len(ids) - length)
            rows["trained"].append(count)
            rows["is_cut"].append(bool(count and answer[self.block_size :].any()))
        return rows


def overlap(offsets: list[chat.Span], spans: list[chat.Span]) -> np.ndarray:
    """(tokens,) whether a token has a character in one of the spans.

    If a character takes several tokens, each of them has that character's range.
    """
    starts, stops = np.array(offsets).reshape(-1, 2).T
    return np.logical_or.reduce([np.zeros(len(starts), bool)] + [(starts < b) & (stops > a) for a, b in spans])


def _encode(part: NumberedRecords, encoder: ChatEncoder, cache: TableCache, score: str | None = None) -> Dataset:
    def encode(batch: dict, indices: list[int]) -> dict:
        rendered, scores = [], []
        for place, record, messages in read_good(records_of(batch), encoder.form.messages):
            rendered.append(encoder.render(messages, f"{part.where}, record {part.numbers[indices[place]] + 1}"))
            scores += [record[score]] if score else []
        return {**encoder.encode(rendered), **({SCORE: scores} if score else {})}

    features = Features({**TABLE, SCORE: Value("float64")}) if score else TABLE
    return encode_table(part.table, encode, features, (*encoder.key, score), cache, with_indices=True)


# ------------------------------------------------------------------------------------------------ notes


def truncation_notes(allow_data_loss: bool, config, table: Dataset, part: str, block_size: int) -> list[str]:
    """What there is to say about answers beyond block_size. Raises UserError if none is left, or too few."""
    columns = table.select_columns(["truncated", "trained", "is_cut"]).with_format("numpy")[:]
    skipped, cut = int((columns["trained"] == 0).sum()), int(columns["is_cut"].sum())
    if skipped == len(table):
        longest = columns["truncated"].max(initial=0)
        raise UserError(
            f"block_size = {block_size}: of all {len(table):,} {PARTS[part]} samples the answer lies beyond it, no "
            f"sample is left. Choose a larger one (they have up to {longest:,} tokens), or shorten the prompts"
        )
    of, beyond = f"{PARTS[part]} samples", f"block_size = {block_size} tokens"
    lengths = Documents(table).lengths + columns["truncated"]
    notes = []
    for lost, what in (
        (skipped, f"{of} are skipped: their answer lies beyond {beyond}"),
        (cut, f"{of} have their answer cut at {beyond}"),
    ):
        notes += report_data_loss(allow_data_loss, lost, len(table), what, lengths, "block_size", config)
    return notes


def show(sample: dict[str, np.ndarray], tokenizer, template: Template, part: str = "training") -> list[str]:
    """A sample as text, with marks around what is trained on (in the held-out part: predicted)."""
    trained = sample["labels"] != IGNORE
    ends = [*(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(trained)]
    if len(ends) > 12:
        ends = ends[:12]
    so_far, text = "", ""
    for end in ends:
        decoded = tokenizer.decode(sample["input_ids"][:end], clean_up_tokenization_spaces=False)
        run = _shortened(decoded[len(so_far) :], SHOWN // len(ends))
        text += f"⟦{run}⟧" if trained[end - 1] else run
        so_far = decoded
    text += " …" if ends[-1] < len(trained) else ""
    does = "is trained on" if part == PARTS["train"] else "is predicted"
    heading = f"sample    the first {part} sample, written by {template.origin}; the text in ⟦ ⟧ {does}:"
    return [heading, *("  | " + line for line in text.splitlines())]


def _shortened(text: str, limit: int) -> str:
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} […] {text[-half:]}"
