"""Prompts, and conversations that need a reply, as token ids."""

import sys
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zerofit.data.chat.instructions import RECORD_KINDS, RecordForm, find_form
from zerofit.data.chat.samples import unread_note
from zerofit.data.options import PREDICT, DataOptions
from zerofit.data.pack import DatasetStats, Sample, TextData
from zerofit.data.pairs import PairData, PairEncoder, open_pairs, turn_separator
from zerofit.data.records import read_parts
from zerofit.data.sources import Source, read_source
from zerofit.data.tables import input_columns, list_columns
from zerofit.data.text import text_column
from zerofit.model.chat import BadTemplate, Conversation, adapt_messages, apply_template, install_template, unread_keys
from zerofit.model.configuration import TRAINED_WITH, usable_positions
from zerofit.model.tokenizer import check_marked, get_tokenizer, language_codes, set_languages
from zerofit.recipe.data_options import FROM_MODEL
from zerofit.recipe.errors import UserError, first_line
from zerofit.recipe.tasks import ClmRecipe, Seq2SeqRecipe

Messages = list[dict[str, Any]]  # [{"role": "user", "content": "..."}, ...]
Prompt = str | Conversation  # a text, or a conversation that needs a reply
CHAT_ONLY = ("chat_template", "system_prompt", "train_on_prompt")
TEXT_ONLY = ("document_separator", "append_eos")
ADDED_KEYS = ("instruction", "input", "trained", "masked")  # keys of messages that are in no record


