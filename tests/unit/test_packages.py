"""The packages: each imports those above it in CONTRIBUTING.md and none below, and no two modules each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

# From the bottom of the program to its top: a package imports the packages before it.
PACKAGES = "recipe compat model data strategy estimate record health launch checkpoint training tools cli".split()


def modules() -> dict[str, Path]:
    files = sorted((ROOT / "zerofit").rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports() -> dict[str, set[str]]:
    """{module: modules of zerofit/ that it imports}, inside of functions as well; not those for annotations alone."""
    known = modules()
    found = {name: set() for name in known}
    for name, file in known.items():
        tree = ast.parse(file.read_text())
        for block in [node for node in tree.body if isinstance(node, ast.If)]:
            if ast.unparse(block.test) == "TYPE_CHECKING":
                tree.body.remove(block)
        for node in ast.walk(tree):
            named = []
            if isinstance(node, ast.ImportFrom) and node.module:
                named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            found[name] |= {module for module in named if module in known and module != name}
    return found


def package(module: str) -> str:
    return module.split(".")[1]


def test_arrows_go_one_way():
    found = [(a, b) for a, others in imports().items() for b in others if a != "zerofit" and b != "zerofit"]
    assert len(found) > 400
    assert {package(module) for edge in found for module in edge} == set(PACKAGES)
    upward = sorted((a, b) for a, b in found if PACKAGES.index(package(b)) > PACKAGES.index(package(a)))
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


@pytest.mark.parametrize(
    ("modules", "late"),
    [
        ("training.run training.export training.setup", ("deepspeed", "peft", "scipy")),
        ("training.entry", ("torch", "transformers", "huggingface_hub", "fsspec")),  # before the recipe is checked
    ],
)
def test_what_is_not_needed_is_not_loaded(modules, late):
    code = "".join(f"import zerofit.{module}\n" for module in modules.split())
    code += f"import sys\nprint([name for name in {late} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


@pytest.mark.parametrize("script", ["zerofit/strategy/gpus.py", "zerofit/health/watchdog_process.py"])
def test_a_script_that_starts_without_packages(script):
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / script], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert "ModuleNotFoundError" not in done.stderr
