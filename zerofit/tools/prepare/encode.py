"""From texts to the bytes of their token ids: what a worker of `zerofit prepare` does. Imports neither torch nor
transformers, so that a worker is small and there at once.

The native tokenizer spends most of its time on words that it has split a thousand times. The word memo keeps what
became of each. It cuts a text before every space (U+0020) that stands after a character that is not white space, and
looks up the segments; those that are new go through the tokenizer, all of a chunk in one call. The ids of a text are
those of its segments in a row, exactly, where one of these holds and nothing else looks across a cut:

* Byte-level BPE with GPT-2's regular expression, or those of GPT-4, Llama 3 and Qwen 2. Each of their alternatives
  takes a space only as its first character or in a run of white space. So the word that ends before the cut cannot
  reach over it, and the next one begins there. They look ahead only from within a run of white space, which is never
  cut, and never look behind. BPE works within one word.
* BPE on Metaspace (Llama 1 and 2), where a space becomes U+2581 and the whole text is one word. A merge across the cut
  would give a token with U+2581 after another character. Where the vocabulary has none, no merge reaches across, and
  those on the two sides do not depend on each other.

The first segment is kept apart, as a tokenizer may treat the start of a text otherwise. Added tokens are found before
all this; one that has no space after another character lies within a segment. NFC composes nothing with a space.
Other normalizers, added tokens that take white space beside them or stand for single words, dropout, Unigram and
WordPiece, and regular expressions that are not known have no memo: whole documents go through the tokenizer. Python's
white space includes all that the tokenizers' regular expressions know: where it has more, there are only fewer cuts.
"""

import pickle
import re
from array import array
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

CODES = {"uint16": "H", "int32": "i"}  # of array.array
KEPT_SEGMENTS = 1 << 17  # of each of the two halves of the memo: about 25 MB
LONGEST_KEPT = 64  # characters
GROUP = 1 << 20  # characters that are cut at a time
CHECK_EVERY = 500  # documents: one of so many is compared with the plain tokenizer
LONGEST_CHECKED = 1 << 22  # characters; the plain tokenizer takes about a hundred bytes of memory for each
TOGETHER = 64  # segments that are learnt at a time
METASPACE, BYTE_LEVEL_SPACE = "\u2581", "\u0120"  # what a space is in a vocabulary
SHIELD = "\ue5ce"  # private use; stands for a space where no cut is. A text that has it is encoded whole
UNCUT = re.compile(r"\s +")
CUT = re.compile(r"(?<=\S) ")


@dataclass(frozen=True)
class InputPart:
    """A part of the input.

    Args:
        file, line: where it begins, for messages; `line` counts from 1, of .parquet it is a row.
        kind: json (an object a line), rows (a list of records), or, of plain text, how it is cut into
            documents: line, paragraph, file or mark.
        data: bytes; of rows, lists.
        mark: between documents.
    """

    file: str
    line: int
    kind: str
    data: Any
    mark: str = ""


@dataclass(frozen=True)
class Setup:
    """What a worker gets at the start.

    Args:
        way: memo, whole (the native tokenizer on whole documents) or slow (a tokenizer without a native one, pickled).
        tokenizer: its JSON, or the pickled bytes.
        special: whether special tokens within texts are split like others (split_special_tokens).
        keys: of JSON objects, in the order of the corpora.
        dtype: uint16 or int32.
        end: the id after each document that has any; None: none.
        skip_bad: bad lines are counted, and not the end of the work.
    """

    way: str
    tokenizer: str | bytes
    special: bool
    keys: tuple[str, ...]
    dtype: str
    end: int | None
    skip_bad: bool


class Mismatch(Exception):
    """The memo has given other ids than the tokenizer."""


def open_native(tokenizer: str, special: bool):
    """The native tokenizer from its JSON; it neither cuts off nor pads."""
    native = Tokenizer.from_str(tokenizer)
    native.no_truncation()
    native.no_padding()
    native.encode_special_tokens = special
    return native


def encoder_of(setup: Setup):
    """The encoder that a set-up asks for."""
    if setup.way == "slow":
        return Slow(pickle.loads(setup.tokenizer), CODES[setup.dtype])
    native = open_native(setup.tokenizer, setup.special)
    return (Memo if setup.way == "memo" else Whole)(native, CODES[setup.dtype])


class Slow:
    """Any tokenizer of transformers, a document at a time."""

    def __init__(self, tokenizer, code: str):
        self.tokenizer, self.code = tokenizer, code

    def encode(self, texts: list[str]) -> list[bytes]:
        return [array(self.code, self.tokenizer(text, verbose=False)["input_ids"]).tobytes() for text in texts]


class Whole:
    """The native tokenizer on whole documents."""

    def __init__(self, native, code: str):
        self.native, self.code = native, code

    def encode(self, texts: list[str]) -> list[bytes]:
        rows = []
        for start in range(0, len(texts), 64):  # an Encoding takes many times the memory of its ids
            encoded = self.native.encode_batch_fast(texts[start : start + 64])
            rows += [array(self.code, row.ids).tobytes() for row in encoded]
        return rows


