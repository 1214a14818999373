"""One pass over the input of `zerofit prepare`: workers encode it, and the corpora are written in its order."""

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
from zerofit.tools.prepare.documents import CorpusWriter, check_free, find_input, parts_of
from zerofit.tools.prepare.encode import Encoder, Workers

EDGE_CASES = (" ", "\n", "a b  c \r\n\n d", " naïve e\u0301 日本語、", "\u2581a \xa0 I'LL 3.14 x" + "x" * 70)
SELF_DESCRIBING = {"tokenizer.json", "tokenizer_config.json"}  # files that name the kind of a folder's tokenizer
SHOWN_BAD = 5  # bad records that are shown where bad ones are skipped


def prepare_corpora(options: Any) -> list[str]:
    """Write the corpora. Returns lines for the terminal. `options`: PrepareOptions, whose module imports this one."""
    start = str(Path(options.output_prefix).expanduser())
    prefixes = [f"{start}_{key}_document" for key in options.json_keys]
    check_free(prefixes, options.overwrite)
    files = find_input(options.input)
    if "text" in files.values() and options.json_keys != ["text"]:
        raise UserError(f"json_keys = {' '.join(options.json_keys)}: plain text has `text` only")
    silence_libraries()
    if options.vocab_file and options.merge_file:
        tokenizer = tokenizer_from_vocabulary_files(options.vocab_file, options.merge_file)
        options.tokenizer = options.vocab_file  # its name in messages and in the corpus' card
    else:
        tokenizer = named_tokenizer(options.tokenizer, options.trust_remote_code)
    encoder = encoder_of(tokenizer, options)
    data = DataOptions.of(ClmRecipe(encoding=options.encoding))
    num_bad = 0
    shown: list[str] = []
    with ExitStack() as stack:
        writers = [stack.enter_context(CorpusWriter(prefix, encoder.dtype)) for prefix in prefixes]
        workers = stack.enter_context(Workers(options.workers or usable_cores(), encoder))
        line = stack.enter_context(closing(StatusLine()))
        started = time.perf_counter()
        names = [str(file) for file in files]
        separator = options.document_separator
        parts = (part for file, kind in files.items() for part in parts_of(file, kind, data, encoder.keys, separator))
        for part, (columns, bad) in workers.encode(parts):
            if bad and not options.skip_bad_lines:
                is_encoded = "not UTF-8" in bad[0]
                guess = f" {propose_encodings(b''.join(record for _, record in part.records))}" if is_encoded else ""
                raise UserError(f"{bad[0]}.{guess} Correct it, or skip such lines with --skip_bad_lines")
            num_bad += len(bad)
            shown += bad[: SHOWN_BAD - len(shown)]
            for writer, documents in zip(writers, columns):
                writer.add(documents)
            if line.is_due():
                where = f"file {names.index(part.file) + 1} of {len(names)}"
                line.show([where, f"{sum(writer.tokens for writer in writers):,} tokens"])
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
    lines = [f"warning: skipped: {bad}" for bad in shown]
    for writer in writers:
        lines.append(
            f"{writer.prefix}: {writer.documents:,} documents ({writer.empty:,} empty), {writer.tokens:,} tokens, "
            f"{size(writer.tokens * writer.dtype.itemsize)} as {writer.dtype.name}"
        )
    read = f"read {counted(len(files), 'file')} in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s"
    lines.append(f"{read}, {counted(num_bad, 'bad line')}")
    if encoder.end is None and tokenizer.eos_token_id is not None:
        lines.append(f"hint: nothing marks where a document ends. --append_eod adds {tokenizer.eos_token}")
    return lines


def named_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, of a hub name, or in a tokenizer.model: the one that training loads from there.

    Bare vocabulary files do not say which kind of tokenizer they are for. A config.json beside them says it, as in
    training; without one, vocab.json and merges.txt are GPT-2's, and a tokenizer.model is a Llama's.

    Raises:
        UserError: there is none, or it cannot be loaded.
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
        is_bare = model.name in files and not files & SELF_DESCRIBING
        if is_bare and (read_tiktoken_ranks(model) or "config.json" not in files):
            return load_meta_tokenizer(model)
    return load_named_tokenizer("tokenizer", name, config, trust_remote_code)


def encoder_of(tokenizer: PreTrainedTokenizerBase, options: Any) -> Encoder:
    """The encoder of the workers: the native tokenizer where it gives the same ids on edge-case texts. Raises
    UserError: --append_eod, and the tokenizer has no end-of-text token."""
    end = tokenizer.eos_token_id if options.append_eod else None
    if options.append_eod and end is None:
        raise UserError(f"append_eod: {options.tokenizer!r} has no eos_token. Remove --append_eod, or set it there")
    dtype = np.dtype(import_megatron().indexed.DType.optimal_dtype(vocab_size(tokenizer))).name
    special = bool(getattr(tokenizer, "split_special_tokens", False))
    settings = (special, tuple(options.json_keys), dtype, end, options.skip_bad_lines)
    plain = Encoder(tokenizer, *settings)
    native = getattr(tokenizer, "backend_tokenizer", None)
    if native is None:
        return plain
    native = type(native).from_str(native.to_str())
    native.no_truncation()
    native.no_padding()
    added = list(tokenizer.get_added_vocab())[:16]
    fast = Encoder(native, *settings)
    texts = ["", *EDGE_CASES, *added, *(f"a  {token} b{token}c" for token in added)]
    return fast if fast.ids(texts) == plain.ids(texts) else plain


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id, and at least what transformers calls the length."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
