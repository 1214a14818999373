"""Files with a JSON object in each line, to which several processes append."""

import json
import os
from pathlib import Path
from typing import Any

from zerofit.recipe.files import open_without_links


def add_line(file: Path, line: dict[str, Any]) -> None:
    """Append a line with a single write: several ranks may append at the same time."""
    data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    descriptor = open_without_links(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
