"""Print which private parts of other libraries are used, and what is replaced in them, by library.

python scripts/private_parts.py               # the files in the working tree
python scripts/private_parts.py REVISION      # those of an earlier commit
python scripts/private_parts.py --list        # each with its place, and not the numbers alone

A use is one name in one file, however often it stands there. Read is the syntax tree; the libraries are imported only
to see whether a class of ours overrides a private method of theirs.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("zerofit", "train")
COMPAT = "zerofit/compat"
DEVICE = "zerofit/tools/simulate/device"  # a backend of these libraries, in processes that import nothing of zerofit
# Private by name alone: these are documented. A metric of the evaluate library has to define `_info`.
MEMORY = "torch.cuda.memory"
DOCUMENTED = {
    *("_asdict", "_replace", "_fields", "_make", "os._exit", "evaluate.Metric._info"),
    *(f"{MEMORY}._record_memory_history", f"{MEMORY}._dump_snapshot"),  # "Understanding CUDA Memory Usage"
}
# Settings that a library asks its users to assign, and an object of this process that is found by a name of a module.
SETTINGS = re.compile(r"torch\.(backends|compiler\.config|distributed\.group\.WORLD)\.|matplotlib\.rcParams")
CALLED_BY_NAME = {"forward"}  # what a module of torch does when it is called: its own attribute comes first
# Libraries whose objects meet ours. A name that the syntax tree leads to none of them is looked up in their sources.
LIBRARIES = (
    "deepspeed torch accelerate peft transformers datasets tokenizers trackio lm_eval evaluate megatron wandb tqdm"
).split()
CHANGES = ("setattr", "delattr", "patch.object", "mock.patch.object", "replaced")  # (object, ...)
TABLE_CHANGES = ("update", "pop", "setdefault", "clear", "popitem")


@dataclass(frozen=True)
class Use:
    """A private part, or a replaced one, in a file. `name` begins with its library where the syntax tree shows it."""

    file: str
    line: int
    name: str
    kind: str  # "private", "replaced" or "overridden"

    @property
    def is_in_compat(self) -> bool:
        return self.file.startswith(COMPAT)

    @property
    def is_of_device(self) -> bool:
        return self.file.startswith(DEVICE)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


class Module:
    """One file: what its names stand for, and which private names are its own."""

    def __init__(self, path: str, source: str) -> None:
        self.path, self.tree = path, ast.parse(source)
        self.origins: dict[str, str] = {}  # {name here: where it comes from}
        self.own_modules: set[str] = set()
        self.defined: set[str] = set()
        self.functions: set[str] = set()
        for node in ast.walk(self.tree):
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                origin = alias.name if alias.asname else alias.name.partition(".")[0]
                self.origins[alias.asname or origin] = origin
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                self.origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            if node.module.partition(".")[0] == "zerofit":
                self.own_modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.defined.add(node.name)
            self.functions.add(node.name)
        elif isinstance(node, ast.ClassDef):
            self.defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.withitem):
            if isinstance(node, ast.Assign):
                targets = node.targets
            else:
                targets = [node.optional_vars if isinstance(node, ast.withitem) else node.target]
            for target in (found for top in targets if top for found in ast.walk(top)):
                if isinstance(target, ast.Name):
                    self.defined.add(target.id)
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls"):
                    self.defined.add(target.attr)

    def follow_assignments(self) -> None:
        """Let `name = foreign.module` and `name = importlib.import_module("foreign.module")` stand for the module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                origin = self.origin(node.value)
                if isinstance(target, ast.Name) and origin and "()" not in origin and target.id not in self.origins:
                    self.origins[target.id] = origin

    def origin(self, node: ast.AST) -> str | None:
        """The dotted name of an expression that begins with something imported; () stands for a call."""
        if isinstance(node, ast.Name):
            return self.origins.get(node.id)
        if isinstance(node, ast.Attribute):
            value = self.origin(node.value)
            return value and f"{value}.{node.attr}"
        if isinstance(node, ast.Call):
            value = self.origin(node.func)
            if value == "importlib.import_module" and node.args:
                named = node.args[0]
                return named.value if isinstance(named, ast.Constant) else None
            return value and f"{value}()"
        if isinstance(node, ast.Subscript):
            return self.origin(node.value)
        return None


