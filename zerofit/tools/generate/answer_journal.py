"""The answers so far, in the order in which they come: OUTPUT.partial, which a killed run leaves.

Its first line says what was asked. Each other line is an answer, or the time at which a process began. Every process
appends whole lines, so that a kill can break the last one only.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import atomic_file
from zerofit.record.jsonl import LineReader, add_line


class AnswerJournal:
    """The file beside `output`.

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
