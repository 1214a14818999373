"""Open text files: UTF-8, what a byte-order mark says, or an encoding that the user names; propose one of these."""

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from zerofit.recipe.errors import UserError
from zerofit.recipe.files import marked_encoding, open_bytes

PROPOSED = (
    "cp932", "euc_jp", "gb18030", "cp950", "cp949", "cp1252", "cp1250", "iso8859_2", "cp1254", "cp1251", "koi8_r",
    "cp1253", "cp1255", "cp1256", "cp874",
)  # fmt: skip
SAMPLE = 20_000  # number of bytes to guess from
NEARLY = 0.1  # of charset-normalizer's measure of chaos: how much worse than the best another encoding may be
SHOWN = 40  # number of characters of a decoded line to show
PORTION = 1 << 20  # number of characters to convert at a time
CERTAINLY_UTF8 = 20  # number of characters beyond ASCII that cannot be valid UTF-8 by chance


@contextmanager
def open_text(path: Path, encoding: str | None = None, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a file, which may be packed, to read text from its start; a byte-order mark is not part of it. Raises
    UserError: the file is in another encoding, or damaged. `encoding`: None: UTF-8, or what a byte-order mark stands
    for. `newline`: as in `open`."""
    encoding = encoding or encoding_of_mark(path)
    try:
        with open_bytes(path) as file:
            data = io.BytesIO(b"".join(as_utf8(file, encoding, path))) if encoding else file
            yield io.TextIOWrapper(data, encoding="utf-8-sig", newline=newline)
    except UnicodeDecodeError:
        with open_bytes(path) as file:
            content = file.read()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError as wrong:
            line = content.count(b"\n", 0, wrong.start) + 1
            where = f"byte 0x{content[wrong.start]:02x} at offset {wrong.start} (line {line})"
            raise UserError(f"{path} is not UTF-8: {where}. {proposal(content)}") from None
        raise


def proposal(data: bytes) -> str:
    """A sentence for a message: the likely encodings of a text that is not UTF-8, each with a decoded line."""
    texts = {name: text for name in likely(data) if (text := _decoded(data, name))}
    if not texts:
        return "No known encoding decodes it as text. If you know the encoding, name it with --encoding"
    shown = " or ".join(f"{name}, {line!r}" for name, line in zip(texts, _lines(list(texts.values()))))
    return f"It may be {shown}. Name the right one: --encoding {' or '.join(texts)}"


def encoding_of_mark(path: Path) -> str | None:
    """The encoding that the byte-order mark of a file, which may be packed, stands for; None without one. Raises
    UserError: the file has no mark and begins as UTF-16 does."""
    with open_bytes(path) as file:
        start = file.read(SAMPLE)
    marked = marked_encoding(start)
    if not marked and b"\0" in start[:2]:
        raise UserError(f"{path} is not UTF-8: its first character has a zero byte. {proposal(start)}")
    return marked


def likely(data: bytes) -> list[str]:
    """The possible encodings of a text, at most three, the most likely first; empty if none decodes it as text."""
    from charset_normalizer import from_bytes

    marked = marked_encoding(data)
    if marked or b"\0" in data:
        bigger = data[:SAMPLE:2].count(0) > data[1:SAMPLE:2].count(0)  # ASCII's zero bytes come first
        name = marked or ("utf-16-be" if bigger else "utf-16-le")
        return [name] if _decoded(data, name) else []
    lines = b"\n".join(line for line in data.splitlines() if not line.isascii())[:SAMPLE]
    matches = list(from_bytes(lines, cp_isolation=list(PROPOSED), threshold=0.4))
    best = min((match.chaos for match in matches), default=0.0)
    good = [name for match in matches if match.chaos <= best + NEARLY for name in match.could_be_from_charset]
    texts: dict[str, str] = {}
    for name in sorted(set(good) & set(PROPOSED), key=PROPOSED.index):
        if text := _decoded(data, name):
            texts.setdefault(text, name)
    return list(texts.values())[:3]


def _decoded(data: bytes, name: str) -> str | None:
    """The text; None if it is not in that encoding. With UTF-16 and -32, data may end anywhere."""
    try:
        return codecs.getincrementaldecoder(name)().decode(data, final=not name.startswith("utf"))
    except UnicodeDecodeError:
        return None


def _lines(texts: list[str]) -> list[str]:
    """The beginning of the same line of each text: of the first with a character beyond ASCII."""
    of_each = list(zip(*(text.lstrip("\ufeff").splitlines() for text in texts)))
    lines = next((lines for lines in of_each if not lines[0].isascii()), of_each[0])
    start = next((place for place, letter in enumerate(lines[0]) if not letter.isascii()), 0)
    return [line[max(0, start - SHOWN // 2) :][:SHOWN].strip() for line in lines]


def as_utf8(file: IO[bytes], encoding: str, path: Path) -> Iterator[bytes]:
    """Convert a file in another encoding to UTF-8, portion by portion. Raises UserError: the file is not in that
    encoding; or it is UTF-8, which that encoding would decode wrongly."""
    read, lines = io.TextIOWrapper(file, encoding=encoding, newline=""), 1
    try:
        while text := read.read(PORTION):
            if _is_utf8(text, encoding):
                raise UserError(f"encoding = {encoding!r}: {path} is UTF-8 (line {lines}). Say --encoding utf-8")
            yield (text.lstrip("\ufeff") if lines == 1 else text).encode("utf-8", "replace")
            lines += text.count("\n")
    except UnicodeError:
        raise UserError(f"encoding = {encoding!r}: {path} is not in it (line {lines}). Name another") from None


def _is_utf8(text: str, encoding: str) -> bool:
    """Return whether the bytes of this text were certainly UTF-8."""
    try:
        data = text.encode(encoding)
        meant = data.decode("utf-8")
    except UnicodeError:
        return False
    return meant != text and sum(not letter.isascii() for letter in meant) >= CERTAINLY_UTF8
