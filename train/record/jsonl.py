"""A file of one JSON object a line which a kill cannot break, and which a resumed run continues."""

import json
import os
from pathlib import Path
from typing import Any


class JsonlFile:
    """A .jsonl file; each line is of one update and is on its way to the disk before the next is written."""

    def __init__(self, path: Path):
        self.path, self._file = path, None

    def start(self, updates: int = 0) -> None:
        """Begin the file anew, or keep the lines up to this update: those behind it come again."""
        kept = [line for line in self.read() if line["update"] <= updates] if updates else []
        self.close()
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), encoding="utf-8")
        partial.replace(self.path)

    def add(self, line: dict[str, Any]) -> None:
        """One line, behind those that are there. NaN and infinity are written as such: they are never hidden."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """See that the lines so far are on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """The lines so far; one that a killed run left half is not among them."""
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1] if self.path.is_file() else []
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        """No line comes any more."""
        if self._file is not None:
            self._file.close()
            self._file = None
