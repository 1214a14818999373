"""The main process of `zerofit prepare`: workers encode the input, and the corpora are written in its order."""

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GPT2Config, PreTrainedTokenizerBase

from zerofit import __version__
from zerofit.data.delimited_files import propose_encodings
from zerofit.data.megatron import CorpusCard, import_megatron, tokenizer_fingerprint
from zerofit.data.options import DataOptions
from zerofit.model.configuration import model_folder
from zerofit.model.pretrained_io import silence_libraries
from zerofit.model.tokenizer import load_named_tokenizer, tokenizer_from_vocabulary_files
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import counted
from zerofit.recipe.tasks import ClmRecipe
from zerofit.record.terminal import StatusLine, size
from zerofit.strategy.host_memory import usable_cores
from zerofit.tools.meta_tokenizer import load_meta_tokenizer, read_tiktoken_ranks
from zerofit.tools.prepare.documents import CorpusWriter, check_output_free, find_input_files, read_chunks
from zerofit.tools.prepare.encode import Encoder, Workers

EDGE_CASE_TEXTS = (" ", "\n", "a b  c \r\n\n d", " naïve e\u0301 日本語、", "\u2581a \xa0 I'LL 3.14 x" + "x" * 70)
TOKENIZER_KIND_FILES = {"tokenizer.json", "tokenizer_config.json"}  # files that name the kind of a folder's tokenizer
MAX_SHOWN_BAD_LINES = 5  # with --skip_bad_lines


def prepare_corpora(options: Any) -> list[str]:
    """Write the corpora. Returns lines for the terminal. `options`: PrepareOptions, whose module imports this one."""
    start = str(Path(options.output_prefix).expanduser())
    prefixes = [f"{start}_{key}_document" for key in options.json_keys]
    check_output_free(prefixes, options.overwrite)
    files = find_input_files(options.input)
    if "text" in files.values() and options.json_keys != ["text"]:
        raise UserError(f"json_keys = {' '.join(options.json_keys)}: plain text has `text` only")
    silence_libraries()
    if options.vocab_file and options.merge_file:
        tokenizer = tokenizer_from_vocabulary_files(options.vocab_file, options.merge_file)
        options.tokenizer = options.vocab_file  # its name in messages and in the corpus' card
    else:
        tokenizer = load_prepare_tokenizer(options.tokenizer, options.trust_remote_code)
    encoder = make_encoder(tokenizer, options)
    data = DataOptions.of(ClmRecipe(encoding=options.encoding))
    num_bad = 0
    shown_bad: list[str] = []
    with ExitStack() as stack:
        writers = [stack.enter_context(CorpusWriter(prefix, encoder.dtype)) for prefix in prefixes]
        workers = stack.enter_context(Workers(options.workers or usable_cores(), encoder))
        line = stack.enter_context(closing(StatusLine()))
        started = time.perf_counter()
        names = [str(file) for file in files]
        arguments = (data, encoder.keys, options.document_separator)
        chunks = (chunk for file, kind in files.items() for chunk in read_chunks(file, kind, *arguments))
        for chunk, (columns, bad) in workers.encode(chunks):
            if bad and not options.skip_bad_lines:
                is_encoded = "not UTF-8" in bad[0]
                guess = f" {propose_encodings(b''.join(record for _, record in chunk.records))}" if is_encoded else ""
                raise UserError(f"{bad[0]}.{guess} Correct it, or skip such lines with --skip_bad_lines")
            num_bad += len(bad)
            shown_bad += bad[: MAX_SHOWN_BAD_LINES - len(shown_bad)]
            for writer, documents in zip(writers, columns):
                writer.add(documents)
            if line.is_due():
                position = f"file {names.index(chunk.file) + 1} of {len(names)}"
                line.show([position, f"{sum(writer.tokens for writer in writers):,} tokens"])
        seconds = time.perf_counter() - started
        tokens = sum(writer.tokens for writer in writers)
        if not tokens:
            raise UserError(f"input = {' '.join(options.input)}: there is no text in it, so no corpus is written")
        fingerprint = tokenizer_fingerprint(tokenizer)
        rows = vocab_size(tokenizer)
        card = CorpusCard(options.tokenizer, fingerprint, rows, encoder.end, 0, 0, 0, names, f"zerofit {__version__}")
        for writer in writers:
            writer.finish(card)
        for writer in writers:
            writer.publish()
    lines = [f"warning: skipped: {problem}" for problem in shown_bad]
    for writer in writers:
        lines.append(
            f"{writer.prefix}: {writer.documents:,} documents ({writer.empty:,} empty), {writer.tokens:,} tokens, "
            f"{size(writer.tokens * writer.dtype.itemsize)} as {writer.dtype.name}"
        )
    speed = f"read {counted(len(files), 'file')} in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s"
    lines.append(f"{speed}, {counted(num_bad, 'bad line')}")
    if encoder.end is None and tokenizer.eos_token_id is not None:
        lines.append(f"hint: nothing marks where a document ends. --append_eod adds {tokenizer.eos_token}")
    return lines


def load_prepare_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, a hub name or a tokenizer.model: the same one as training loads from there.

    Vocabulary files alone do not say which kind of tokenizer they are for. A config.json beside them says it, as in
    training; without it, vocab.json and merges.txt are GPT-2's, and a tokenizer.model is a Llama's.

    Raises:
        UserError: there is no tokenizer, or it cannot be loaded.
    """
    path = Path(name).expanduser()
    config = None
    if path.is_file():
        if path.suffix in (".json", ".txt"):
            raise UserError(f"tokenizer = {str(path)!r} is one file of a tokenizer. Name its folder: {path.parent}")
        return load_meta_tokenizer(path)
    if path.is_dir():
        name = model_folder(name)
        files = {file.name for file in Path(name).iterdir()}
        model = Path(name) / "tokenizer.model"
        config = GPT2Config() if "vocab.json" in files else None
        is_bare = model.name in files and not files & TOKENIZER_KIND_FILES
        if is_bare and (read_tiktoken_ranks(model) or "config.json" not in files):
            return load_meta_tokenizer(model)
    return load_named_tokenizer("tokenizer", name, config, trust_remote_code)


def make_encoder(tokenizer: PreTrainedTokenizerBase, options: Any) -> Encoder:
    """Make the encoder of the workers, with the tokenizers library's tokenizer if it gives the same ids on edge-case
    texts. Raises UserError: --append_eod is set, and the tokenizer has no end-of-text token."""
    end = tokenizer.eos_token_id if options.append_eod else None
    if options.append_eod and end is None:
        raise UserError(f"append_eod: {options.tokenizer!r} has no eos_token. Remove --append_eod, or set it there")
    dtype = np.dtype(import_megatron().indexed.DType.optimal_dtype(vocab_size(tokenizer))).name
    special = bool(getattr(tokenizer, "split_special_tokens", False))
    settings = (special, tuple(options.json_keys), dtype, end, options.skip_bad_lines)
    slow = Encoder(tokenizer, *settings)
    native = getattr(tokenizer, "backend_tokenizer", None)
    if native is None:
        return slow
    native = type(native).from_str(native.to_str())
    native.no_truncation()
    native.no_padding()
    added = list(tokenizer.get_added_vocab())[:16]
    fast = Encoder(native, *settings)
    texts = ["", *EDGE_CASE_TEXTS, *added, *(f"a  {token} b{token}c" for token in added)]
    return fast if fast.ids(texts) == slow.ids(texts) else slow


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one, but at least the tokenizer's length."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
