"""Load a model, and let it answer a text, a file of prompts, or a conversation."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from zerofit.data.chat.instructions import SYSTEM_COLUMNS, optional_text, template_values, turns_in
from zerofit.data.chat.samples import unread_note
from zerofit.data.prompts import Messages, Prompt, Renderer
from zerofit.data.records import BadRecord
from zerofit.model.adapter_folder import AdapterBase, AdapterFolder, find_base, open_adapter
from zerofit.model.chat import TEMPLATE_ARGUMENTS, Conversation, unread_keys
from zerofit.model.configuration import has_model, is_adapter, model_folder, read_config, usable_positions
from zerofit.model.lora import load_with_adapter
from zerofit.model.pretrained_io import read_model, silence_libraries
from zerofit.model.tokenizer import first_target_tokens, load_named_tokenizer, padding_token
from zerofit.recipe.errors import UserError, escape_controls
from zerofit.recipe.files import has_lone_surrogate, parse_json, read_text
from zerofit.record.terminal import log_to_stderr
from zerofit.strategy.devices import accelerator

if TYPE_CHECKING:
    from zerofit.tools.generate.generate import GenerateOptions

NON_GENERATIVE_SUFFIXES = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForMaskedLM",
)


def find_model(options: Any) -> tuple[AdapterBase, AdapterFolder | None, PreTrainedTokenizerBase]:
    """Return (the model or the base of an adapter, the adapter or None, the tokenizer), without loading weights.
    `options`: GenerateOptions or EvaluateOptions. Raises UserError: they cannot be loaded, or the model does not
    generate text."""
    name = model_folder(options.model)
    trust = options.trust_remote_code
    if not (is_adapter(name) or options.adapter):
        config = read_config("model", name, trust)
        _auto_class(config, name)
        return AdapterBase("model", name, config), None, load_named_tokenizer("model", name, config, trust)
    names_adapter = is_adapter(name)
    if names_adapter and options.adapter:
        raise UserError(f"model = {name!r} is an adapter, and adapter = {options.adapter!r} too: name one")
    adapter = open_adapter(options.adapter or name, "adapter" if options.adapter else "model")
    base = find_base(adapter, None if names_adapter else name, "model", trust)
    if adapter.classifies:
        raise UserError(f"{str(adapter.path)!r} is the adapter of a classifier, which writes no text")
    _auto_class(base.config, base.name)
    option, place = ("adapter", str(adapter.path)) if adapter.has_tokenizer else (base.option, base.name)
    return base, adapter, load_named_tokenizer(option, place, base.config, trust)


def load_generator(base: AdapterBase, adapter: AdapterFolder | None, options: Any) -> PreTrainedModel:
    """Load the model onto its device, with its adapter if there is one. Raises UserError: the weights cannot be
    loaded, are incomplete, or do not fit the adapter."""
    device = accelerator()
    precision = options.precision or ("fp32" if device.type == "cpu" else None)
    reading = {"precision": precision, "trust_remote_code": options.trust_remote_code}
    if adapter:
        adapted, _ = load_with_adapter(adapter, base, quantised="keep", **reading)
        model = adapted.get_base_model()
        if (adapter.path / "generation_config.json").is_file():  # its settings for generation
            model.generation_config = GenerationConfig.from_pretrained(adapter.path)
    else:
        auto_class = _auto_class(base.config, base.name)
        model, missing = read_model(auto_class, base.option, base.name, base.config, **reading)
        if missing:
            raise UserError(f"model = {base.name!r} lacks {len(missing)} weights, such as {missing[0]}")
    if getattr(model, "hf_quantizer", None) is None:  # quantised weights are on their device already
        model.to(device)
    also = f" with the adapter {adapter.path}" if adapter else ""
    log_to_stderr(f"model {base.name}{also} in {str(model.dtype).removeprefix('torch.')} on {model.device}")
    return model


def _auto_class(config: PreTrainedConfig, name: str) -> Any:
    """Return the transformers class that loads the model. Raises UserError: the model does not generate text."""
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    non_generative = [kind for kind in config.architectures or () if kind.endswith(NON_GENERATIVE_SUFFIXES)]
    if non_generative or not has_model(auto_class, config):
        kind = non_generative[0] if non_generative else config.model_type
        raise UserError(f"model = {name!r} is a {kind}, which writes no text. Name one for CAUSAL_LM or SEQ_2_SEQ_LM")
    return auto_class


EMPTY_ANSWER = "[empty]"  # shown to a person instead of an empty answer


class PrintableStreamer(TextStreamer):
    """A streamer that prints text as it is generated, without control characters."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a part of the text that is final."""
        super().on_finalized_text(escape_controls(text), stream_end)