class Memo:
    """The native tokenizer behind the word memo; see above.

    A key is a segment without its space, or, of the first segment of a text, with a space before it: so the two
    kinds never meet. The memo has two halves: when the young one is full it becomes the old one, out of which what is
    asked for again is taken over.
    """

    def __init__(self, native, code: str, kept: int = KEPT_SEGMENTS):
        self.native, self.code, self.kept = native, code, kept
        self.young: dict[str, bytes] = {}
        self.old: dict[str, bytes] = {}
        self.before, self.after = (self._bytes(ids) for ids in marks_of(native))
        space = METASPACE if type(native.pre_tokenizer).__name__ == "Metaspace" else BYTE_LEVEL_SPACE
        vocabulary = native.get_vocab(with_added_tokens=False)
        self.begin_with_space = {number for token, number in vocabulary.items() if token.startswith(space)}
        self.seen = 0

    def encode(self, texts: list[str]) -> list[bytes]:
        rows: list[bytes] = []
        group: list[str] = []
        size = 0
        for text in texts:
            if group and size + len(text) > GROUP:
                rows += self._encode_group(group)
                group, size = [], 0
            group.append(text)
            size += len(text)
        rows += self._encode_group(group)
        for text, row in zip(texts, rows):
            due = self.seen % CHECK_EVERY == 0 and len(text) <= LONGEST_CHECKED
            if due and self._bytes(self.native.encode(text).ids) != row:
                raise Mismatch(text[:200])
            self.seen += 1
        return rows

    def _encode_group(self, texts: list[str]) -> list[bytes]:
        if len(texts) > 1 and any(map(_is_special, texts)):
            return [row for text in texts for row in self._encode_group([text])]
        if len(texts) == 1 and _is_special(texts[0]):
            return [self._bytes(self.native.encode(texts[0]).ids)]
        if len(texts) == 1 and len(texts[0]) > 2 * GROUP:
            return [self._encode_long(texts[0])]
        return [b"".join((self.before, row, self.after)) for row in self._join([_keys(text) for text in texts])]

    def _encode_long(self, text: str) -> bytes:
        """One very long document, a portion at a time."""
        rows, start = [self.before], 0
        while start < len(text):
            cut = CUT.search(text, start + GROUP)
            stop = cut.start() if cut else len(text)
            keys = _keys(text[start:stop])
            rows += self._join([keys[1:] if start else keys])  # but for the first, a portion begins with a space
            start = stop
        return b"".join((*rows, self.after))

    def _join(self, rows: list[list[str]]) -> list[bytes]:
        """The ids of rows of segments. Those that are unknown are looked for in all rows and encoded in one go."""
        if len(self.young) > self.kept:
            self.young, self.old = {}, self.young
        known = self.young
        ids_of = known.__getitem__
        done: list[bytes] = [b""] * len(rows)
        waiting, unknown = [], set()
        for number, row in enumerate(rows):
            try:
                done[number] = b"".join(map(ids_of, row))
            except KeyError:
                waiting.append(number)
                unknown |= set(row).difference(known)
        passing = self._learn(unknown)
        for number in waiting:
            done[number] = b"".join(map(ids_of, rows[number]))
        for key in passing:
            del known[key]
        return done

    def _learn(self, keys: set[str]) -> list[str]:
        """Take segments into the memo. Returns those that are too long to stay there."""
        known, old, fresh = self.young, self.old, []
        for key in keys:
            ids = old.get(key)
            if ids is None:
                fresh.append(key)
            else:
                known[key] = ids
        alone = []
        for start in range(0, len(fresh), 4096):
            alone += self._learn_together(fresh[start : start + 4096])
        for start in range(0, len(alone), 4096):
            some = alone[start : start + 4096]
            encoded = self.native.encode_batch_fast([_text_of(key) for key in some], add_special_tokens=False)
            for key, row in zip(some, encoded):
                known[key] = self._bytes(row.ids)
        return [key for key in fresh if len(key) > LONGEST_KEPT]

    def _learn_together(self, keys: list[str]) -> list[str]:
        """Learn segments TOGETHER at a time, as one text: to call the tokenizer for each takes longer than its work.

        A token that begins with a space begins a segment, and no other does, where a segment has but its first space
        and does not end with white space. Returns the keys that are not of that kind, or whose tokens do not add up.
        """
        alone, common = [], []
        for key in keys:
            is_common = key and key[0] != " " and SHIELD not in key and not key[-1].isspace()
            (common if is_common else alone).append(key)
        groups = [common[start : start + TOGETHER] for start in range(0, len(common), TOGETHER)]
        encoded = self.native.encode_batch_fast([" " + " ".join(group) for group in groups], add_special_tokens=False)
        for group, row in zip(groups, encoded):
            ids = row.ids
            begins = [place for place, number in enumerate(ids) if number in self.begin_with_space]
            if len(begins) != len(group) or begins[0]:
                alone += group
                continue
            begins.append(len(ids))
            for key, begin, end in zip(group, begins, begins[1:]):
                self.young[key] = self._bytes(ids[begin:end])
        return alone

    def _bytes(self, ids: list[int]) -> bytes:
        return array(self.code, ids).tobytes()


def _is_special(text: str) -> bool:
    """Whether a text has a character that the memo gives a meaning of its own."""
    return SHIELD in text or METASPACE in text


def _keys(text: str) -> list[str]:
    keys = UNCUT.sub(_shield, text).split(" ")
    keys[0] = " " + keys[0]
    return keys


def _shield(match: re.Match) -> str:
    spaces = match[0]
    return spaces[0] + SHIELD * (len(spaces) - 1)


def _text_of(key: str) -> str:
    """The text of a segment."""
    return key[1:].replace(SHIELD, " ") if key.startswith(" ") else " " + key.replace(SHIELD, " ")


def marks_of(native) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after every text.

    Raises:
        ValueError: what it adds depends on the text.
    """
    marks = set()
    for text in ("a", "word by word"):
        whole, bare = native.encode(text).ids, native.encode(text, add_special_tokens=False).ids
        places = [place for place in range(len(whole)) if whole[place : place + len(bare)] == bare]
        if len(places) != 1 or not bare:
            raise ValueError("what it adds to a text is unclear")
        marks.add((tuple(whole[: places[0]]), tuple(whole[places[0] + len(bare) :])))
    if len(marks) != 1:
        raise ValueError("what it adds to a text depends on it")
    ((before, after),) = marks
    return list(before), list(after)