def is_foreign(origin: str | None) -> bool:
    """Whether it comes from another library. Python's own is not one: it changes with the interpreter."""
    top = (origin or "").partition(".")[0].removesuffix("()")
    return bool(top) and top not in ("zerofit", "train") and top not in sys.stdlib_module_names


def find_uses(files: dict[str, str]) -> list[Use]:
    """Return the uses in files {path: source}, one for each name of a file."""
    modules = {path: Module(path, source) for path, source in files.items()}
    defined = {".".join(PurePath(path).with_suffix("").parts): modules[path].defined for path in modules}
    found: dict[tuple[str, str], Use] = {}
    for path, module in modules.items():
        module.follow_assignments()
        own = module.defined.union(*(defined.get(name, set()) for name in module.own_modules))
        for line, name, kind in [*_private_names(module, own), *_replaced(module, own), *_overridden(module)]:
            found.setdefault((path, name), Use(path, line, name, kind))
    return sorted(found.values(), key=lambda use: (use.file, use.line, use.name))


def _private_names(module: Module, own: set[str]) -> Iterator[tuple[int, str, str]]:
    inner = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            for name in names if isinstance(node, ast.Import) else [f"{node.module}.{name}" for name in names]:
                if is_foreign(name) and any(map(is_private, name.split("."))):
                    yield node.lineno, name, "private"
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            chain: list[ast.Attribute] = [node]
            while isinstance(chain[-1].value, ast.Attribute):
                chain.append(chain[-1].value)
                inner.add(id(chain[-1]))
            yield from _private_attribute(module, chain, own)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and is_foreign(name) and any(map(is_private, name.split("."))):
                yield node.lineno, name, "private"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            name = getattr(node.args[1], "value", None)
            if isinstance(name, str) and is_private(name) and name not in own:
                yield node.lineno, name, "private"


def _private_attribute(module: Module, chain: list[ast.Attribute], own: set[str]) -> Iterator[tuple[int, str, str]]:
    """The last private part of `a._b.c._d`, if one is not ours. chain: from the outermost attribute on."""
    for node in chain:
        origin = module.origin(node)
        if not is_private(node.attr) or node.attr in DOCUMENTED or origin in DOCUMENTED:
            continue
        if is_foreign(origin):
            yield node.lineno, str(origin), "private"
            return
        if origin is None and node.attr not in own:
            yield node.lineno, node.attr, "private"
            return


def _replaced(module: Module, own: set[str]) -> Iterator[tuple[int, str, str]]:
    """Assignments into foreign modules, classes and tables, and functions that are put into an object of another."""
    for node in ast.walk(module.tree):
        targets: list[Any] = []
        value = None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            origin = module.origin(node.args[0]) if node.args else None
            what = "*" if len(node.args) < 2 else getattr(node.args[1], "value", None)
            what = what if isinstance(what, str) else "*"
            if called in CHANGES and is_foreign(origin):
                yield node.lineno, f"{origin}.{what}", "replaced"
            elif called == "replaced" and origin is None and what not in own:
                yield node.lineno, what, "replaced"
            elif isinstance(node.func, ast.Attribute) and node.func.attr in TABLE_CHANGES:
                origin = module.origin(node.func.value)
                if is_foreign(origin) and "()" not in str(origin) and not SETTINGS.match(str(origin)):
                    yield node.lineno, f"{origin}[...]", "replaced"
        for target in (part for top in targets for part in (top.elts if isinstance(top, ast.Tuple) else [top])):
            if not isinstance(target, ast.Attribute | ast.Subscript):
                continue
            origin = module.origin(target)
            if is_foreign(origin):
                if not SETTINGS.match(str(origin)):
                    yield node.lineno, str(origin) + ("[...]" if isinstance(target, ast.Subscript) else ""), "replaced"
            elif (
                origin is None
                and isinstance(target, ast.Attribute)
                and (
                    target.attr == "__class__"
                    or (
                        target.attr not in own | CALLED_BY_NAME
                        and ast.unparse(target.value) not in ("self", "cls", "ctx")
                        and _is_function(module, value)
                    )
                )
            ):
                yield node.lineno, target.attr, "replaced"