class Writer:
    """Generates text from the token ids of a rendered prompt. `model`: a PreTrainedModel that generates."""

    def __init__(self, model: Any, renderer: Renderer, options: "GenerateOptions"):
        self.positions = usable_positions(model.config)
        self.has_encoder = renderer.has_encoder
        tokenizer = renderer.tokenizer
        self.model = model
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.max_new_tokens = options.max_new_tokens
        defaults = model.generation_config
        stops = defaults.eos_token_id
        ends = [*stops] if isinstance(stops, list) else [stops]
        ends += [tokenizer.eos_token_id, *renderer.end_of_turn()]
        self.ends = sorted({token for token in ends if token is not None})
        samples = bool(options.do_sample or options.sampling)
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
        # Whether an answer has an end; the continuation of a plain text has none.
        self.ends_by_itself = self.has_encoder or renderer.uses_template
        self.forced = int(defaults.forced_eos_token_id is not None)  # 1: the last token is forced
        self.seed: int | None = None  # None: nothing is sampled
        if samples:
            self.seed = torch.seed() % 2**31 if options.seed is None else options.seed
            # transformers' defaults, where the model has none
            fallback = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
            values = {
                name: options.sampling.get(name) or getattr(defaults, name) or fallback[name] for name in fallback
            }
            shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
            log_to_stderr(f"note: drawn with {shown}, seed {self.seed}")

    def room(self, length: int) -> int:
        """Return the number of tokens that fit after a prompt of `length` tokens; zero or less: the prompt is too
        long."""
        if self.positions is None:
            return sys.maxsize
        if self.has_encoder:
            return self.positions - 1 if length <= self.positions else 0
        return self.positions - length

    def too_long(self, length: int) -> str:
        """Return the message for a prompt that is too long."""
        return f"the prompt has {length:,} tokens, and the model has {self.positions:,} positions. Make it shorter"

    def write(self, ids: list[int], number: int = 0) -> str:
        """Continue a prompt, print the text (token by token, unless with beam search) and return it.

        Args:
            ids: token ids of the prompt, which is not too long.
            number: number of the prompt, which is added to the seed.
        """
        limit = min(self.room(len(ids)), self.max_new_tokens)
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
            print(EMPTY_ANSWER if empty else escape_controls(text) if sys.stdout.isatty() else text, flush=True)
        return text


def complete(writer: Writer, prompts: list[Prompt], output: TextIO | None = None) -> None:
    """Continue each prompt by itself, and write a record of each to `output` if there is one. Raises UserError: a
    prompt is too long; raised before any is continued."""
    rows = []
    cut = []
    for number, prompt in enumerate(prompts, 1):
        rows.append(writer.renderer.ids(prompt))
        cut.append(writer.renderer.left_out)
        if writer.room(len(rows[-1])) <= 0:
            which = f"prompt {number} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise UserError(f"{which}{writer.too_long(len(rows[-1]))}")
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


