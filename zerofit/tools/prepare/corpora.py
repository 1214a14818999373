"""One pass over the input of `zerofit prepare`: workers encode it, and the corpora are written in its order."""

import json
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from zerofit import __version__
from zerofit.data.encodings import proposal
from zerofit.data.megatron.corpus import Card, megatron, tokenizer_fingerprint
from zerofit.model.pretrained_io import silence_libraries
from zerofit.model.tokenizer import END_OF_TEXT, tokenizer_from_vocabulary_files
from zerofit.recipe.errors import UserError
from zerofit.recipe.parsing import counted
from zerofit.record.terminal import StatusLine, duration, size
from zerofit.tools.prepare.corpus_writer import ENDINGS, PARTIAL, CorpusWriter, check_free
from zerofit.tools.prepare.documents import InputFile, find_input, tasks_of
from zerofit.tools.prepare.encode import InputPart, Setup, encoder_of
from zerofit.tools.prepare.memo_rules import allows_memo, edge_case_texts
from zerofit.tools.prepare.named_tokenizer import named_tokenizer
from zerofit.tools.prepare.prepare_options import PrepareOptions
from zerofit.tools.prepare.workers import WorkerPool

SHOWN_BAD = 5  # bad lines that are shown where bad lines are skipped
WAYS = {"memo": "word memo", "whole": "whole documents", "slow": "a slow tokenizer"}


def prepare(options: PrepareOptions) -> list[str]:
    """Write the corpora. Returns lines for the terminal.

    Raises:
        UserError: anything is wrong; then no file is left.
    """
    start = str(Path(options.output_prefix).expanduser())
    prefixes = [f"{start}_{key}_document" for key in options.json_keys]
    check_free(prefixes, options.overwrite)
    outputs = [Path(prefix + ending + more) for prefix in prefixes for ending in ENDINGS for more in ("", PARTIAL)]
    files = find_input(options.input, omit=outputs)
    if any(file.kind == "text" for file in files) and options.json_keys != ["text"]:
        raise UserError(f"json_keys = {' '.join(options.json_keys)}: plain text has `text` only")
    silence_libraries()
    if options.vocab_file:
        tokenizer = tokenizer_from_vocabulary_files(options.vocab_file, options.merge_file)
        options.tokenizer = options.vocab_file  # its name in messages and in the corpus' card
    else:
        tokenizer = named_tokenizer("tokenizer", options.tokenizer, options.trust_remote_code)
    return _write(options, prefixes, files, tokenizer, setup_of(tokenizer, options))


# ----------------------------------------------------------------------------------------------------------- the setup


def setup_of(tokenizer, options: PrepareOptions) -> Setup:
    """The set-up of the workers, with the fastest way that gives the plain tokenizer's ids on edge-case texts.

    Raises:
        UserError: --append_eod, and the tokenizer has no end-of-text token.
    """
    end = tokenizer.eos_token_id if options.append_eod else None
    if options.append_eod and end is None:
        raise UserError(f"append_eod: {options.tokenizer!r} has no eos_token. Remove --append_eod, or set it there")
    dtype = np.dtype(megatron().indexed.DType.optimal_dtype(vocab_size(tokenizer))).name
    common = {"keys": tuple(options.json_keys), "dtype": dtype, "end": end, "skip_bad": options.skip_bad_lines}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content, special = backend.to_str(), bool(getattr(tokenizer, "split_special_tokens", False))
        parts = json.loads(content)
        added = [token["content"] for token in parts["added_tokens"]]
        for way in ["memo"] * (options.word_memo and allows_memo(parts)) + ["whole"]:
            setup = Setup(way=way, tokenizer=content, special=special, **common)
            if _is_exact(setup, tokenizer, edge_case_texts(added)):
                return setup
    return Setup(way="slow", tokenizer=pickle.dumps(tokenizer), special=False, **common)


