"""A file of prompts is answered, prompts of similar length together. A run that was killed goes on: answers are
appended to a journal, which becomes the output when all are there."""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.data.rendering import Prompt, Renderer
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.record.jsonl import LineReader, add_line
from zerofit.record.terminal import StatusLine, duration, say_aside
from zerofit.tools.generate.generate_options import GenerateOptions
from zerofit.tools.generate.generation_model import ModelSource, load
from zerofit.tools.generate.text_writer import Positions, Writer

SETTINGS = ("max_new_tokens", "num_beams", "do_sample", "temperature", "top_k", "top_p", "precision")


@dataclass(frozen=True)
class Asked:
    """Who answers what: all that is known without the weights."""

    source: ModelSource
    renderer: Renderer
    prompts: list[Prompt]


class AnswerJournal:
    """The answers so far, in the order in which they come: OUTPUT.partial, which a killed run leaves.

    Its first line says what was asked, each other line is an answer: `lines` are {number of the prompt: its answer}.
    """

    def __init__(self, output: Path):
        self.output, self.path = output, output.with_name(f"{output.name}.partial")
        self._reader = LineReader(self.path)
        self.header, *answers = self._reader.poll() or [None]
        self.lines = {line["number"]: line for line in answers}

    def start(self, asked: dict[str, Any]) -> None:
        """Begin the file, or continue it without a last line that is not whole.

        Raises:
            UserError: it answers something else, or cannot be written.
        """
        differing = [name for name in asked if self.lines and self.header.get(name) != asked[name]]
        if differing:
            raise UserError(
                f"output = {str(self.output)!r}: {self.path.name} has another {', '.join(differing)}. Remove it"
            )
        try:
            if self.lines:
                self._reader.drop_rest()
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(self.path):
                    pass
                add_line(self.path, asked)
        except OSError as error:
            raise UserError(f"output = {str(self.output)!r} cannot be written: {error.strerror}") from None

    def add(self, numbers: Iterable[int], answers: Iterable[tuple[str, int]]) -> None:
        """Append (text, its tokens) for each prompt."""
        for number, (text, tokens) in zip(numbers, answers):
            self.lines[number] = {"number": number, "generated": text, "tokens": tokens}
            add_line(self.path, self.lines[number])

    def finish(self, records: list[dict[str, Any]]) -> None:
        """Write the answers in the order of the prompts to `output`, and remove this file."""
        with atomic_file(self.output) as file:
            for number, record in enumerate(records):
                line = {**record, "generated": self.lines[number]["generated"]}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.path.unlink()


def answer_file(asked: Asked, options: GenerateOptions) -> int:
    """Answer all prompts. Returns the exit code.

    Raises:
        UserError: the journal is that of another run.
    """
    rows, cut = Positions(asked.source.config).rows(asked.prompts, asked.renderer)
    if any(cut):
        say_aside(f"note: {sum(map(bool, cut))} of {len(rows)} prompts do not fit into a source, and are cut")
    journal = AnswerJournal(Path(options.output).expanduser())
    if options.samples and options.seed is None:
        options.seed = (journal.header or {}).get("seed", int.from_bytes(os.urandom(3)))
    journal.start(_described(asked.source, options, rows))
    before = len(journal.lines)
    if before:
        say_aside(f"{before} of {len(rows)} prompts are answered already: {journal.path}")
    progress = Progress(journal, len(rows))
    try:
        if before < len(rows):
            writer = Writer(load(asked.source, options), asked.source.tokenizer, options, asked.renderer.end_of_turn())
            progress.began = time.monotonic()
            batches = left_batches(batches_of(rows, writer, options.batch_size), journal, options.samples)
            for batch in batches:
                journal.add(batch, writer.write_batch([rows[number] for number in batch], batch[0]))
                progress.show()
    finally:
        progress.line.close()
        if len(journal.lines) < len(rows):
            say_aside(
                f"{len(journal.lines)} of {len(rows)} prompts are answered; the same command goes on with the others"
            )
    journal.finish([prompt.record for prompt in asked.prompts])
    rate = f" in {progress.seconds:.1f} s ({progress.rate})" if before < len(rows) else ""
    say_aside(f"{options.output}: {len(rows):,} prompts answered{rate}")
    return 0


def batches_of(rows: list[list[int]], writer: Writer, batch_size: int) -> list[list[int]]:
    """The numbers of the prompts of each batch, the longest prompts first. All of a batch may be given as many tokens.

    In the order of their length the last batches are short ones, and what does not fit into memory shows at once.
    """
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    groups = [list(group) for _, group in itertools.groupby(order, key=lambda number: writer.limit(len(rows[number])))]
    return [group[at : at + batch_size] for group in groups for at in range(0, len(group), batch_size)]


def left_batches(batches: list[list[int]], journal: AnswerJournal, samples: bool) -> list[list[int]]:
    """The batches without what is answered already. What a batch draws depends on all of its rows."""
    left = [[number for number in batch if number not in journal.lines] for batch in batches]
    return [batch if samples else rest for batch, rest in zip(batches, left) if rest]


def _described(source: ModelSource, options: GenerateOptions, rows: list[list[int]]) -> dict[str, Any]:
    """What answers depend on, for the journal."""
    folders = [Path(source.name), *([source.adapter.path] if source.adapter else [])]
    state = [
        (str(file.name), file.stat().st_size, file.stat().st_mtime_ns)
        for folder in folders
        if folder.is_dir()
        for file in sorted(folder.iterdir())
    ]
    drawn = {"seed": options.seed, "batch_size": options.batch_size} if options.samples else {}
    return {
        "prompts": _digest(rows),
        "model": _digest([list(map(str, folders)), state]),
        **{name: getattr(options, name) for name in SETTINGS},
        **drawn,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


class Progress:
    """How far the answers are: prompts, time left, tokens/s since the first one was begun."""

    def __init__(self, journal: AnswerJournal, total: int):
        self.journal, self.total, self.line = journal, total, StatusLine()
        self.before, self.began = set(journal.lines), time.monotonic()

    def show(self) -> None:
        if self.line.is_due():
            done = len(self.journal.lines)
            left = duration(self.seconds / (done - len(self.before)) * (self.total - done))
            self.line.show([f"{done:,}/{self.total:,} prompts", f"{left} left", self.rate])

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self.began)

    @property
    def rate(self) -> str:
        new = [line["tokens"] for number, line in self.journal.lines.items() if number not in self.before]
        return f"{sum(new) / self.seconds:,.0f} tokens/s"
