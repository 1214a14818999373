"""Writing: a model continues one prompt after another, token by token onto stdout."""

import json
import sys
from contextlib import nullcontext
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from zerofit.data.rendering import Prompt, Renderer
from zerofit.model.configuration import usable_positions
from zerofit.model.languages import first_target_tokens
from zerofit.model.tokenizer import padding_token
from zerofit.recipe.errors import UserError, printable
from zerofit.record.terminal import log_to_stderr
from zerofit.tools.generate.generate_options import GenerateOptions

EMPTY = "[empty]"  # shown to a person in place of an empty answer


class PrintableStreamer(TextStreamer):
    """Writes text onto a terminal as it is generated, without what a terminal obeys."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a part of the text that stays as it is."""
        super().on_finalized_text(printable(text), stream_end)


class Writer:
    """Lets a model write.

    Args:
        model: a PreTrainedModel that generates.
        stops: token ids that end a text, besides those of the model and its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, options: GenerateOptions, stops: list[int]):
        self.positions, self.has_encoder = usable_positions(model.config), model.config.is_encoder_decoder
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens = options.max_new_tokens
        defaults = model.generation_config
        ends = defaults.eos_token_id if isinstance(defaults.eos_token_id, list) else [defaults.eos_token_id]
        self.ends = sorted({token for token in [*ends, tokenizer.eos_token_id, *stops] if token is not None})
        samples = options.samples
        self.settings = {
            "do_sample": samples,
            "num_beams": options.num_beams or 1,
            "use_cache": True,
            "eos_token_id": self.ends or None,
            "pad_token_id": padding_token(tokenizer),
            **options.sampling,
            **first_target_tokens(tokenizer),
        }
        if self.has_encoder:  # generates as in training
            if defaults.max_new_tokens and not options.source("max_new_tokens"):
                self.max_new_tokens = defaults.max_new_tokens
            if (defaults.num_beams or 1) > 1 and options.num_beams is None and not samples:
                self.settings["num_beams"] = defaults.num_beams
                log_to_stderr(f"note: {defaults.num_beams} beams, the model's default; --num_beams 1 is faster")
        self.ends_by_itself = self.has_encoder  # whether what it writes has an end; other texts go on
        self.forced = int(defaults.forced_eos_token_id is not None)  # a last token that comes in any case
        self.seed: int | None = None  # nothing is sampled
        if samples:
            self.seed = torch.seed() % 2**31 if options.seed is None else options.seed
            usual = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # transformers' defaults, where the model has none
            used = {name: options.sampling.get(name) or getattr(defaults, name) or usual[name] for name in usual}
            log_to_stderr(
                f"note: drawn with {', '.join(f'{name} {value:g}' for name, value in used.items())}, seed {self.seed}"
            )

    def room(self, length: int) -> int | None:
        """The number of tokens that fit after a prompt of `length`; None where there is no limit. Zero or less: the
        prompt is too long."""
        if self.positions is None:
            return None
        if self.has_encoder:
            return self.positions - 1 if length <= self.positions else 0
        return self.positions - length

    def too_long(self, length: int) -> str:
        return f"the prompt has {length:,} tokens, and the model has {self.positions:,} positions. Make it shorter"

    def rows(self, prompts: list[Prompt], renderer: Renderer) -> tuple[list[list[int]], list[int]]:
        """Return (token ids of each prompt, number of tokens that were cut from each).

        Raises:
            UserError: a prompt is too long.
        """
        rows, cut = [], []
        for number, prompt in enumerate(prompts, 1):
            rows.append(renderer.ids(prompt))
            cut.append(renderer.left_out)
            if not self.limit(len(rows[-1])):
                which = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
                raise UserError(f"{which}{self.too_long(len(rows[-1]))}")
        return rows, cut

    def limit(self, length: int) -> int:
        """The most tokens that are written after a prompt of `length`; 0: it is too long."""
        room = self.room(length)
        return self.max_new_tokens if room is None else max(0, min(room, self.max_new_tokens))

    def write(self, ids: list[int], number: int = 0) -> str:
        """Continue a prompt, onto stdout, token by token unless beams are searched. Returns the text.

        Args:
            number: of the prompt; each has its own seed.
        """
        limit = self.limit(len(ids))
        if not limit:
            raise UserError(self.too_long(len(ids)))
        if self.seed is not None:
            torch.manual_seed(self.seed + number)
        inputs = torch.tensor([ids], device=self.model.device)
        streams = self.settings["num_beams"] == 1
        kind = PrintableStreamer if sys.stdout.isatty() else TextStreamer
        streamer = kind(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
        with torch.no_grad():
            written = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=limit,
                **self.settings,
                streamer=streamer,
            )[0].tolist()
        new = written[1:] if self.has_encoder else written[len(ids) :]
        if limit < self.max_new_tokens and len(new) >= limit and new[-1] not in self.ends:
            log_to_stderr(f"note: the model's {self.positions:,} positions are used up")
        elif self.ends_by_itself and len(new) >= limit and not {*self.ends}.intersection(new[: limit - self.forced]):
            log_to_stderr(f"note: the text is cut at max_new_tokens = {limit}")
        text = self.tokenizer.batch_decode([new], skip_special_tokens=True)[0]
        empty = not text.strip() and sys.stdout.isatty()
        if empty or not streams:
            print(EMPTY if empty else printable(text) if sys.stdout.isatty() else text, flush=True)
        return text


def complete(writer: Writer, renderer: Renderer, prompts: list[Prompt], output: TextIO | None = None) -> None:
    """Continue each prompt by itself, and write a record of each to `output` if there is one.

    Raises:
        UserError: a prompt is too long; raised before any is continued.
    """
    rows, cut = writer.rows(prompts, renderer)
    with output or nullcontext():
        for number, (prompt, ids) in enumerate(zip(prompts, rows)):
            if len(prompts) > 1:
                shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
                log_to_stderr(f"[{number + 1}/{len(prompts)}] {shown}")
            if cut[number]:
                log_to_stderr(
                    f"note: {cut[number]} tokens of it do not fit into a source of {len(ids)}, and are dropped"
                )
            text = writer.write(ids, number)
            if output:
                record = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt, **prompt.given}
                output.write(json.dumps({**record, "generated": text}, ensure_ascii=False) + "\n")
                output.flush()