class Renderer:
    """Convert prompts and conversations to the token ids that the model continues. `languages`: of source and target,
    for an encoder-decoder; by default those that are stored."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,  # the model's
        template: str | None = None,  # the name or .jinja file of a chat template that replaces the tokenizer's own
        raw: bool = False,  # use prompts unchanged, without a template
        system: str | None = None,  # the system prompt of every conversation; None: that of training, if there was one
        *,
        languages: tuple[str | None, str | None] = (None, None),
    ):
        self.tokenizer = tokenizer
        self.config = config
        self.system = system
        self.left_out = 0  # number of tokens cut from the latest source, as in training
        self.has_encoder = config.is_encoder_decoder
        if template is not None:
            install_template(tokenizer, template)
        self.uses_template = bool(tokenizer.chat_template) and not raw
        trained = tokenizer.init_kwargs.get(TRAINED_WITH, {})
        if system is None and self.uses_template:
            self.system = trained.get("system_prompt")
        chosen = (languages[0] or trained.get("source_lang"), languages[1] or trained.get("target_lang"))
        self.encoder: PairEncoder | None = None  # encodes sources in the format of training
        if self.has_encoder and not self.uses_template:
            positions = usable_positions(config) or sys.maxsize
            longest = min(trained.get("max_source_length", positions), positions)
            separator = turn_separator(config, tokenizer, trained.get("turn_separator"))
            before = set_languages(tokenizer, *chosen, "" if raw else trained.get("source_prefix", ""))
            before += f"{system}{separator}" if system else ""  # never cut
            try:
                self.encoder = PairEncoder(tokenizer, before, separator, (longest, positions))
            except UserError:
                raise UserError(f"system_prompt = {system!r} fills {longest} tokens: shorten it") from None
        if self.uses_template:
            self._render([{"role": "user", "content": "a"}])  # finds a broken template before the first prompt
        elif system is not None and not self.has_encoder:
            raise UserError(f"system_prompt = {system!r}: {self._no_template}")
        if any(languages) and not (self.encoder and language_codes(tokenizer)):
            raise UserError(f"source_lang, target_lang: the tokenizer {tokenizer.name_or_path!r} marks no languages")

    @property
    def _no_template(self) -> str:
        return f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template; name one with --chat_template"

    def check_conversations(self) -> None:
        """Raises UserError if this model cannot continue a conversation."""
        if not self.uses_template and not self.has_encoder:
            raise UserError(f"a conversation needs a chat template: {self._no_template}")

    def ids(self, prompt: str | Messages) -> list[int]:
        """Return the token ids of a text, or of a conversation up to the beginning of the reply."""
        if isinstance(prompt, str):
            if not (self.uses_template and prompt):
                return self._source([prompt]) if self.has_encoder else self._beginning(prompt)
            prompt = [{"role": "user", "content": prompt}]
        self.check_conversations()
        if not self.uses_template:
            return self._source([message["content"].strip() for message in prompt])
        if self.system and prompt[0]["role"] != "system":
            system = {"role": "system", "content": self.system}
            prompt = Conversation([system, *prompt], getattr(prompt, "given", {}))
        text = self._render(prompt)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]  # the template has added them

    def end_of_turn(self) -> list[int]:
        """Return the special token that the template puts after a reply, or an empty list: generation stops there."""
        if not self.uses_template:
            return []
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zerofit"}]
        after = self._render(messages, for_an_answer=False).rpartition("zerofit")[2].lstrip()
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        return [token for token in ids if token in special]

    def _render(self, messages: Messages, for_an_answer: bool = True) -> str:
        try:
            conversation = adapt_messages(self.tokenizer, messages)
            return apply_template(self.tokenizer, conversation, for_an_answer, conversation.given)
        except (BadTemplate, ValueError) as error:  # or there are several templates
            raise UserError(f"the chat template fails on this conversation: {first_line(error)}") from None

    def _beginning(self, text: str) -> list[int]:
        """Return the ids of a text to continue: with the tokenizer's special tokens before it, without those after
        it."""
        plain = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not plain:
            start_tokens = (self.tokenizer.bos_token_id, self.config.bos_token_id, self.tokenizer.eos_token_id)
            start = next((token for token in start_tokens if token is not None), None)
            if start is None:
                raise UserError("an empty prompt: the tokenizer has no token to start a text with. Type a text")
            return [start]
        marked = self.tokenizer(text)["input_ids"]
        places = [place for place in range(len(marked)) if marked[place : place + len(plain)] == plain]
        return marked[: places[0] + len(plain)] if places else marked

    def _source(self, turns: list[str]) -> list[int]:
        if not any(turns) or self.encoder is None:  # None with a template, where only an empty prompt comes here
            raise UserError("an empty prompt: an encoder needs a text. Type a text")
        check_marked(self.tokenizer, self.encoder.prefix, turns[:1])
        (ids,), (self.left_out,) = self.encoder.sources([turns])
        return ids


@dataclass
class Prompts:
    """The records of predict_file as samples (input_ids alone), in the order of the file."""

    ids: list[list[int]]
    records: list[dict[str, Any]]  # one row of predictions.jsonl per prompt, without the prediction
    is_chat: bool = False  # each is a conversation that needs a reply, not a text to continue
    ends: list[int] = field(default_factory=list)  # token ids that end an answer, in addition to those of the model
    truncated: int = 0  # number of tokens cut

    def __post_init__(self) -> None:
        self.lengths = self.sort_key = np.array([len(ids) for ids in self.ids])
        tokens = int(self.lengths.sum()) + self.truncated
        self.stats = DatasetStats(len(self.ids), tokens, len(self.ids), self.truncated)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Sample:
        return {"input_ids": np.array(self.ids[index])}


def read_sources(recipe: Seq2SeqRecipe, config: PretrainedConfig) -> PairData:
    """Read the sources of predict_file. A conversation is continued with its next turn; an answer in the file is
    ignored. Raises UserError: no column of sources is found, a text is empty."""
    parts, _, encoder, notes = open_pairs(recipe, DataOptions.of(recipe), config)
    tokenizer = encoder.tokenizer
    widths = encoder.widths
    ids, cut_tokens = encoder.sources([pair.source for (pair,) in parts[PREDICT].contents()])
    if cut := sum(map(bool, cut_tokens)):
        notes.append(f"note      {cut:,} of {len(ids):,} sources are cut at max_source_length = {widths[0]}")
    kept_columns = input_columns(parts[PREDICT].records, "source", "prediction")
    read = [
        {**record, "source": str(tokenizer.decode(row, skip_special_tokens=True)).strip()}
        for record, row in zip(kept_columns, ids)
    ]
    prompts = Prompts(ids, read, is_chat=True, truncated=sum(cut_tokens))
    return PairData(tokenizer=tokenizer, widths=widths, notes=notes, prompts=prompts)


def read_causal_prompts(
    recipe: ClmRecipe, options: DataOptions, config: PretrainedConfig, block_size: int
) -> TextData:
    """Read the prompts of predict_file: instructions, questions and conversations in the form of training, without
    their answers; or texts to continue. Raises UserError: there is no such column, a text is empty, a role is out of
    order, no positions are left to write."""
    unit = recipe.document_separator if recipe.document_separator in ("file", "paragraph") else "line"
    source = read_source(options, unit_of=lambda files: unit)
    recipe = recipe.columns_in(source.first.column_names)
    form = find_form(recipe, source.first)
    check_options(recipe, form, source)
    tokenizer = get_tokenizer(recipe, config, lambda: (), "")
    if form is None:
        notes = ["data      each record is a text to continue", *source.notes]
        ends = []
        column = text_column(source.first, recipe.text_column)
        others = [name for name in source.first.column_names if name != column]
        rows = input_columns(source.first.select_columns(others), "prompt", "prediction") if others else repeat({})
        texts = source.first[column]
        records = [{**row, "prompt": text} for row, text in zip(rows, texts) if text and text.strip()]
        if not records:
            raise UserError(f"{source.where(PREDICT)} holds no text: there is nothing to continue")
        if blank := len(source.first) - len(records):
            notes.append(f"note      {blank:,} of {len(source.first):,} records have no text, and are not continued")
        renderer = Renderer(tokenizer, config, raw=True)
        ids = [renderer.ids(record["prompt"]) for record in records]
    else:
        _, template = install_template(tokenizer, recipe.chat_template, "none" if form.plain else None)
        parts, notes = read_parts(source, {PREDICT: form}, options)
        conversations = list(parts[PREDICT].contents())
        notes = [form.describe, template, *notes]
        renderer = Renderer(tokenizer, config)
        records = [
            {**record, "messages": [{key: turn[key] for key in turn if key not in ADDED_KEYS} for turn in turns]}
            | turns.given
            for record, turns in zip(input_columns(parts[PREDICT].records, "messages", "prediction"), conversations)
        ]
        keys = (key for turns in conversations for key in unread_keys(tokenizer, turns))
        notes += unread_note([name for name in source.first.column_names if name not in form.columns], keys)
        ids = [renderer.ids(turns) for turns in conversations]
        ends = renderer.end_of_turn()
    longest = longest_answer(recipe.max_new_tokens, bool(recipe.source("max_new_tokens")), config)
    room = (usable_positions(config) or sys.maxsize) - longest
    cut_tokens = [max(0, len(row) - room) for row in ids]
    ids = [row[-room:] for row in ids]  # the end of each, which leaves room for the answer
    if cut := sum(map(bool, cut_tokens)):
        notes.append(f"warning   {cut:,} of {len(ids):,} prompts lose their beginning to max_new_tokens = {longest}")
    prompts = Prompts(ids, records, form is not None, ends, sum(cut_tokens))
    kind = f"answered with at most {longest} tokens each"
    return TextData(
        tokenizer=tokenizer, block_size=block_size, notes=notes, is_chat=prompts.is_chat, kind=kind, prompts=prompts
    )


def longest_answer(max_new_tokens: int, is_set: bool, config: PretrainedConfig) -> int:
    """Return the largest number of tokens to generate: max_new_tokens; by default at most half of the model's
    positions. Raises UserError: no positions are left for a prompt. `is_set`: max_new_tokens is not the default."""
    positions = usable_positions(config)
    if positions and not is_set:
        return min(max_new_tokens, positions // 2)
    if positions and max_new_tokens >= positions:
        raise UserError(f"max_new_tokens = {max_new_tokens}: the model has {positions:,} positions. Choose fewer")
    return max_new_tokens


def check_options(recipe: ClmRecipe, form: RecordForm | None, source: Source) -> None:
    """Check options. Raises UserError for options that the detected kind of data does not use."""
    if form is None:
        flags = [name for name in CHAT_ONLY if getattr(recipe, name) and recipe.source(name) != FROM_MODEL]
        kind = f"text; {list_columns(source.first)}. Name the columns as those of chats are named (docs/fine-tune.md)"
    else:
        flags = [name for name in TEXT_ONLY if getattr(recipe, name) is not None and recipe.source(name) != FROM_MODEL]
        kind = f"{RECORD_KINDS[form.kind]} a record (column {form.question}). For running text say --text_column NAME"
    if flags and not recipe.mixture:  # another source of a mixture may be of the other kind
        settings = ", ".join(f"{name} = {getattr(recipe, name)!r}" for name in flags)
        raise UserError(f"{settings}: no effect, the data is taken for {kind}, or leave the option out")
    if form is not None and recipe.packing == "concatenate" and recipe.source("packing") != FROM_MODEL:
        raise UserError("packing = concatenate: no loss on the answers alone. Use --packing documents or none")
