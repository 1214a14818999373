"""`zerofit prepare`: text to corpora in Megatron's format (.bin and .idx), ready to be mapped into memory.

    zerofit prepare --input 'texts/**/*.jsonl' --output_prefix corpora/wiki --tokenizer gpt2 --append_eod
    zerofit prepare merge --input corpora/a_text_document corpora/b_text_document --output_prefix corpora/both
    zerofit prepare info --input corpora/wiki_text_document

The files are byte for byte what Megatron-LM's tools/preprocess_data.py makes of the same documents and tokenizer, for
any number of workers. Parts of the input go to worker processes (worker_pool.py), which cut them into documents
(cutting.py) and encode these (encode.py). The answers are written here, in the order of the input.
"""

import json
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from zerofit.data.encodings import proposal
from zerofit.recipe.errors import EXIT_USER_ERROR, UserError, nearest
from zerofit.recipe.megatron_flags import PREPARE_HINTS
from zerofit.recipe.parse import parse_recipe
from zerofit.recipe.words import counted
from zerofit.record.terminal import say
from zerofit.tools.prepare.encode import InputPart, Setup, encoder_of
from zerofit.tools.prepare.memo_rules import allows_memo, edge_case_texts
from zerofit.tools.prepare.options import InfoOptions, JoinOptions, PrepareOptions

