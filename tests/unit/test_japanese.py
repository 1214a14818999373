"""The Japanese pages say what the English ones say: the same commands, real options, files and links that exist."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT
from test_commands import TASKS, TOOLS, read_options
from torch.distributed.run import get_args_parser

PAGES = {"README.ja.md": 20, "docs/ja/lora.md": 18, "docs/ja/continual-pretraining.md": 26}  # page: fewest commands
PROGRAM = re.compile(r"(?:srun |\.venv/bin/)*(?:accelerate|torchrun|zerofit|make|git|source|python -m wiki)[ .]")
USER_FILES = {  # what the user names: it may differ between the languages
    r"<[^>]*>": "<>",
    r"\b(?:my_)?data/(?!stories|tinystories)[\w./*-]+": "data/FILE",
    r"\b[a-z]+wiki-\S+\.xml\.bz2": "WIKI.xml.bz2",
    r'--prompt "[^"]*"': '--prompt "TEXT"',
}
OTHER_PROGRAMS = {"--config", "--json", "--num_gpus", "--deepspeed", "--load", "--save"}  # or of every parser


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def code_in(text: str) -> list[str]:
    """Lines of code blocks without a language, and `code` in a line."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if not language]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
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


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def all_options() -> set[str]:
    """Every option of the tasks, the tools and the two launchers."""
    of_launch, _ = read_options([str(ROOT / "recipes/clm/stdlib-gpt2.yaml")])
    groups = {*TASKS.values(), *TOOLS.values(), type(of_launch)}
    options = {field.name for group in groups for field in fields(group)}
    options |= {alias for group in groups for field in fields(group) for alias in field.metadata.get("aliases", ())}
    parsers = (launch_command_parser(), get_args_parser())
    return {f"--{name}" for name in options} | {name for parser in parsers for name in parser._option_string_actions}


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


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page):
    words = [word for line in code_in(read(page)) for word in line.split()]
    options = {word for word in words if re.fullmatch(r"--[a-z]+(?:_[a-z0-9]+)*", word)}
    assert len(options) >= 3
    unknown = options - all_options() - OTHER_PROGRAMS
    assert not unknown, f"{page}: {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_exist(page):
    text, folder = read(page), (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert len(links) >= 5
    for link in links:
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}: no such heading"
    files = re.findall(r"\b(?:accelerate_configs|ds_configs|recipes|train)/[\w/.-]+\.(?:yaml|json|py)\b", text)
    assert len(files) >= 3
    assert not [file for file in files if not (ROOT / file).is_file()]


def test_the_table_has_every_strategy():
    rows = re.findall(r"^\| `.*$", read("README.ja.md"), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}


def test_commands_are_compared_without_layout():
    one = "accelerate launch train/clm.py --config RECIPE \\\n  --train_file 'my_data/*.jsonl'  # a comment\n"
    other = '```\n$ accelerate launch train/clm.py --config RECIPE --train_file "data/mine.txt"\n```\n'
    assert commands_in(code_in(f"```\n{one}```\n")) == commands_in(code_in(other))
    assert shlex.split(commands_in(code_in(other))[0])[-1] == "data/FILE"
    wrong = "```\nzerofit launch --dry_run --strategy zero9 recipes/clm/none.yaml\n```\n"
    assert not {in_any_order(command) for command in commands_in(code_in(wrong))} & english_commands()
