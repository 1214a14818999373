"""The rooms: each imports those above it in DESIGN's list and none below, and no two modules each other."""

import ast
from pathlib import Path

from helpers import ROOT

# From the bottom of the house to its top: a room imports the rooms before it.
ROOMS = [
    "recipe",
    "model",
    "data",
    "strategy",
    "estimate",
    "record",
    "health",
    "checkpoint",
    "training",
    "tools",
    "cli",
]
LONGEST = 350  # lines of a module


def modules() -> dict[str, Path]:
    files = sorted((ROOT / "zerofit").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports() -> dict[str, set[str]]:
    """{module: modules of zerofit/ that it imports}, inside of functions as well."""
    known = modules()
    found = {name: set() for name in known}
    for name, file in known.items():
        for node in ast.walk(ast.parse(file.read_text())):
            named = []
            if isinstance(node, ast.ImportFrom) and node.module:
                named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            found[name] |= {module for module in named if module in known and module != name}
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def edges() -> list[tuple[str, str]]:
    return [(a, b) for a, others in imports().items() for b in others if a != "zerofit" and b != "zerofit"]


def test_arrows_go_one_way():
    found = edges()
    assert len(found) > 400
    assert {room(module) for edge in found for module in edge} == set(ROOMS)
    upward = sorted((a, b) for a, b in found if ROOMS.index(room(b)) > ROOMS.index(room(a)))
    assert not upward


def test_no_two_modules_import_each_other():
    graph, done, circles = imports(), set(), []

    def visit(module: str, way: list[str]) -> None:
        if module in way:
            circles.append(way[way.index(module) :])
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*way, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    assert not circles


def test_what_trains_is_read_without_the_tools():
    assert not [(a, b) for a, b in edges() if room(b) == "tools" and room(a) not in ("tools", "cli")]


def test_modules_are_short():
    lines = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert len(lines) > 150
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}
    assert lines["zerofit.training.loop"] < 150
