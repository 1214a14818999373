"""Labelled sentences and pairs, conversations and instructions, in the forms in which such data are published."""

import json
import re
from itertools import groupby
from pathlib import Path

from .texts import Entry, entries

PLACES = {  # what is asked about in Japanese; one name lies outside the basic multilingual plane
    "東京": "日本の首都", "富士山": "日本で一番高い山", "琵琶湖": "日本で一番大きい湖", "信濃川": "日本で一番長い川",
    "京都": "古いお寺の多い町", "北海道": "日本の北にある島", "沖縄": "日本の南にある島々", "𠮷野": "桜で名高い山",
    "大阪": "食べ物のおいしい町", "奈良": "鹿のいる公園のある町", "青森": "りんごの町", "長野": "山の多い県",
    "静岡": "お茶の県",
}  # fmt: skip
JAPANESE = [f"{place}は{about}です。" for place, about in PLACES.items()]


def write_records(folder: Path) -> None:
    for write in (_write_pairs, _write_sentences, _write_conversations, _write_instructions):
        write(folder)


def _spaced(text: str) -> str:
    """Punctuation between spaces, as in these data sets."""
    return " ".join(re.sub(r"([^\w\s])", r" \1 ", text).split())


# ------------------------------------------------------------------------------------------------------------ labelled


def _write_pairs(folder: Path) -> None:
    """Of three pairs two say the same in other words, and the other is of two functions.

    As in the release, fields are not quoted, so that quotation marks stand alone; only dev.tsv begins with a byte
    order mark.
    """
    rows = []
    for number, (one, other) in enumerate(zip(entries(), entries()[7:])):
        same = number % 3 < 2
        said, told = _spaced(one.sentence), _spaced((one if same else other).sentence)
        if number % 8 == 1:
            said = f'" {said[:-2]} , " it says of {one.name} .'
        if number % 5 == 2:
            told = f'" {told}'
        rows.append(f"{int(same)}\t{700_000 + number}\t{800_000 + number}\t{said}\tAs its docstring has it , {told}\n")
    head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    (folder / "glue" / "MRPC").mkdir(parents=True)
    for name, part, mark in (("train", rows[:900], ""), ("dev", rows[900:1050], "\ufeff")):
        text = mark + head + "".join(part)
        (folder / "glue" / "MRPC" / f"{name}.tsv").write_text(text, encoding="utf-8")


def _write_sentences(folder: Path) -> None:
    """1 where the sentence says that something is returned."""
    found = {_spaced(entry.sentence).lower(): None for entry in entries()}
    rows = [f"{sentence} \t{int(' return' in f' {sentence}')}\n" for sentence in found]
    held_out = rows[::10]
    training = [row for number, row in enumerate(rows) if number % 10]
    (folder / "glue" / "SST-2").mkdir(parents=True)
    for name, part in (("train", training), ("dev", held_out)):
        (folder / "glue" / "SST-2" / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(part), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- conversations


def _talks() -> list[list[str]]:
    """About four functions of a module each; of 3 to 21 turns, with the double spaces that people type."""
    found = []
    for module, group in groupby(entries(), key=lambda entry: entry.module):
        known = list(group)
        for start in range(0, len(known) - 3, 4):
            turns = [f"Do you know the module {module}?", "Yes, I do.  What about it? "]
            for entry in known[start : start + 4]:
                turns += _exchange(entry)
            found.append(turns[: 3 + 2 * (start // 4 % 8) + len(found) % 5])
    return found


def _exchange(entry: Entry) -> list[str]:
    takes = " and ".join(entry.arguments[:3])
    return [
        f"What does {entry.name} do?",
        entry.sentence,
        "And what does it take?",
        f"It takes {takes}." if takes else "It takes nothing.",
    ]


def _write_conversations(folder: Path) -> None:
    (folder / "dialogue").mkdir()
    keyed, listed = {}, []
    for number, turns in enumerate(_talks()):
        said = [{"message": turn, "agent": f"agent_{1 + place % 2}", "sentiment": "Neutral",
                 "knowledge_source": ["FS1", "Personal Knowledge"]} for place, turn in enumerate(turns)]  # fmt: skip
        rating = {"agent_1": "Good", "agent_2": "Excellent"}
        keyed[f"t_{number:08x}"] = {
            "article_url": f"https://example.org/{number}",
            "config": "ABCD"[number % 4],
            "content": said,
            "conversation_rating": rating,
        }
        listed.append({"dialogue": turns[:-1], "response": turns[-1]})
    (folder / "dialogue" / "keyed.json").write_text(json.dumps(keyed, indent=2), encoding="utf-8")
    (folder / "dialogue" / "talks.json").write_text(json.dumps(listed), encoding="utf-8")


# -------------------------------------------------------------------------------------------------------- instructions


def _english(entry: Entry, number: int) -> dict[str, str]:
    if number % 2:
        asked = f"What does the function {entry.name} of the module {entry.module} do?"
        return {"instruction": asked, "input": "", "output": entry.sentence}
    asked = "Describe this function of Python's library in one sentence."
    return {"instruction": asked, "input": entry.call, "output": entry.sentence}


def _japanese(number: int) -> dict[str, str]:
    place, about = list(PLACES.items())[number % len(PLACES)]
    count = number // len(PLACES) + 2
    if number % 2:
        return {"instruction": f"{about}はどこですか?", "input": "", "output": f"{place}です。"}
    read = f"{place}は{about}です。\n去年は{count}人で{place}へ行きました。🗻"
    return {"instruction": f"何人で{place}へ行きましたか?", "input": read, "output": f"{count}人です。"}


def _write_instructions(folder: Path) -> None:
    english = [_english(entry, number) for number, entry in enumerate(entries()[:1000])]
    japanese = [_japanese(number) for number in range(600)]
    (folder / "instruct").mkdir()
    for name, records in (("english", english), ("japanese", japanese)):
        text = json.dumps(records, ensure_ascii=False, indent=1)
        (folder / "instruct" / f"{name}.json").write_text(text, encoding="utf-8")
