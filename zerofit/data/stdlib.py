"""Two data sets that every machine has: made from Python's standard library.

`stdlib-docstrings` (text, label): the package of a docstring, one of the NUM_PACKAGES with the most docstrings.
`stdlib-functions` (source, target): from a function's parameters and body, in words, to the words of its name.

About HELD_OUT_PERCENT of the top-level classes and functions are held out, with all they contain, chosen by a hash of
their names. Held-out records with the same words as a training record are skipped.
"""

import ast
import platform
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value

from zerofit.data.tables import derived, encode_table, keyed

EMBEDDED = ("stdlib-docstrings", "stdlib-functions")  # the names of the data sets
NUM_PACKAGES = 12
HELD_OUT_PERCENT = 12
MIN_WORDS = 3  # shorter docstrings are not informative: "Constructor.", "See above."
MIN_WORDS_OF_CODE = 6  # as do shorter functions: "def this self pass"
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
MASK = "..."  # replaces the names of packages in docstrings
THIS = "this"  # replaces the name of a function in its code
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TABLE = Features({name: Value("string") for name in ("package", "top", "name", "text", "code")})


def read_stdlib(name: str, cache: Path) -> dict[str, Dataset]:
    """The training and the held-out part of one of EMBEDDED.

    Reading the library takes seconds; the result is cached.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not NOT_THE_LIBRARY & set(path.relative_to(root).parts)]
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    table = Dataset.from_dict({"file": [str(path.relative_to(root)) for path in files]})
    table = keyed(table, platform.python_version(), stamps)

    def parse_files(batch: dict[str, list[Any]], _: list[int]) -> dict[str, list[Any]]:
        entries = [entry for file in batch["file"] for entry in definitions(root / file, Path(file))]
        return {column: [entry[column] for entry in entries] for column in TABLE}

    entries = encode_table(table, parse_files, TABLE, (), cache)
    records_of = dict(zip(EMBEDDED, (_docstrings, _functions)))[name]
    parts = _split(records_of(entries.to_list()))
    return {part: derived(Dataset.from_list(rows), entries, name, part) for part, rows in parts.items()}


def definitions(path: Path, file: Path) -> Iterator[dict[str, str]]:
    """The definitions in a file: functions and methods; classes and the module itself if they have a docstring.

    Each is {package: empty for a module outside of any, top: the file and the top-level definition that contains it,
    name, text: the docstring, code: of a function, without docstring, comments and decorators; else empty}. Files that
    this Python cannot parse give none: some of the library are templates, or have deliberate errors.
    """
    try:
        with tokenize.open(path) as source:
            module = ast.parse(source.read())
    except (SyntaxError, UnicodeDecodeError):
        return
    package = file.parts[0] if len(file.parts) > 1 else ""
    for top in [module, *module.body]:
        for node in [module] if top is module else ast.walk(top):
            if not isinstance(node, (ast.Module, *DEFINITIONS)):
                continue
            named, name = getattr(top, "name", ""), getattr(node, "name", "")  # it may stand in an `if` or a `try`
            text, code = ast.get_docstring(node) or "", _code(node)
            if text or code:
                yield {"package": package, "top": f"{file}:{named}", "name": name, "text": text, "code": code}


def _code(node: ast.AST) -> str:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    name, node.name, node.decorator_list = node.name, THIS, []
    return re.sub(rf"\b{re.escape(name)}\b", THIS, ast.unparse(node))


def _docstrings(entries: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Records of stdlib-docstrings: no docstring of two packages, and no name of a package in a text."""
    entries = [entry for entry in entries if entry["package"] and entry["text"]]
    counts = Counter(entry["package"] for entry in entries)
    packages = sorted(counts, key=lambda package: (-counts[package], package))[:NUM_PACKAGES]
    named = re.compile("|".join(sorted(map(re.escape, packages), key=len, reverse=True)), re.IGNORECASE)
    records: list[dict[str, Any]] = []
    said_by: dict[tuple[str, ...], set[str]] = {}
    for entry in entries:
        if entry["package"] in packages:
            text = named.sub(MASK, entry["text"])
            said_by.setdefault(_words(text), set()).add(entry["package"])
            records.append({"text": text, "label": entry["package"], "top": entry["top"], "says": _words(text)})
    return [record for record in records if len(said_by[record["says"]]) == 1]


def _functions(entries: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Records of stdlib-functions."""
    records = []
    for entry in entries:
        source = in_words(entry["code"]) if entry["code"] else ""
        if len(source.split()) >= MIN_WORDS_OF_CODE:
            target = in_words(entry["name"])
            records.append({"source": source, "target": target, "top": entry["top"], "says": _words(source)})
    return records


def in_words(code: str) -> str:
    """The words of code, with names split: `def getSize(self, depth=3)` is "def get size self depth 3"."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", code.replace("_", " "))
    return " ".join(re.findall(r"[A-Za-z]+|[0-9]+", apart)).lower() or code


def _split(records: list[dict[str, Any]]) -> dict[str, list[dict[str, str]]]:
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "validation": []}
    for record in records:
        if len(record["says"]) >= MIN_WORDS:
            is_held_out = _drawn(record["top"]) % 100 < HELD_OUT_PERCENT
            parts["validation" if is_held_out else "train"].append(record)
    trained = {record["says"] for record in parts["train"]}
    held_out = [record for record in parts["validation"] if record["says"] not in trained]
    # Shuffled, so that the first ones (max_eval_samples) are like the others.
    parts["validation"] = sorted(held_out, key=lambda record: _drawn(" ".join(record["says"])))
    for rows in parts.values():
        for record in rows:
            del record["top"], record["says"]
    return parts


def _drawn(text: str) -> int:
    """A pseudo-random number for a text, the same on every machine."""
    return int(sha256(text.encode()).hexdigest(), 16)


def _words(text: str) -> tuple[str, ...]:
    """The words of a text, to compare two texts: letters only, in lower case."""
    return tuple(re.findall(r"[a-z]+", text.lower()))
