"""Files of one JSON object per line: those of a run's updates, and those to which several processes append."""

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerofit.recipe.files import atomic_file, open_without_links
from zerofit.recipe.parsing import object_of

Parse = Callable[[bytes], dict[str, Any] | None]


class JsonlFile:
    """A .jsonl file; each line is of one update, and is handed to the system before the next is written.

    Lines that the disk has no room for wait in memory, and are written as soon as there is some.

    Args:
        parse: the bytes of a line -> its object, which has an `update`; None: it is damaged, and passed over.
    """

    def __init__(self, path: Path, parse: Parse | None = None):
        self.path, self._parse = path, parse or line_of_update
        self._file: io.FileIO | None = None
        self._waiting = b""

    def start(self, updates: int = 0) -> None:
        """Start the file again, with the lines up to this update."""
        kept = [line for line in self.read() if line["update"] <= updates] if updates else []
        self.close()
        self._waiting = b""
        with atomic_file(self.path) as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line. NaN and infinity are written as such: they are never hidden."""
        self._waiting += (json.dumps(line, ensure_ascii=False) + "\n").encode()
        try:
            self._write()
        except OSError:  # a full disk is not a reason to end a run, nor to lose the line
            return

    def _open(self) -> io.FileIO:
        """Open the file to append, without a last line that a kill has left half."""
        file = os.fdopen(open_without_links(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)
        content = self.path.read_bytes()
        file.truncate(content.rfind(b"\n") + 1)
        return file

    def _write(self) -> None:
        if self._file is None:
            self._file = self._open()
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def sync(self) -> None:
        """Flush the lines so far to the disk, as far as it takes them."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a quota of a network file system, for instance
                os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """The lines so far, without any that is not whole: what follows the last line break is left by a kill."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        return [line for text in content.split(b"\n")[:-1] if (line := self._parse(text)) is not None]

    def close(self) -> None:
        """No line comes any more. Raises OSError where some could not be written."""
        try:
            if self._waiting:
                self._write()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None


def add_line(file: Path, line: dict[str, Any]) -> None:
    """Append a line with a single write: several ranks may append at the same time."""
    data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    descriptor = open_without_links(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


class LineReader:
    """The whole lines of a file to which others append. Each is returned once.

    Attributes:
        position: bytes that were read.
    """

    def __init__(self, file: Path, parse: Parse = json.loads):
        self.file, self.position, self._parse = file, 0, parse

    def poll(self) -> list[dict[str, Any]]:
        """The lines that were added since the last call."""
        try:
            with self.file.open("rb") as lines:
                lines.seek(self.position)
                whole, line_break, _ = lines.read().rpartition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            return []
        self.position += len(whole) + len(line_break)
        return [line for text in whole.split(b"\n") if text and (line := self._parse(text)) is not None]

    def drop_rest(self) -> None:
        """Remove what follows the lines that were read: a writer that was killed has left it."""
        if self.file.is_file():
            descriptor = open_without_links(self.file, os.O_RDWR)
            os.ftruncate(descriptor, self.position)
            os.close(descriptor)


def line_of_update(text: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it is none, or not of an update."""
    line = object_of(text)
    return line if line is not None and type(line.get("update")) is int else None
