"""Texts that are not UTF-8: guess their encoding, and convert them to UTF-8.

An encoding is proposed only if it decodes the full file without an error, and if most characters beyond ASCII are then
common in its language: kana and the kanji of JIS level 1, the hanzi of GB 2312 level 1 or of Big5's first
half, hangul; of single bytes, letters that stand among letters of ASCII. A wrong encoding gives rare ones.
"""

import codecs
import gzip
import io
import itertools
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterator
from pathlib import Path

from zerofit.recipe.errors import UserError

MARKS = {BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32", BOM_UTF16_LE: "utf-16", BOM_UTF16_BE: "utf-16"}
LATIN = ("cp1252", "cp1250", "iso8859_2", "cp1254")
SINGLE_BYTE = ("cp1251", "koi8_r", "cp1253", "cp1255", "cp1256", "cp874", *LATIN)
ALSO = {"cp932": "Shift_JIS", "cp949": "EUC-KR", "cp950": "Big5", "cp1252": "Latin-1"}  # names that people know
SAMPLE = 20_000  # number of characters beyond ASCII to examine
PLAUSIBLE = 0.7  # fraction of these that must be common characters
NEARLY = 0.9  # fraction of the best score from which another encoding is named as well
SHOWN = 40  # number of characters of a decoded line to show
PORTION = 1 << 20  # number of characters to convert at a time
CERTAINLY_UTF8 = 20  # number of characters beyond ASCII that cannot be valid UTF-8 by chance


# ------------------------------------------------------------------------------------------------------ the encoding


def proposal(data: bytes) -> str:
    """A sentence for a message: the likely encodings of a text that is not UTF-8, each with a decoded line."""
    texts = {name: _decoded(data, name) for name in likely(data)}
    if not texts:
        return "No known encoding decodes it as text. If you know the encoding, name it with --encoding"
    shown = " or ".join(f"{_called(name)}, {line!r}" for name, line in zip(texts, _lines(list(texts.values()))))
    if len(texts) > 1:
        return f"It may be {shown}. Name the right one: --encoding {', or '.join(texts)}"
    return f"It reads as {shown}. If that is right, say --encoding {next(iter(texts))}"


def likely(data: bytes) -> list[str]:
    """The possible encodings of a text, the most likely first; empty if none decodes it as text."""
    marked = [name for mark, name in MARKS.items() if data.startswith(mark)][:1]
    if marked or b"\0" in data:
        bigger = data[:SAMPLE:2].count(0) > data[1:SAMPLE:2].count(0)  # ASCII's zero bytes come first
        return [name for name in marked or ["utf-16-be" if bigger else "utf-16-le"] if _decoded(data, name)]
    scores = {name: score for name in COMMON if (score := _score(data, name))}
    letters = _among_letters(data)
    best = max([letters, *scores.values()])
    if letters == best:
        return _single_byte(data, LATIN if letters >= PLAUSIBLE else SINGLE_BYTE)
    return sorted((name for name in scores if scores[name] >= NEARLY * best), key=scores.get, reverse=True)


def _decoded(data: bytes, name: str) -> str | None:
    """The text; None if it is not in that encoding. With UTF-16 and -32, data may end anywhere."""
    try:
        return codecs.getincrementaldecoder(name)().decode(data, final=not name.startswith("utf"))
    except UnicodeDecodeError:
        return None


def _score(data: bytes, name: str) -> float:
    """The fraction of common characters among those beyond ASCII, with frequent ones counted twice; 0 if too few are
    common, or the text is not in that encoding."""
    text = _decoded(data, name)
    if text is None:
        return 0.0
    is_common, frequent = COMMON[name]
    matches = [match.group() for match in itertools.islice(re.finditer(r"[^\x00-\x7f]", text), SAMPLE)]
    fraction = sum(map(is_common, matches)) / len(matches)
    return fraction + sum(letter in frequent for letter in matches) / len(matches) if fraction >= PLAUSIBLE else 0.0


def _in_region(encoding: str, first: int, last: int) -> Callable[[str], bool]:
    """Whether a character's two bytes lie in a part of a table of characters, or it is East Asian punctuation."""

    def inside(letter: str) -> bool:
        code = letter.encode(encoding, "ignore")
        return len(code) == 2 and (first <= int.from_bytes(code) <= last or "\u3000" <= letter <= "\u3002")

    return inside


KANA = "".join(map(chr, range(0x3041, 0x30FF)))
_level_1 = _in_region("cp932", 0x889F, 0x9872)
_japanese = lambda letter: letter in KANA or "\uff01" <= letter <= "\uff5e" or _level_1(letter)  # noqa: E731
COMMON: dict[str, tuple[Callable[[str], bool], str]] = {  # {encoding: (is a character common, frequent characters)}
    "cp932": (_japanese, KANA),
    "euc_jp": (_japanese, KANA),
    "gb18030": (_in_region("gb2312", 0xB0A1, 0xD7F9), "的一是不了在人有我他这个们中来上大为和国"),
    "cp950": (_in_region("cp950", 0xA440, 0xC67E), "的一是不了在人有我他這個們中來上大為和國"),
    "cp949": (_in_region("euc_kr", 0xB0A1, 0xC8FE), "이다는을의에가고하지로은사한를도기서인나"),
}


def _among_letters(data: bytes) -> float:
    """The fraction of bytes beyond ASCII that are single, as accented letters are; East Asian encodings use two."""
    runs = [len(match.group()) for match in itertools.islice(re.finditer(rb"[\x80-\xff]+", data), SAMPLE)]
    alone = sum(length for length in runs if length == 1) / sum(runs)
    return alone if alone >= PLAUSIBLE else 0.1  # last of all Cyrillic, Greek, ...: whole words of such bytes


def _single_byte(data: bytes, names: tuple[str, ...]) -> list[str]:
    """Encodings of one byte per character, by charset-normalizer's measures of chaos and coherence."""
    from charset_normalizer import from_bytes

    lines = b"\n".join(line for line in data.splitlines() if not line.isascii())[:SAMPLE]
    matches = from_bytes(lines, cp_isolation=list(names), threshold=0.2)
    rank = {
        name: (round(match.chaos, 1), -round(match.coherence, 1))
        for match in matches
        for name in match.could_be_from_charset
    }
    first = min(rank.values(), default=None)
    texts: dict[str, str] = {}
    for name in names:
        if name in rank and rank[name] == first and (text := _decoded(data, name)) is not None:
            texts.setdefault(text, name)
    return list(texts.values())[:4]


def _lines(texts: list[str]) -> list[str]:
    """The same line of each text, shortened: if possible one in which they differ, with a character beyond ASCII."""
    of_each = [text.lstrip("\ufeff").splitlines() for text in texts]
    beyond = [lines for lines in zip(*of_each) if not lines[0].isascii()] or list(zip(*of_each))
    lines = next((lines for lines in beyond if len(set(lines)) == len(lines)), beyond[0])
    start = next((place for place, letters in enumerate(zip(*lines)) if not letters[0].isascii()), 0)
    return [line[max(0, start - SHOWN // 2) :][:SHOWN].strip() for line in lines]


def _called(name: str) -> str:
    return f"{ALSO[name]} ({name})" if name in ALSO else name


# --------------------------------------------------------------------------------------------------------- as UTF-8


def open_bytes(path: Path):
    """Open a file to read bytes; .gz files are decompressed."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def is_utf8(path: Path) -> bool:
    """Whether a file is UTF-8 with characters beyond ASCII, which other encodings would decode wrongly."""
    with open_bytes(path) as file:
        data = file.read()
    try:
        return not data.isascii() and "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def as_utf8(file, encoding: str, path: Path) -> Iterator[bytes]:
    """Convert a file in another encoding to UTF-8, portion by portion.

    Raises:
        UserError: the file is not in that encoding; or it is UTF-8, which that encoding would decode wrongly.
    """
    read, lines = io.TextIOWrapper(file, encoding=encoding, newline=""), 1
    try:
        while text := read.read(PORTION):
            if _is_utf8(text, encoding):
                raise UserError(
                    f"encoding = {encoding!r}: {path} is UTF-8 (line {lines} and after), which would be read as "
                    f"{_lines([text])[0]!r}. Remove --encoding"
                )
            yield text.removeprefix("\ufeff" if lines == 1 else "").encode("utf-8", "replace")
            lines += text.count("\n")
    except UnicodeError as error:
        raise UserError(
            f"encoding = {encoding!r}: {path} is not in it ({str(error)[:120]}, line {lines} or after). Name another"
        ) from None


def _is_utf8(text: str, encoding: str) -> bool:
    """Whether the bytes of this text were certainly UTF-8."""
    try:
        data = text.encode(encoding)
        meant = data.decode("utf-8")
    except UnicodeError:
        return False
    return meant != text and sum(not letter.isascii() for letter in meant) >= CERTAINLY_UTF8
