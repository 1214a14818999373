"""Build the documents as a site: copy them to build/docs/pages, run Zensical on them, check what it made.

python scripts/build_site.py    # writes site/; exit code 1: a broken link, or a page that loads from elsewhere

The copies lie as in the tree, so links between documents stay. A file of code that a document links becomes a page.
"""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "docs" / "pages"
SITE = ROOT / "site"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
BLOCK = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
# In a table's cell GitHub wants a bar escaped, in code too; Zensical shows the escape.
CODE_IN_ROW = re.compile(r"(?<=[| (])`[^`\n]*\\\|[^`\n]*`")
AS_IT_IS = (".svg", ".png", ".csv", ".html")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".cff": "yaml"}
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href"}  # what a browser fetches with the page


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def copy_pages(pages: Path) -> None:
    """Write every document, and what documents link, into the folder."""
    shutil.rmtree(pages, ignore_errors=True)
    linked: set[Path] = set()
    for document in documents():
        write(pages, document.relative_to(ROOT), with_pages_for_code(document, linked))
    for path in sorted(linked):
        name = path.relative_to(ROOT)
        if path.suffix in AS_IT_IS:
            (pages / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, pages / name)
        else:
            write(pages, page_of(name), code_page(path))
    shutil.copy(ROOT / "scripts" / "site.css", pages)


def with_pages_for_code(document: Path, linked: set[Path]) -> str:
    """The document's text, its links to code leading to pages; adds what it links to `linked`."""

    def link(match: re.Match[str]) -> str:
        target = (document.parent / match[1]).resolve()
        if target.suffix == ".md":
            return match[0]
        linked.add(target)
        return match[0] if target.suffix in AS_IT_IS else str(page_of(Path(match[1])))

    def unescaped(code: re.Match[str]) -> str:
        return code[0].replace(r"\|", "|")

    parts = BLOCK.split(document.read_text(encoding="utf-8"))  # text, block of code, text, ...
    parts[::2] = [CODE_IN_ROW.sub(unescaped, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def page_of(path: Path) -> Path:
    return path.with_name(path.name + ".md")


def code_page(path: Path) -> str:
    """A file, or the files of a folder, as they are."""
    parts = [f"# {path.relative_to(ROOT)}"]
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    for file in files:
        parts += [f"## {file.name}"] if path.is_dir() else []
        parts += [f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8').rstrip()}\n````"]
    return "\n\n".join(parts) + "\n"


def write(pages: Path, name: Path, text: str) -> None:
    (pages / name).parent.mkdir(parents=True, exist_ok=True)
    (pages / name).write_text(text, encoding="utf-8")


class Page(HTMLParser):
    """A page's anchors, the addresses that it links, and those that a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values[LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Broken links, and what a page would load from elsewhere."""
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    found = []
    for file, page in pages.items():
        if file.name == "404.html":  # its links begin at the root of a server
            continue
        for address in page.links + page.loaded:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                found += [f"{file}: loads {address}"] if address in page.loaded and parts.scheme != "data" else []
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages and parts.fragment else {unquote(parts.fragment)}
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                found.append(f"{file}: broken link {address}")
    for file in sorted(site.rglob("*.css")):
        remote = re.findall(r"url\(['\"]?(?:https?:)?//[^)]+\)|@import[^;]+//[^;]+", file.read_text(encoding="utf-8"))
        found += [f"{file}: loads {address}" for address in remote]
    return found


def mark_japanese(site: Path) -> None:
    """Pages in Japanese say so to browsers, which choose fonts and line breaks by it."""
    for file in [site / "README.ja.html", *(site / "docs" / "ja").glob("*.html")]:
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace('<html lang="en"', '<html lang="ja"', 1), encoding="utf-8")


def main() -> int:
    copy_pages(PAGES)
    shutil.rmtree(SITE, ignore_errors=True)
    program = Path(sys.executable).with_name("zensical")
    done = subprocess.run([program, "build", "--clean", "--strict"], cwd=ROOT, env={**os.environ, "NO_COLOR": "1"})
    if done.returncode:
        return done.returncode
    mark_japanese(SITE)
    found = problems(SITE)
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE}, {len(found)} broken links", *found, sep="\n  ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
