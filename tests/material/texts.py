"""The functions and classes of the standard library, and the texts made of their docstrings."""

import ast
import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SEPARATOR = "\n<|endoftext|>\n"
HELD_OUT = 10  # every tenth document is


@dataclass(frozen=True)
class Entry:
    """A function or a class that has a docstring."""

    module: str
    name: str  # Class.method for a method
    arguments: tuple[str, ...]  # without self and cls
    doc: str

    @property
    def sentence(self) -> str:
        """The docstring's first sentence, on one line."""
        first = " ".join(self.doc.split("\n\n")[0].split())
        return first.split(". ")[0].rstrip(".") + "."

    @property
    def call(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Those of the modules at the library's top level, in the order of their files."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [entry for file in sorted(library.glob("*.py")) for entry in _of_module(file)]
    assert len(found) > 1000, f"{library} has the source of few modules: the tests make their data of it"
    return tuple(found)


def _of_module(file: Path) -> list[Entry]:
    found: list[Entry] = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                name = f"{outer}{child.name}"
                doc = (ast.get_docstring(child) or "").strip()
                if len(doc) > 15:
                    found.append(Entry(file.stem, name, _arguments(child), doc))
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{name}.")

    visit(ast.parse(file.read_bytes()), "")
    return found


def _arguments(node: ast.FunctionDef | ast.ClassDef) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef):
        return ()
    return tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls"))


def documents() -> list[str]:
    """A signature and its docstring each."""
    return [f"{entry.module}.{entry.call}\n\n{entry.doc}" for entry in entries()]


def training() -> list[str]:
    return [text for number, text in enumerate(documents()) if number % HELD_OUT]


def write_texts(folder: Path) -> None:
    (folder / "text").mkdir()
    for name, texts in (("train", training()), ("valid", documents()[::HELD_OUT])):
        (folder / "text" / f"{name}.txt").write_text(SEPARATOR.join(texts) + "\n", encoding="utf-8")
