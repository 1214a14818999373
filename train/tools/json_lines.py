"""Files with a JSON object in each line, to which several processes append."""

import json
import os
from pathlib import Path
from typing import Any


def add_line(file: Path, line: dict[str, Any]) -> None:
    """Append a line with a single write: several ranks may append at the same time."""
    data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
