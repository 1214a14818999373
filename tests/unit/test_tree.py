"""What holds for every file of the tree: a clone needs nothing beside it, the documents' links lead
somewhere, and pages that scripts write are current."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = "zerofit|train|tests|benchmarks|scripts|recipes|docs|accelerate_configs|ds_configs"
NAMED_FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")

PLACEHOLDER = re.compile(r"NAME|TASK|FAMILY")


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(file: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_documents():
    assert len(documents()) >= 20
    assert sum(len(LINK.findall(file.read_text(encoding="utf-8"))) for file in documents()) >= 60
    assert sum(len(NAMED_FILE.findall(file.read_text(encoding="utf-8"))) for file in documents()) >= 30


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    text = without_code(file.read_text(encoding="utf-8"))
    broken = []
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{file.relative_to(ROOT)}: {broken}"


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_files_that_documents_name_exist(file):
    named = NAMED_FILE.findall(without_code(file.read_text(encoding="utf-8")))
    named = [name for name in named if not PLACEHOLDER.search(name)]
    missing = [name for name in named if not (ROOT / name).exists() and not list(ROOT.glob(name + ".*"))]
    assert not missing, f"{file.relative_to(ROOT)}: {missing}"


@pytest.mark.parametrize("script", ["options_reference", "recipes_index", "licences"])
def test_the_page_is_current(script):
    command = [sys.executable, ROOT / "scripts" / f"{script}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_guide_names_what_its_files_have():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)`(?:[^|`\n]{0,40})? in `((?:zerofit|train)/[\w/]+\.py)`", text)
    assert len(named) >= 40
    assert not [(name, file) for name, file in named if not re.search(rf"\b{name}\b", (ROOT / file).read_text())]


def test_one_statement_one_assignment():
    """No line is saved by `a, b = x, y`, which are two statements in one (what swaps may stay), or by its form."""
    files = [*(ROOT / "zerofit").rglob("*.py"), *(ROOT / "train").glob("*.py")]
    assert len(files) > 100
    folded = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "# fmt:" not in text, f"{file.relative_to(ROOT)} has a layout that is not the formatter's"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
                values = {*map(ast.unparse, node.value.elts)}
                if not all({*map(ast.unparse, target.elts)} == values for target in targets):  # what swaps
                    folded.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not folded
