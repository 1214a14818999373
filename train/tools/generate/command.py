r"""`zerofit generate`: let a model continue a text, answer a file of prompts, or talk.

    zerofit generate --model outputs/notes/model --prompt "Once upon a time" --temperature 0.8
    zerofit generate --model BASE --adapter outputs/notes/model --prompt_file asked.jsonl --output answered.jsonl
    zerofit generate --model outputs/chat/model --chat

What the model writes goes to stdout as it is written, everything else to stderr.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.data.rendering import Messages, Prompt, Renderer
from train.model.adapter_folder import AdapterFolder, find_base, open_adapter
from train.model.adapter_loading import load_with_adapter
from train.model.chat import named_template
from train.model.folders import is_adapter, model_folder
from train.model.pretrained_io import read_config, read_model, read_tokenizer, silence_libraries
from train.recipe.errors import UserError
from train.recipe.parse import parse_recipe
from train.tools.generate.prompts import read_prompts
from train.tools.options import GenerateOptions

NOT_WRITERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
               "ForMaskedLM")  # fmt: skip
EMPTY = "[empty]"  # for an answer without a word, where a person reads
NAMED_WITH = "--model BASE --adapter FOLDER"


def main(argv: list[str] | None = None) -> int:
    options = parse_recipe(GenerateOptions, argv, prog="zerofit generate", tool=True)
    prompts = read_prompts(options)
    if options.chat_template:
        named_template(options.chat_template)
    silence_libraries()
    source = look_up(options)  # whatever can be wrong without the weights is found before they are waited for
    renderer = Renderer(source.tokenizer, source.config, options.chat_template, options.raw, options.system_prompt)
    if options.chat or any(prompt.messages for prompt in prompts):
        renderer.check_conversations()
    output = _open(options.output)
    writer = Writer(load(source, options), source.tokenizer, options, renderer.end_of_turn())
    if renderer.uses_template and not options.chat:
        say("note: prompts are rendered with the tokenizer's chat template; --raw takes them as they are")
    if options.chat:
        converse(writer, renderer, lines_of_stdin())
    else:
        complete(writer, renderer, prompts, output)
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _open(name: str | None):
    """The file for generated texts, opened before the model is loaded; None if there is none."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.suffix != ".jsonl":
        raise UserError(f"output = {name!r}: expected the name of a .jsonl file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"output = {name!r} cannot be written: {error.strerror}") from None


# ----------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Source:
    """Where the model comes from: its folder or hub name, or that of its base, and its adapter."""

    name: str
    adapter: AdapterFolder | None
    config: Any
    tokenizer: Any


def look_up(options: GenerateOptions) -> Source:
    """Find the model, its adapter and its tokenizer; the weights are not loaded.

    Raises:
        UserError: they cannot be had, or do not write texts.
    """
    name, trust = model_folder(options.model), options.trust_remote_code
    if not (is_adapter(name) or options.adapter):
        config = read_config("model", name, trust)
        _auto_class(config, name)
        return Source(name, None, config, read_tokenizer("model", name, config, trust))
    own = is_adapter(name)
    if own and options.adapter:
        raise UserError(
            f"model = {name!r} is an adapter itself, and adapter = {options.adapter!r} another: name the base as "
            "--model, or leave --adapter out"
        )
    adapter = open_adapter(name if own else options.adapter, "model" if own else "adapter")
    option, base, config = find_base(adapter, None if own else name, "model", NAMED_WITH, trust)
    if adapter.settings.get("task_type") == "SEQ_CLS":
        raise UserError(f"{str(adapter.path)!r} is the adapter of a classifier: it judges texts and writes none")
    _auto_class(config, base)
    where = ("adapter", str(adapter.path)) if adapter.has_tokenizer else (option, base)
    return Source(base, adapter, config, read_tokenizer(*where, config, trust))


def load(source: Source, options: GenerateOptions):
    """The model on its device, with its adapter if there is one.

    Raises:
        UserError: its weights cannot be had, are not whole, or are not those that the adapter is for.
    """
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    how = {
        "precision": options.precision or ("fp32" if device.type == "cpu" else None),
        "trust_remote_code": options.trust_remote_code,
    }
    if source.adapter:
        adapted = load_with_adapter(
            source.adapter, source.name if options.adapter else None, base_option="model", named_with=NAMED_WITH,
            quantised="keep", **how,
        )  # fmt: skip
        for note in adapted.notes:
            say(note)
        model = adapted.model.get_base_model()
        if (source.adapter.path / "generation_config.json").is_file():  # how it was told to answer
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_pretrained(source.adapter.path)
    else:
        model, missing = read_model(
            _auto_class(source.config, source.name), "model", source.name, source.config, **how
        )
        if missing:
            raise UserError(
                f"model = {source.name!r} lacks {len(missing)} weights of a {type(model).__name__}, such as "
                f"{missing[0]}, or has them in another shape: it would write at random"
            )
    if getattr(model, "hf_quantizer", None) is None:  # quantised weights lie where they belong already
        model.to(device)
    adapter = f" with the adapter {source.adapter.path}" if source.adapter else ""
    say(f"model {source.name}{adapter} in {str(model.dtype).removeprefix('torch.')} on {model.device}")
    return model


def _auto_class(config, name: str):
    """The transformers class for a model that writes. Raises UserError if this one does not."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    of_no_use = [kind for kind in config.architectures or () if kind.endswith(NOT_WRITERS)]
    unknown = type(config) not in auto_class._model_mapping and not hasattr(config, "auto_map")
    if of_no_use or unknown:
        kind = of_no_use[0] if of_no_use else config.model_type
        raise UserError(
            f"model = {name!r} is a {kind}: it judges texts or represents them, and writes none. Name a causal "
            "language model or an encoder-decoder"
        )
    return auto_class


# ------------------------------------------------------------------------------------------------------------- writing


class Writer:
    """Lets a model write, token by token onto stdout.

    Args:
        stops: token ids at which writing ends, beside those that the model and its tokenizer end texts with.
    """

    def __init__(self, model, tokenizer, options: GenerateOptions, stops: list[int]):
        import torch

        from train.model.configuration import usable_positions
        from train.model.tokenizer import padding_token

        self.model, self.tokenizer, self.has_encoder = model, tokenizer, model.config.is_encoder_decoder
        self.positions = usable_positions(model.config)
        self.max_new_tokens = options.max_new_tokens
        own = model.generation_config
        ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
        self.ends = sorted({token for token in [*ends, tokenizer.eos_token_id, *stops] if token is not None})
        samples = bool(options.do_sample or options.sampling)
        self.settings = {
            "do_sample": samples, "num_beams": options.num_beams or 1, "use_cache": True,
            "eos_token_id": self.ends or None, "pad_token_id": padding_token(tokenizer), **options.sampling,
        }  # fmt: skip
        if self.has_encoder:  # answers as it did in training
            if own.max_new_tokens and not options.source("max_new_tokens"):
                self.max_new_tokens = own.max_new_tokens
            if (own.num_beams or 1) > 1 and options.num_beams is None and not samples:
                self.settings["num_beams"] = own.num_beams
                say(f"note: a search with {own.num_beams} beams, as the model was told; --num_beams 1 is faster")
        self.seed = options.seed
        if samples:
            self.seed = torch.seed() % 2**31 if options.seed is None else options.seed
            usual = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # transformers', where a model has none of its own
            used = {name: options.sampling.get(name) or getattr(own, name) or usual[name] for name in usual}
            say(f"note: drawn with {', '.join(f'{name} {value:g}' for name, value in used.items())}, seed {self.seed}")

    def room(self, length: int) -> int | None:
        """The number of tokens that there are positions for after a prompt of `length`; None where nothing limits it.
        Zero or less: the prompt itself is too long."""
        if self.positions is None:
            return None
        if self.has_encoder:
            return self.positions - 1 if length <= self.positions else 0
        return self.positions - length

    def too_long(self, length: int) -> str:
        return f"the prompt has {length:,} tokens, and the model has {self.positions:,} positions. Make it shorter"

    def write(self, ids: list[int], number: int = 0) -> str:
        """Continue a prompt, onto stdout; streaming, where there is no search. Returns what was written.

        Args:
            number: of the prompt; each draws with a seed of its own.
        """
        import torch
        from transformers import TextStreamer

        room = self.room(len(ids))
        if room is not None and room <= 0:
            raise UserError(self.too_long(len(ids)))
        if self.settings["do_sample"]:
            torch.manual_seed(self.seed + number)
        most = self.max_new_tokens if room is None else min(room, self.max_new_tokens)
        inputs = torch.tensor([ids], device=self.model.device)
        streams = self.settings["num_beams"] == 1
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
        with torch.no_grad():
            written = self.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=most, **self.settings, streamer=streamer
            )[0].tolist()
        new = written[1:] if self.has_encoder else written[len(ids) :]
        if most < self.max_new_tokens and len(new) >= most and new[-1] not in self.ends:
            say(f"note: the model's {self.positions:,} positions are used up")
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        empty = not text.strip() and sys.stdout.isatty()
        if empty or not streams:
            print(EMPTY if empty else text, flush=True)
        return text


def complete(writer: Writer, renderer: Renderer, prompts: list[Prompt], output=None) -> None:
    """Continue each prompt for itself; where there is a file, a record for each goes there.

    Raises:
        UserError: a prompt is too long. That is found before any is continued.
    """
    rows, cut = [], []
    for prompt in prompts:
        rows.append(renderer.ids(prompt))
        cut.append(renderer.left_out)
    for number, ids in enumerate(rows, 1):
        room = writer.room(len(ids))
        if room is not None and room <= 0:
            which = f"prompt {number} of {len(rows)}: " if len(rows) > 1 else ""
            raise UserError(f"{which}{writer.too_long(len(ids))}")
    with output or nullcontext():
        for number, (prompt, ids) in enumerate(zip(prompts, rows)):
            if len(prompts) > 1:
                shown = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
                say(f"[{number + 1}/{len(prompts)}] {shown}")
            if cut[number]:
                say(f"note: {cut[number]} tokens of it do not fit into a source of {len(ids)}, and are left out")
            text = writer.write(ids, number)
            if output:
                output.write(json.dumps({**prompt.record, "generated": text}, ensure_ascii=False) + "\n")
                output.flush()


# ------------------------------------------------------------------------------------------------------------- talking


def lines_of_stdin() -> Iterator[str]:
    """What is typed, or comes through a pipe, a line at a time."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # not on every system
            import readline  # noqa: F401  from now on input() has line editing and a history
        say("an empty line ends, /reset forgets what was said")
    while True:
        if interactive:
            try:
                line = input("> ")
            except EOFError:
                return
        else:
            line = sys.stdin.readline()
            if not line:
                return
        yield line.strip()


def converse(writer: Writer, renderer: Renderer, lines: Iterator[str]) -> None:
    """Answer line after line, each with what was said before it, until an empty one."""
    history: Messages = []
    for number, line in enumerate(lines):
        if not line:
            return
        if line == "/reset":
            history = []
            say("note: what was said is forgotten")
            continue
        asked = [*history, {"role": "user", "content": line}]
        ids, kept = latest(asked, writer, renderer)
        if ids is None:
            say(f"note: {writer.too_long(len(renderer.ids_of(asked[-1:])))}; it was not said")
            continue
        if len(kept) < len(asked):
            dropped = (len(asked) - len(kept)) // 2
            say(f"note: the oldest {'exchange does' if dropped == 1 else f'{dropped} exchanges do'} not fit any more")
        elif renderer.left_out:
            say(f"note: {renderer.left_out} tokens of what was said do not fit any more")
        reply = writer.write(ids, number)
        history = [*kept, {"role": "assistant", "content": reply.strip()}]


def latest(messages: Messages, writer: Writer, renderer: Renderer) -> tuple[list[int] | None, Messages]:
    """(ids, messages) of as many of the latest messages as leave room for a reply, whole exchanges; at least the last.

    No ids: the last message alone is too long.
    """
    wanted = 1
    if writer.positions and not writer.has_encoder:
        wanted = min(writer.max_new_tokens, writer.positions // 2)
    while True:
        ids = renderer.ids_of(messages)
        room = writer.room(len(ids))
        if room is None or room >= wanted:
            return ids, messages
        if len(messages) <= 2:
            return (ids if room > 0 else None), messages
        messages = messages[2:]
