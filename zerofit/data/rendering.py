"""Prompts, and conversations that need a reply, as token ids."""

import sys
from typing import TYPE_CHECKING, Any

from zerofit.model.chat import BadTemplate, Conversation, apply_template, for_template, install_template
from zerofit.model.configuration import usable_positions
from zerofit.model.folders import TRAINED_WITH
from zerofit.model.languages import check_marked, language_codes, set_languages
from zerofit.recipe.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from zerofit.data.pairs.samples import PairEncoder

Languages = tuple[str | None, str | None]
Messages = list[dict[str, Any]]  # [{"role": "user", "content": "..."}, ...]
Prompt = str | Conversation  # a text, or a conversation that needs a reply


class Renderer:
    """Convert prompts and conversations to the token ids that the model continues. `languages`: of source and target,
    for an encoder-decoder; by default those that are stored."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: "PretrainedConfig",  # the model's
        template: str | None = None,  # the name or .jinja file of a chat template that replaces the tokenizer's own
        raw: bool = False,  # use prompts unchanged, without a template
        system: str | None = None,  # the system prompt of every conversation; None: that of training, if there was one
        *,
        languages: Languages = (None, None),
    ):
        self.tokenizer, self.config, self.system = tokenizer, config, system
        self.left_out = 0  # number of tokens cut from the latest source, as in training
        self.has_encoder = config.is_encoder_decoder
        if template is not None:
            install_template(tokenizer, template)
        self.uses_template = bool(tokenizer.chat_template) and not raw
        trained = tokenizer.init_kwargs.get(TRAINED_WITH, {})
        if system is None and self.uses_template:
            self.system = trained.get("system_prompt")
        chosen = (languages[0] or trained.get("source_lang"), languages[1] or trained.get("target_lang"))
        self.encoder = self._encoder(raw, chosen) if self.has_encoder and not self.uses_template else None
        if self.uses_template:
            self._render([{"role": "user", "content": "a"}])  # finds a broken template before the first prompt
        elif system is not None and not self.has_encoder:
            raise UserError(f"system_prompt = {system!r}: {self._no_template}")
        if any(languages) and not (self.encoder and language_codes(tokenizer)):
            raise UserError(f"source_lang, target_lang: the tokenizer {tokenizer.name_or_path!r} marks no languages")

    def _encoder(self, raw: bool, languages: Languages) -> "PairEncoder":
        """The encoder of sources, in the format of training; the system prompt is never cut."""
        from zerofit.data.pairs.samples import PairEncoder, turn_separator

        trained = self.tokenizer.init_kwargs.get(TRAINED_WITH, {})
        positions = usable_positions(self.config) or sys.maxsize
        longest = min(trained.get("max_source_length", positions), positions)
        separator = turn_separator(self.config, self.tokenizer, trained.get("turn_separator"))
        before = set_languages(self.tokenizer, *languages, "" if raw else trained.get("source_prefix", ""))
        if self.system:
            before += f"{self.system}{separator}"
        try:
            return PairEncoder(self.tokenizer, before, separator, (longest, positions))
        except UserError:
            raise UserError(f"system_prompt = {self.system!r} fills {longest} tokens: shorten it") from None

    @property
    def _no_template(self) -> str:
        return f"the tokenizer {self.tokenizer.name_or_path!r} has no chat template; name one with --chat_template"

    def check_conversations(self) -> None:
        """Raises UserError if this model cannot take part in a conversation."""
        if not self.uses_template and not self.has_encoder:
            raise UserError(f"a conversation needs a chat template: {self._no_template}")

    def ids(self, prompt: str | Messages) -> list[int]:
        """The token ids of a text, or of a conversation up to the beginning of the reply."""
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
        """The special token that the template puts after a reply, if any: generation stops there."""
        if not self.uses_template:
            return []
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zerofit"}]
        after = self._render(messages, for_an_answer=False).rpartition("zerofit")[2].lstrip()
        ids = self.tokenizer(after, add_special_tokens=False)["input_ids"][:1]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        return [token for token in ids if token in special]

    def _render(self, messages: Messages, for_an_answer: bool = True) -> str:
        try:
            conversation = for_template(self.tokenizer, messages)
            return apply_template(self.tokenizer, conversation, for_an_answer, conversation.given)
        except (BadTemplate, ValueError) as error:  # or there are several templates
            raise UserError(f"the chat template fails on this conversation: {first_line(error)}") from None

    def _beginning(self, text: str) -> list[int]:
        """A text to continue: with the special tokens that the tokenizer puts before it, without those after it."""
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
