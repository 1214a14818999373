"""What holds for every file of the tree: a clone needs nothing beside it, and the documents' links lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT

BESIDE = "../" + "shared"  # a folder that stood beside the checkout where this was written
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


def test_no_file_names_a_folder_beside_the_clone():
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [name for name in files.split("\0") if name and (ROOT / name).is_file()]
    assert len(names) > 200
    found = [name for name in names if BESIDE.encode() in (ROOT / name).read_bytes()]
    assert not found, f"{BESIDE} is named in {', '.join(found)}"


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


def test_every_page_is_in_the_list_once():
    listed = LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    pages = sorted((ROOT / "docs").rglob("*.md"))
    names = [str(page.relative_to(ROOT / "docs")) for page in pages if page.name != "README.md"]
    assert len(names) >= 30
    assert {name: listed.count(name) for name in names} == dict.fromkeys(names, 1)


def test_pages_that_programs_and_recipes_name_exist():
    named = {
        (page, str(file.relative_to(ROOT)))
        for folder in ("accelerate_configs", "benchmarks", "recipes", "scripts", "tests", "train", "zerofit")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in (".py", ".yaml", ".sh")
        for page in re.findall(r"(?<![\w./])docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert len(named) >= 30
    assert not [(page, file) for page, file in sorted(named) if not (ROOT / page).is_file()]