def respond(options: "GenerateOptions") -> int:
    """Run `zerofit generate`. Returns the exit code."""
    silence_libraries()
    prompts = read_prompts(options)  # first find every mistake that can be found without the weights
    base, adapter, tokenizer = find_model(options)
    how = (options.chat_template, options.raw, options.system_prompt)
    languages = (options.source_lang, options.target_lang)
    renderer = Renderer(tokenizer, base.config, *how, languages=languages)
    chats = [prompt for prompt in prompts if isinstance(prompt, Conversation)]
    if options.chat or chats:
        renderer.check_conversations()
    if renderer.uses_template and not options.chat:
        log_to_stderr("note: prompts are rendered with the tokenizer's chat template; --raw takes them as they are")
    if renderer.uses_template:
        for note in unread_note([], (key for chat in chats for key in unread_keys(tokenizer, chat))):
            log_to_stderr(f"note: {note.removeprefix('note').strip()}")
    output = None
    if options.output is not None:
        path = Path(options.output).expanduser()
        if path.suffix != ".jsonl":
            raise UserError(f"output = {options.output!r}: expected the name of a .jsonl file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            output = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UserError(f"output = {options.output!r} cannot be written: {error.strerror}") from None
    writer = Writer(load_generator(base, adapter, options), renderer, options)
    if options.chat:
        converse(writer, read_stdin_lines())
    else:
        complete(writer, prompts, output)
    return 0


def read_prompts(options: "GenerateOptions") -> list[Prompt]:
    """Return the prompts of --prompt or --prompt_file; none with --chat. Raises UserError: the file cannot be read, or
    a record has no prompt."""
    if options.prompt_file is None:
        return list(options.prompt or ())
    where = f"prompt_file = {options.prompt_file!r}"
    path = Path(options.prompt_file).expanduser()
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"{where}: expected a .txt with a prompt in each line, or a .jsonl with one in each record")
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read: {error}") from None
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{where} is empty")
    if path.suffix == ".txt":
        return [line for _, line in numbered]
    return [_parse_prompt(line, f"{where}, line {number}") for number, line in numbered]


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        record = parse_json(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if has_lone_surrogate(record):
        raise UserError(f"{where}: a text has half of a surrogate pair (as \\ud83d alone), which is not a character")
    keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    name = next((name for name in ("prompt", "messages") if isinstance(record, dict) and record.get(name)), None)
    if name is None:
        raise UserError(f"{where} has no `prompt` and no `messages`; it has {keys}")
    try:
        template_arguments = template_values(record, tuple(name for name in TEMPLATE_ARGUMENTS if name in record))
        system = next(
            filter(None, (optional_text(record.get(column), f"its {column}") for column in SYSTEM_COLUMNS)), ""
        )
        if isinstance(record[name], str) and not (template_arguments or system):
            return str(record[name])
        messages = turns_in(record[name], "user", name)
    except BadRecord as bad:
        raise UserError(f"{where}: {bad}") from None
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    while messages and messages[-1]["role"] == "assistant":  # a known reply is generated again
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}: nobody has said anything that could be replied to")
    return Conversation(messages, template_arguments)


def read_stdin_lines() -> Iterator[str]:
    """Yield the lines that are typed, or come from a pipe."""
    if not sys.stdin.isatty():
        yield from map(str.strip, sys.stdin)
        return
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  gives input() line editing and a history
    log_to_stderr("an empty line ends, /reset forgets what was said")
    with suppress(EOFError):
        while True:
            yield input("> ").strip()


def converse(writer: Writer, lines: Iterator[str]) -> None:
    """Answer each line, given the conversation before it, until an empty line."""
    history: Messages = []
    renderer = writer.renderer
    for number, line in enumerate(lines):
        if not line:
            return
        if line == "/reset":
            history = []
            log_to_stderr("note: what was said is forgotten")
            continue
        messages = [*history, {"role": "user", "content": line}]
        ids, latest_messages = keep_latest_exchanges(messages, writer)
        if ids is None:
            log_to_stderr(f"note: {writer.too_long(len(renderer.ids(messages[-1:])))}; it is ignored")
            continue
        if len(latest_messages) < len(messages):
            log_to_stderr(
                f"note: exchanges that do not fit any more: the oldest {(len(messages) - len(latest_messages)) // 2}"
            )
        elif renderer.left_out:
            log_to_stderr(f"note: {renderer.left_out} tokens of what was said do not fit any more")
        reply = writer.write(ids, number)
        history = [*latest_messages, {"role": "assistant", "content": reply.strip()}]


def keep_latest_exchanges(messages: Messages, writer: Writer) -> tuple[list[int] | None, Messages]:
    """Return (token ids, messages) of the latest exchanges that leave room for a reply. They have at least the last
    message; ids are None where it is too long by itself."""
    reply_tokens = 1
    if writer.positions and not writer.has_encoder:
        reply_tokens = min(writer.max_new_tokens, writer.positions // 2)
    while True:
        ids = writer.renderer.ids(messages)
        room = writer.room(len(ids))
        if room >= reply_tokens:
            return ids, messages
        if len(messages) <= 2:
            return (ids if room > 0 else None), messages
        messages = messages[2:]
