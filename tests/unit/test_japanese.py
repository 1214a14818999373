"""The Japanese pages say what the English ones say: the same commands, real options, files and links that exist."""

import re

import pytest
from helpers import ROOT

PAGES = {"README.ja.md": 20, "docs/ja/lora.md": 18, "docs/ja/continual-pretraining.md": 26}  # page: fewest commands
PROGRAM = re.compile(r"(?:srun |\.venv/bin/)*(?:accelerate|torchrun|zerofit|make|git|source|python -m wiki)[ .]")
USER_FILES = {  # what the user names: it may differ between the languages
    r"<[^>]*>": "<>",
    r"\b(?:my_)?data/(?!stories|tinystories)[\w./*-]+": "data/FILE",
    r"\b[a-z]+wiki-\S+\.xml\.bz2": "WIKI.xml.bz2",
    r'--prompt "[^"]*"': '--prompt "TEXT"',
}


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code_in(text: str) -> list[str]:
    """Lines of code blocks without a language, and `code` in a line."""
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if not language]
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    return re.sub(r"\s*\\\n\s*", " ", "".join(blocks)).splitlines() + inline


def commands_in(lines: list[str]) -> list[str]:
    """The commands among the lines, written in one way: no comment, one space, one command each."""
    commands = []
    for line in lines:
        for part in line.removeprefix("$ ").split(" && "):
            command = " ".join(re.sub(r"\s#\s.*", "", part).replace("'", '"').split())
            for pattern, name in USER_FILES.items():
                command = re.sub(pattern, name, command)
            if PROGRAM.match(command) and len(command.split()) > 1:
                commands.append(command)
    return commands


def in_any_order(command: str) -> tuple[str, ...]:
    return tuple(sorted(command.split()))


def english_commands() -> set[tuple[str, ...]]:
    lines = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        lines += code_in(page.read_text(encoding="utf-8"))
    for recipe in sorted((ROOT / "recipes").rglob("*.yaml")):
        comments = re.findall(r"^# *(.*)$", recipe.read_text(encoding="utf-8"), re.MULTILINE)
        lines += re.sub(r"\s*\\\n\s*", " ", "\n".join(comments)).splitlines()
    return {in_any_order(command) for command in commands_in(lines)}


def test_every_japanese_page_is_listed():
    pages = {"README.ja.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "ja").glob("*.md"))}
    assert pages == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_those_of_the_english_pages(page):
    commands, english = commands_in(code_in(read(page))), english_commands()
    assert len(english) >= 100
    assert len(commands) >= PAGES[page], commands
    missing = [command for command in commands if in_any_order(command) not in english]
    assert not missing, f"{page}: no English page or recipe has\n  " + "\n  ".join(missing)


def test_the_table_has_every_strategy():
    rows = re.findall(r"^\| `.*$", read("README.ja.md"), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}
