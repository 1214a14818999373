"""Files of tagged words, as CoNLL-2003 has them: a word a line, its tag in the last column, an empty line between
sentences. A file to be answered may have the words alone."""

import json
from collections.abc import Iterator
from pathlib import Path

from zerofit.recipe.errors import UserError

DOCUMENT = "-DOCSTART-"  # the first word of a line between documents
BLANKS = " \t\r"  # no others: a tweet has U+00A0 and U+2028 as words


def sentences(text: str, path: Path) -> Iterator[bytes]:
    """The sentences as JSON lines: `tokens`, the first column, and `tags`, the last; no tags if there is only one. A
    tab separates columns where a line has one, else blanks do.

    Raises:
        UserError: a word or a tag is empty; a line has another number of columns than the first one; there is no
            sentence.
    """
    num_columns, words, tags = 0, list[str](), list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        plain = [field for field in line.strip(BLANKS).split(" ") if field]
        columns = [field.strip(BLANKS) for field in line.split("\t")] if "\t" in line else plain
        if not any(columns) or columns[0] == DOCUMENT:
            if words:
                record = {"tokens": words, "tags": tags} if tags else {"tokens": words}
                yield json.dumps(record, ensure_ascii=False).encode() + b"\n"
            words, tags = [], []
            continue
        num_columns = num_columns or len(columns)
        if not (columns[0] and columns[-1]):
            raise UserError(f"{path}, line {number}: {line.strip()!r} is not a word and, in the last column, its tag")
        if len(columns) != num_columns:
            raise UserError(f"{path}, line {number}: {len(columns)} columns, and {num_columns} in the lines before it")
        words.append(columns[0])
        if num_columns > 1:
            tags.append(columns[-1])
    if not num_columns:
        raise UserError(f"{path} has no sentence")
