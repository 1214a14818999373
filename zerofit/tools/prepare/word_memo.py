"""The word memo: keeps the token ids of words, so that the native tokenizer splits each of them once.

It cuts a text before every space (U+0020) that stands after a character that is not white space, and looks up the
segments; those that are new go through the tokenizer, all of some texts in one call. The ids of a text are those of
its segments in a row, exactly, where one of these holds and nothing else looks across a cut:

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
Measured on 50 MB of English and code with GPT-2's tokenizer: 1.8 times the tokens of a second of CPU time.
"""

import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

KEPT_SEGMENTS = 1 << 18  # about 50 MB; then it begins again
LONGEST_KEPT = 64  # characters
LONGEST_TEXT = 1 << 22  # characters of a text; a longer one goes through the tokenizer whole
CHECK_EVERY = 500  # texts: one of so many is compared with the plain tokenizer
METASPACE = "\u2581"  # what a space is in the vocabularies of Llama 1 and 2
SHIELD = "\ue5ce"  # private use; stands for a space where no cut is. A text that has it is encoded whole
UNCUT = re.compile(r"\s +")
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + END
SPLITS = (
    GPT_4,  # Llama 3 has it as well
    GPT_4.replace(r"\p{N}{1,3}", r"\p{N}"),  # Qwen 2
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2's, written out
)


class Mismatch(Exception):
    """The memo has given other ids than the tokenizer."""


class WordMemo:
    """Token ids of texts by their segments.

    A key is a segment without its space, or, of the first segment of a text, with a space before it: so the two kinds
    never meet.

    Args:
        encode: (texts) -> their ids as bytes, without special tokens.
        marks: the ids as bytes that the tokenizer puts before and after every text.
    """

    def __init__(self, encode: Callable[[list[str]], list[bytes]], marks: tuple[bytes, bytes]):
        self.encode, self.marks = encode, marks
        self.known: dict[str, bytes] = {}
        self.seen = 0

    def ids(self, texts: list[str]) -> list[bytes]:
        """The token ids of each text. Raises Mismatch."""
        if len(self.known) > KEPT_SEGMENTS:
            self.known = {}
        rows = [_keys(text) for text in texts]
        new = [*set().union(*rows).difference(self.known)]
        self.known.update(zip(new, self.encode([_text_of(key) for key in new])))
        found = [b"".join(map(self.known.__getitem__, row)) for row in rows]
        for text, ids in zip(texts, found):
            if self.seen % CHECK_EVERY == 0 and self.encode([text]) != [ids]:
                raise Mismatch(text[:60])
            self.seen += 1
        for key in new:
            if len(key) > LONGEST_KEPT:
                del self.known[key]
        before, after = self.marks
        return [b"".join((before, ids, after)) for ids in found]


def suits_memo(text: str) -> bool:
    """Whether a text is not too long, and has no character that the memo gives a meaning of its own."""
    return len(text) <= LONGEST_TEXT and SHIELD not in text and METASPACE not in text


def _keys(text: str) -> list[str]:
    keys = UNCUT.sub(lambda found: found[0][0] + SHIELD * (len(found[0]) - 1), text).split(" ")
    keys[0] = " " + keys[0]
    return keys


def _text_of(key: str) -> str:
    """The text of a segment."""
    return key[1:].replace(SHIELD, " ") if key.startswith(" ") else " " + key.replace(SHIELD, " ")


def marks_of(native: Tokenizer) -> tuple[list[int], list[int]]:
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


# ------------------------------------------------------------------------------------ tokenizers for which it is exact


def allows_memo(parts: dict[str, Any]) -> bool:
    """Whether the memo is exact for a tokenizer by what it is made of: its JSON.

    It is also tried on `edge_case_texts`: the rules know what was thought of, the texts show what was not.
    """
    model = parts["model"]
    if model.get("type") != "BPE" or model.get("dropout") or parts["normalizer"] not in (None, {"type": "NFC"}):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    for token in parts["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"\S ", token["content"]):
            return False
    before = parts["pre_tokenizer"] or {}
    if before.get("type") == "ByteLevel":
        return bool(before["use_regex"])
    if before.get("type") == "Sequence":
        return _is_known_split(before["pretokenizers"])
    if before.get("type") == "Metaspace" and before["replacement"] == METASPACE:
        crossing = re.compile(f"[^{METASPACE}]{METASPACE}")
        vocabulary = model["vocab"]
        return METASPACE in vocabulary and not model.get("ignore_merges") and not any(map(crossing.search, vocabulary))
    return False


def _is_known_split(steps: list[dict[str, Any]]) -> bool:
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[1]["type"] != "ByteLevel":
        return False
    split, level = steps
    isolated = split["behavior"] == "Isolated" and not split["invert"]
    return isolated and split["pattern"].get("Regex") in SPLITS and not level["use_regex"]


# White space and control characters, and words: between two |.
ODD = [
    *" |  |   |\t|\n|\n\n| \n|\n | \n \n |\t | \t|\r\n|\xa0| \xa0|\xa0 |\u3000| \u3000 |\x1c| \x1c |\x85".split("|"),
    *"\x85 |\u2028|\u180e |\u200b|\ufeff |\x0b|\x00|\u2581| \u2581|\u2581 |\u2000 ".split("|"),
    SHIELD,
]
WORDS = [
    *"a|word|'s|don't|I'LL|1|2024|3.14|...|!?|naïve|e\u0301|\u0301|日本語|、|🙂|👩\u200d🚀|ÅŁ|العربية|नमस्ते".split("|"),
    *"_|@-@|<unk>|\ufffd|\U0001d54f".split("|"),
    "x" * 70,
]


def edge_case_texts(added: list[str]) -> list[str]:
    """Texts on which a wrong cut would show: words and added tokens beside all kinds of white space."""
    words = [*WORDS, *added[:8], *added[-2:]]
    texts = ["", *ODD, *words]
    for number, odd in enumerate(ODD):
        for step in range(3):
            before, after = words[(3 * number + step) % len(words)], words[(7 * number + 5 * step + 1) % len(words)]
            texts += [
                f"{before}{odd}{after}",
                f"{odd}{before} {after}{odd}",
                f"{before} {odd} {after}",
                f"{before}{odd}{odd}{after}",
            ]
    for token in added[:8]:
        texts += [
            f"{token}a b",
            f"a {token} b",
            f"a{token}b c",
            f"a  {token}  b",
            f"a b{token}",
            f" {token} ",
            token * 2,
        ]
    texts += [odd.join(words) for odd in ODD]
    return texts
