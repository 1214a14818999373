"""A file of prompts is answered: in this process, or in several that are launched. A run that was killed goes on.

Prompts of similar length are answered together; batches do not depend on the number of processes, and neither do
answers. Each process appends its answers to the journal, which becomes the output when all are there.
"""

import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.data.rendering import Prompt, Renderer
from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.recipe.words import counted
from zerofit.record.jsonl import LineReader, add_line
from zerofit.record.terminal import StatusLine, duration, say_aside
from zerofit.strategy.gpus import num_devices
from zerofit.strategy.host_memory import usable_cores
from zerofit.strategy.named import find_strategies
from zerofit.tools.generate.generate_options import GenerateOptions
from zerofit.tools.generate.generation_model import ModelSource, check_shares, load
from zerofit.tools.generate.text_writer import Positions, Writer
from zerofit.tools.launch.launch import layout_of
from zerofit.tools.launch.schedulers import Machines
from zerofit.tools.launches import LAUNCHER, ending_in_order, failure, launched, mistake

PART = "ZEROFIT_GENERATE"  # a launched process is told with it who has asked, and what was answered before
SETTINGS = ("max_new_tokens", "num_beams", "do_sample", "temperature", "top_k", "top_p", "precision")
SHOWN_EVERY_S = 0.2


@dataclass(frozen=True)
class Asked:
    """Who answers what: all that is known without the weights."""

    source: ModelSource
    renderer: Renderer
    prompts: list[Prompt]


class AnswerJournal:
    """The answers so far, in the order in which they come: OUTPUT.partial, which a killed run leaves.

    Its first line says what was asked. Each other line is an answer, or the time at which a process began. Every
    process appends whole lines, so that a kill can break the last one only.

    Args:
        size: lines beyond this many bytes are not read; None: all are.
    """

    def __init__(self, output: Path, size: int | None = None):
        self.output, self.path = output, output.with_name(f"{output.name}.partial")
        self.header, self.lines, self.began = None, {}, []
        self._reader = LineReader(self.path)
        self.poll(size)

    def poll(self, size: int | None = None) -> None:
        """Read what has been appended: `lines` are {number of the prompt: its answer}, and `began` times."""
        for line in self._reader.poll(size):
            if self.header is None:
                self.header = line
            elif "began" in line:
                self.began.append(line["began"])
            else:
                self.lines[line["number"]] = line

    def start(self, asked: dict[str, Any]) -> int:
        """Begin the file, or continue it without a last line that is not whole. Returns its size.

        Raises:
            UserError: it answers something else, or cannot be written.
        """
        differing = [name for name in asked if self.lines and self.header.get(name) != asked[name]]
        if differing:
            raise UserError(
                f"output = {str(self.output)!r}: {self.path.name} holds {len(self.lines)} answers of a run with other "
                f"{', '.join(differing)}. Repeat its command to complete it, remove that file, or name another output"
            )
        try:
            if self.lines:
                self._reader.drop_rest()
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(self.path):
                    pass
                self._reader, self.header = LineReader(self.path), None
                add_line(self.path, asked)
                self.poll()
        except OSError as error:
            raise UserError(f"output = {str(self.output)!r} cannot be written: {error.strerror}") from None
        self.began = []
        return self._reader.position

    def begin(self, time: float) -> None:
        """Note that a process begins to answer."""
        add_line(self.path, {"began": time})

    def add(self, numbers: Iterable[int], answers: Iterable[tuple[str, int]]) -> None:
        """Append (text, its tokens) for each prompt."""
        for number, (text, tokens) in zip(numbers, answers):
            add_line(self.path, {"number": number, "generated": text, "tokens": tokens})

    def finish(self, records: list[dict[str, Any]]) -> None:
        """Write the answers in the order of the prompts to `output`, and remove this file."""
        with atomic_file(self.output) as file:
            for number, record in enumerate(records):
                line = {**record, "generated": self.lines[number]["generated"]}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.path.unlink()