def _is_function(module: Module, value: Any) -> bool:
    if isinstance(value, ast.Lambda):
        return True
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in ("partial", "MethodType", "wraps", "cache")
    return isinstance(value, ast.Name) and value.id in module.functions


def _overridden(module: Module) -> Iterator[tuple[int, str, str]]:
    """Private methods and attributes of a foreign class that a class of ours defines again."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for origin in filter(is_foreign, map(module.origin, node.bases)):
            found = {part.name: part.lineno for part in node.body if isinstance(part, ast.FunctionDef)}
            for part in ast.walk(node):
                is_stored = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                if is_stored and ast.unparse(part.value) == "self":
                    found.setdefault(part.attr, part.lineno)
            for name in filter(is_private, found):
                if f"{origin}.{name}" not in DOCUMENTED and _has(_imported(str(origin)), name):
                    yield found[name], f"{origin}.{name}", "overridden"


def _imported(dotted: str) -> Any:
    name, _, attribute = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError, ValueError):
        return None


def _has(kind: Any, name: str) -> bool:
    """Whether a class, or one that it is made from, has a method of this name or assigns such an attribute."""
    if hasattr(kind, name):
        return True
    foreign = [each for each in getattr(kind, "__mro__", ()) if each.__module__ != "builtins"]
    return any(re.search(rf"self\.{name}\b[^=\n]*=[^=]", inspect.getsource(each)) for each in foreign)


def library_of(uses: list[Use]) -> dict[Use, str]:
    """{use: its library}. A name of an object is looked up in the libraries' sources, which takes some seconds."""
    found = {}
    unknown = {use for use in uses if not is_foreign(use.name) or "." not in use.name}
    for use in set(uses) - unknown:
        found[use] = use.name.partition(".")[0]
    names = {use.name for use in unknown if is_private(use.name)}
    homes: dict[str, list[str]] = {name: [] for name in names}
    word = re.compile(r"\b(?:def |self\.|cls\.|^\s+)(_\w+)\b(?=\s*[(:=,])", re.MULTILINE)
    for library in LIBRARIES:
        spec = find_spec(library)
        places = list(spec.submodule_search_locations or []) if spec else []
        held = set()
        for file in (file for place in places for file in Path(place).rglob("*.py")):
            held |= names.intersection(word.findall(file.read_text(errors="ignore")))
        for name in held:
            homes[name].append(library)
    for use in unknown:
        found[use] = next(iter(homes.get(use.name, [])), "unknown")
    return found


def sources(revision: str | None = None) -> dict[str, str]:
    """{path: source} of the product, in the working tree or of a commit."""
    if revision is None:
        paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
        return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    tar = ["git", "ls-tree", "-r", "--name-only", revision, *FOLDERS]
    listed = subprocess.run(tar, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths_there = [path for path in listed if path.endswith(".py")]
    batch = subprocess.run(
        ["git", "cat-file", "--batch"],
        cwd=ROOT,
        input="".join(f"{revision}:{path}\n" for path in paths_there).encode(),
        capture_output=True,
        check=True,
    ).stdout
    found = {}
    for path in paths_there:
        header, _, batch = batch.partition(b"\n")
        size = int(header.split()[2])
        found[path], batch = batch[:size].decode(), batch[size + 1 :]
    return found


def main(argv: list[str]) -> None:
    revision = next((word for word in argv if not word.startswith("-")), None)
    uses = find_uses(sources(revision))
    library = library_of(uses)
    if "--list" in argv:
        for use in uses:
            print(f"{use.file}:{use.line}: {library[use]} {use.kind} {use.name}")
    inside = Counter(library[use] for use in uses if use.is_in_compat)
    outside = Counter(library[use] for use in uses if not use.is_in_compat)
    files, device = len({use.file for use in uses if not use.is_in_compat}), sum(use.is_of_device for use in uses)
    print(f"{'library':16}{'in compat':>10}{'elsewhere':>11}")
    for name in sorted(inside | outside, key=lambda name: -(inside + outside)[name]):
        print(f"{name:16}{inside[name]:10}{outside[name]:11}")
    print(f"{'all':16}{sum(inside.values()):10}{sum(outside.values()):11}   (in {files} files; {device} in {DEVICE})")


if __name__ == "__main__":
    main(sys.argv[1:])