def vocab_size(tokenizer) -> int:
    """One more than the largest id, and at least what transformers calls the length."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def _is_exact(setup: Setup, tokenizer, texts: list[str]) -> bool:
    expected = [list(tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    try:
        encoded = encoder_of(setup).encode(texts)
    except ValueError:
        return False
    return all(np.array(ids, setup.dtype).tobytes() == row for ids, row in zip(expected, encoded))


# ------------------------------------------------------------------------------------------------------------- the job


def _write(options: PrepareOptions, prefixes: list[str], files: list[InputFile], tokenizer, setup: Setup) -> list[str]:
    """One pass over the input, which writes all corpora. Returns lines for the terminal."""
    total, num_bad, shown = sum(file.size for file in files), 0, list[str]()
    with ExitStack() as stack:
        pool = stack.enter_context(WorkerPool(options.processes, setup))
        writers = [stack.enter_context(CorpusWriter(prefix, setup.dtype)) for prefix in prefixes]
        pool.start()
        line, started = stack.enter_context(closing(StatusLine())), time.perf_counter()
        for task, read, answer in pool.work(_tasks(files, setup, options)):
            if answer.num_bad and not options.skip_bad_lines:
                guess = f" {proposal(task.data)}" if "not UTF-8" in answer.bad[0] else ""
                raise UserError(f"{answer.bad[0]}.{guess} Correct it, or skip such lines with --skip_bad_lines")
            num_bad += answer.num_bad
            shown += answer.bad[: SHOWN_BAD - len(shown)]
            for writer, piece in zip(writers, answer.pieces):
                writer.add(piece.ids, piece.lengths, piece.largest)
            if line.is_due():
                line.show(_progress(min(1.0, read / max(1, total)), time.perf_counter() - started, writers))
        seconds = time.perf_counter() - started
        tokens = sum(writer.tokens for writer in writers)
        if not tokens:
            raise UserError(f"input = {' '.join(options.input)}: there is no text in it, so no corpus is written")
        for writer in writers:
            writer.finish(_card(writer, options, files, tokenizer, setup))
        for writer in writers:
            writer.publish()
    lines = [f"warning: skipped: {bad}" for bad in shown]
    for writer in writers:
        lines.append(
            f"{writer.prefix}: {writer.documents:,} documents ({writer.empty:,} empty), {writer.tokens:,} tokens, "
            f"{size(writer.tokens * writer.dtype.itemsize)} as {writer.dtype.name}"
        )
    lines.append(
        f"read {counted(len(files), 'file')} of {size(total)} in {duration(seconds)} ({seconds:.1f} s): "
        f"{tokens / max(seconds, 1e-9):,.0f} tokens/s, {counted(options.processes, 'worker')}, {WAYS[setup.way]}; "
        f"{counted(num_bad, 'bad line')}"
    )
    if setup.end is None and tokenizer.eos_token_id is not None:
        lines.append(f"hint: nothing marks where a document ends. --append_eod adds {tokenizer.eos_token}")
    return lines


def _tasks(files: list[InputFile], setup: Setup, options: PrepareOptions) -> Iterator[tuple[InputPart, int]]:
    """The parts of all files, each with the bytes of the input read so far."""
    before = 0
    for file in files:
        for task, read in tasks_of(file, setup.keys, options.document_separator, END_OF_TEXT, options.encoding):
            yield task, before + read
        before += file.size


def _card(writer: CorpusWriter, options: PrepareOptions, files: list[InputFile], tokenizer, setup: Setup) -> Card:
    return Card(
        tokenizer=options.tokenizer,
        fingerprint=tokenizer_fingerprint(tokenizer),
        vocab_size=vocab_size(tokenizer),
        eod=setup.end,
        documents=writer.documents,
        tokens=writer.tokens,
        largest_id=writer.largest,
        sources=[str(file.path) for file in files],
        made_by=f"zerofit {__version__}",
    )


def _progress(fraction: float, seconds: float, writers: list[CorpusWriter]) -> list[str]:
    """The pieces of a status line, when this fraction of the input is read."""
    documents, tokens = writers[0].documents, sum(writer.tokens for writer in writers)
    return [
        f"{fraction:6.1%}",
        *([f"{duration(seconds * (1 - fraction) / fraction)} left"] if fraction else []),
        f"{tokens:,} tokens ({tokens / seconds:,.0f}/s)",
        f"{documents:,} documents",
    ]