SHOWN_BAD = 5  # bad lines that are shown where bad lines are skipped
EXIT_TERMINATED = 128 + signal.SIGTERM
MORE = """
Also: zerofit prepare merge   several corpora, one after another, as one
      zerofit prepare info    what corpora hold, and whether they are complete"""


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in ("merge", "info"):
        from zerofit.tools.prepare import merge_and_info as tools

        kind, run = {"merge": (JoinOptions, tools.join), "info": (InfoOptions, tools.info)}[argv[0]]
        options = parse_recipe(kind, argv[1:], prog=f"zerofit prepare {argv[0]}", tool=True, hints=PREPARE_HINTS)
        with _ended_in_order():
            return run(options)
    if argv and not argv[0].startswith("-"):
        close = nearest(argv[0], ("merge", "info"))
        remedy = (
            f"Did you mean {close}?"
            if close
            else "Type zerofit prepare --input ..., or zerofit prepare merge, or info"
        )
        raise UserError(f"zerofit prepare {argv[0]}: there is no such command. {remedy}")
    try:
        options = parse_recipe(PrepareOptions, argv, prog="zerofit prepare", tool=True, hints=PREPARE_HINTS)
    except SystemExit:
        print(MORE)
        raise
    if not argv:
        return EXIT_USER_ERROR
    with _ended_in_order():
        say(*prepare(options))
    return 0


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM end the job as Ctrl-C does: its unfinished files are removed."""

    def stop(*_: object) -> None:
        raise SystemExit(EXIT_TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def prepare(options: PrepareOptions) -> list[str]:
    """Write the corpora. Returns lines for the terminal.

    Raises:
        UserError: anything is wrong; then no file is left.
    """
    from zerofit.model.families.gpt2 import tokenizer_from_vocabulary_files
    from zerofit.model.pretrained_io import silence_libraries
    from zerofit.tools.prepare.documents import find_input
    from zerofit.tools.prepare.named_tokenizer import named_tokenizer
    from zerofit.tools.prepare.writer import ENDINGS, PARTIAL, check_free

    start = str(Path(options.output_prefix).expanduser())
    prefixes = [f"{start}_{key}_document" for key in options.json_keys]
    check_free(prefixes, options.overwrite)
    outputs = [Path(prefix + ending + more) for prefix in prefixes for ending in ENDINGS for more in ("", PARTIAL)]
    files, notes = find_input(options.input, omit=outputs)
    if any(file.kind == "text" for file in files) and options.json_keys != ["text"]:
        raise UserError(
            f"json_keys = {' '.join(options.json_keys)}: plain text has no keys, so it goes with `text` only"
        )
    silence_libraries()
    if options.vocab_file:
        tokenizer = tokenizer_from_vocabulary_files(options.vocab_file, options.merge_file)
        options.tokenizer = options.vocab_file  # its name in messages and in the corpus' card
    else:
        tokenizer = named_tokenizer("tokenizer", options.tokenizer, options.trust_remote_code)
    return notes + PrepareJob(options, prefixes, files, tokenizer).run()


# ----------------------------------------------------------------------------------------------------------- the setup


def setup_of(tokenizer, options: PrepareOptions) -> Setup:
    """The set-up of the workers, with the fastest way that gives the plain tokenizer's ids on edge-case texts.

    Raises:
        UserError: --append_eod, and the tokenizer has no end-of-text token.
    """
    from zerofit.data.megatron.corpus import megatron

    end = tokenizer.eos_token_id if options.append_eod else None
    if options.append_eod and end is None:
        raise UserError(
            f"append_eod: the tokenizer {options.tokenizer!r} has no end-of-text token (eos_token). Remove "
            "--append_eod, or set eos_token in its tokenizer_config.json"
        )
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


class PrepareJob:
    """One pass over the input."""

    def __init__(self, options: PrepareOptions, prefixes: list[str], files: list, tokenizer):
        self.options, self.prefixes, self.files, self.tokenizer = options, prefixes, files, tokenizer
        self.num_bad, self.bad = 0, []
        self.setup = setup_of(tokenizer, options)

    def run(self) -> list[str]:
        """Write all corpora. Returns lines for the terminal."""
        from zerofit.tools.prepare.progress import Meter
        from zerofit.tools.prepare.worker_pool import WorkerPool
        from zerofit.tools.prepare.writer import CorpusWriter

        total = sum(file.size for file in self.files)
        with ExitStack() as stack:
            pool = stack.enter_context(WorkerPool(self.options.processes, self.setup))
            writers = [stack.enter_context(CorpusWriter(prefix, self.setup.dtype)) for prefix in self.prefixes]
            pool.start()
            meter = stack.enter_context(Meter(total))
            for task, read, answer in pool.work(self._tasks()):
                self._take_note(answer, task)
                for writer, piece in zip(writers, answer.pieces):
                    writer.add(piece.ids, piece.lengths, piece.largest)
                meter.show(read, writers[0].documents, sum(writer.tokens for writer in writers))
            seconds = meter.stop()
            if not any(writer.tokens for writer in writers):
                raise UserError(
                    f"input = {' '.join(self.options.input)}: there is no text in it, so no corpus is written"
                )
            for writer in writers:
                writer.finish(self._card(writer))
            for writer in writers:
                writer.publish()
        return self._summary(writers, seconds)

    def _tasks(self) -> Iterator[tuple[InputPart, int]]:
        """The parts of all files, each with the bytes of the input read so far."""
        from zerofit.model.families.gpt2 import END_OF_TEXT
        from zerofit.tools.prepare.documents import tasks_of

        before = 0
        for file in self.files:
            separator, encoding = self.options.document_separator, self.options.encoding
            for task, read in tasks_of(file, self.setup.keys, separator, END_OF_TEXT, encoding):
                yield task, before + read
            before += file.size

    def _take_note(self, answer, task: InputPart) -> None:
        if answer.num_bad and not self.options.skip_bad_lines:
            if "not UTF-8" in answer.bad[0]:
                raise UserError(f"{answer.bad[0]}. {proposal(task.data)}, or skip such lines: --skip_bad_lines")
            raise UserError(f"{answer.bad[0]}. Correct it, or skip such lines with --skip_bad_lines")
        self.num_bad += answer.num_bad
        self.bad += answer.bad[: SHOWN_BAD - len(self.bad)]

    def _card(self, writer):
        from zerofit import __version__
        from zerofit.data.megatron.corpus import Card, tokenizer_fingerprint

        return Card(
            tokenizer=self.options.tokenizer,
            fingerprint=tokenizer_fingerprint(self.tokenizer),
            vocab_size=vocab_size(self.tokenizer),
            eod=self.setup.end,
            documents=writer.documents,
            tokens=writer.tokens,
            largest_id=writer.largest,
            sources=[str(file.path) for file in self.files],
            made_by=f"zerofit {__version__}",
        )

    def _summary(self, writers: list, seconds: float) -> list[str]:
        from zerofit.record.terminal import duration, size

        lines = [f"warning: skipped: {bad}" for bad in self.bad]
        if self.num_bad > len(self.bad):
            lines.append(f"warning: and {self.num_bad - len(self.bad):,} more bad lines were skipped")
        for writer in writers:
            lines.append(
                f"{writer.prefix}: {writer.documents:,} documents ({writer.empty:,} empty), {writer.tokens:,} tokens, "
                f"{size(writer.tokens * writer.dtype.itemsize)} as {writer.dtype.name}"
            )
        tokens = sum(writer.tokens for writer in writers)
        read = sum(file.size for file in self.files)
        ways = {"memo": "word memo", "whole": "whole documents", "slow": "a slow tokenizer"}
        lines.append(
            f"read {counted(len(self.files), 'file')} of {size(read)} in {duration(seconds)} ({seconds:.1f} s): "
            f"{tokens / max(seconds, 1e-9):,.0f} tokens/s, {counted(self.options.processes, 'worker')}, "
            f"{ways[self.setup.way]}; {counted(self.num_bad, 'bad line')}"
        )
        if self.setup.end is None and self.tokenizer.eos_token_id is not None:
            lines.append(
                f"hint: documents do not end with {self.tokenizer.eos_token} (--append_eod), so that in training "
                "nothing tells a model where one ends and the next begins"
            )
        return lines
