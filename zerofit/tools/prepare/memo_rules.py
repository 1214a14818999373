"""For which tokenizers the word memo of encode.py is exact, by what they are made of, and the texts that
they are tried on. Both must agree: the rules know what was thought of, the texts show what was not."""

import re
from typing import Any

from zerofit.tools.prepare.encode import METASPACE, SHIELD

NORMALIZERS = (None, {"type": "NFC"})
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END
SPLITS = (
    _GPT_4,  # Llama 3 has it as well
    _GPT_4.replace(r"\p{N}{1,3}", r"\p{N}"),  # Qwen 2
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2's, written out
)
# White space and control characters, and words: between two |.
_ODD = [
    *" |  |   |\t|\n|\n\n| \n|\n | \n \n |\t | \t|\r\n|\xa0| \xa0|\xa0 |\u3000| \u3000 |\x1c| \x1c |\x85".split("|"),
    *"\x85 |\u2028|\u180e |\u200b|\ufeff |\x0b|\x00|\u2581| \u2581|\u2581 |\u2000 ".split("|"),
    SHIELD,
]
_WORDS = [
    *"a|word|'s|don't|I'LL|1|2024|3.14|...|!?|naïve|e\u0301|\u0301|日本語|、|🙂|👩\u200d🚀|ÅŁ|العربية|नमस्ते".split("|"),
    *"_|@-@|<unk>|\ufffd|\U0001d54f".split("|"),
    "x" * 70,
]


def allows_memo(parts: dict[str, Any]) -> bool:
    """Whether the memo is exact for a tokenizer by what it is made of: its JSON. See encode.py."""
    model = parts["model"]
    if model.get("type") != "BPE" or model.get("dropout") or parts["normalizer"] not in NORMALIZERS:
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


def edge_case_texts(added: list[str]) -> list[str]:
    """Texts on which a wrong cut would show: words and added tokens beside all kinds of white space."""
    words = [*_WORDS, *added[:8], *added[-2:]]
    texts = ["", *_ODD, *words]
    for number, odd in enumerate(_ODD):
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
    texts += [odd.join(words) for odd in _ODD]
    return texts