def answer_file(asked: Asked, options: GenerateOptions, argv: list[str]) -> int:
    """Answer all prompts. Returns the exit code.

    Args:
        argv: the command line, for processes that are launched.

    Raises:
        UserError: so many processes cannot share the work here; the journal is that of another run.
    """
    check_processes(asked, options)
    rows, cut = Positions(asked.source.config).rows(asked.prompts, asked.renderer)
    if any(cut):
        say_aside(f"note: {sum(map(bool, cut))} of {len(rows)} prompts do not fit into a source, and are cut")
    journal = AnswerJournal(Path(options.output).expanduser())
    if options.samples and options.seed is None:
        options.seed = (journal.header or {}).get("seed", int.from_bytes(os.urandom(3)))
        argv = [*argv, "--seed", str(options.seed)]
    size = journal.start(_described(asked.source, options, rows))
    before = len(journal.lines)
    if before:
        say_aside(f"{before} of {len(rows)} prompts are answered already: {journal.path}")
    progress = Progress(journal, len(rows))
    try:
        if before == len(rows):
            code = 0
        elif options.processes > 1:
            code = _launch(options, argv, journal, size, progress)
        else:
            writer = Writer(load(asked.source, options), asked.source.tokenizer, options, asked.renderer.end_of_turn())
            answer_share(writer, rows, options, journal, after=progress.show)
            code = 0
    finally:
        progress.close()
        if len(journal.lines) < len(rows):
            say_aside(
                f"{len(journal.lines)} of {len(rows)} prompts are answered; the same command goes on with the others"
            )
    if code == 0:
        journal.finish([prompt.record for prompt in asked.prompts])
        rate = f" in {progress.seconds:.1f} s ({progress.rate})" if before < len(rows) else ""
        say_aside(f"{options.output}: {len(rows):,} prompts answered{rate}")
    return code


def answer_share(
    writer: Writer,
    rows: list[list[int]],
    options: GenerateOptions,
    journal: AnswerJournal,
    share=(0, 1),
    writes=True,
    after=lambda: None,
) -> None:
    """Answer each n-th of the batches that are left.

    Args:
        share: (which of them, n).
        writes: whether this process notes the answers, of those that compute the same.
        after: called after each batch.
    """
    batches = left_batches(batches_of(rows, writer, options.batch_size), journal, options.samples)
    if writes:
        journal.begin(time.time())
    for batch in batches[share[0] :: share[1]]:
        answers = writer.write_batch([rows[number] for number in batch], batch[0])
        if writes:
            journal.add(batch, answers)
        after()


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


def check_processes(asked: Asked, options: GenerateOptions) -> None:
    """Raises UserError where processes have no device each, or cannot share the layers of the model."""
    devices, processes = num_devices(), options.processes
    if 0 < devices < processes:
        raise UserError(
            f"num_processes = {processes}: this machine has {counted(devices, 'device')}. "
            f"Use --num_processes {devices}"
        )
    if options.tensor_parallel > 1:
        check_shares(asked.source, options)


def _described(source: ModelSource, options: GenerateOptions, rows: list[list[int]]) -> dict[str, Any]:
    """What answers depend on, for the journal: not on the number of processes."""
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


def _launch(options: GenerateOptions, argv: list[str], journal: AnswerJournal, size: int, progress: "Progress") -> int:
    """Let launched processes answer, and show how far they are. Returns the exit code.

    Raises:
        UserError: what a process has refused.
    """
    yaml, log = find_strategies(["ddp"])["ddp"], journal.path.with_suffix(".log")
    layout = layout_of(yaml, options.processes, Machines(1, None), 0)
    command = [*LAUNCHER, *layout, "--module", "zerofit.tools.generate.rank", *argv]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // options.processes))
    environment = {
        PART: json.dumps({"pid": os.getpid(), "size": size}),
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    shared = f", {options.tensor_parallel} share each layer" if options.tensor_parallel > 1 else ""
    drawn = f", drawn with seed {options.seed}" if options.samples else ""
    say_aside(f"{counted(options.processes, 'process')}{shared}{drawn}; their output is {log}")

    def watched(launch) -> bool:
        time.sleep(SHOWN_EVERY_S)
        progress.show()
        return False

    with ending_in_order(), launched(command, journal.path.parent, log, environment=environment) as launch:
        how = launch.wait(math.inf, watched)
    progress.show()
    problem = mistake(launch) or failure(launch, how)
    if mistake(launch):
        raise UserError(problem)
    if problem:
        print(f"error: the launch {problem}", file=sys.stderr, flush=True)
        return 1
    log.unlink()
    return 0


class Progress:
    """How far the answers are: prompts, time left, tokens/s since the first process began to answer."""

    def __init__(self, journal: AnswerJournal, total: int):
        self.journal, self.total, self.line = journal, total, StatusLine()
        self.before, self.ended = set(journal.lines), time.time()

    def show(self) -> None:
        """Read the journal, and show it if it is time to."""
        self.journal.poll()
        self.ended = time.time()
        if self.journal.began and self.line.is_due():
            done = len(self.journal.lines)
            new = done - len(self.before)
            left = [f"{duration(self.seconds / new * (self.total - done))} left"] if new else []
            self.line.show([f"{done:,}/{self.total:,} prompts", *left, self.rate])

    @property
    def seconds(self) -> float:
        return max(1e-9, self.ended - min(self.journal.began, default=self.ended))

    @property
    def rate(self) -> str:
        new = [line["tokens"] for number, line in self.journal.lines.items() if number not in self.before]
        return f"{sum(new) / self.seconds:,.0f} tokens/s"

    def close(self) -> None:
        self.journal.poll()
        self.line.close()
