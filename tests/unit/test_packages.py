"""The packages: each imports those above it in CONTRIBUTING.md and none below, and no two modules each other."""

import ast
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from helpers import ROOT

# From the bottom of the program to its top: a package imports the packages before it.
PACKAGES = "recipe compat model data strategy estimate record health launch checkpoint training tools cli".split()
LONGEST = 600  # lines of a module


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


def edges() -> list[tuple[str, str]]:
    return [(a, b) for a, others in imports().items() for b in others if a != "zerofit" and b != "zerofit"]


def test_arrows_go_one_way():
    found = edges()
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


def test_what_trains_is_read_without_the_tools():
    assert not [(a, b) for a, b in edges() if package(b) == "tools" and package(a) not in ("tools", "cli")]


def test_modules_are_short():
    lines = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert len(lines) > 150
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


def test_nothing_in_train_hides_a_package():
    """`accelerate launch train/clm.py` puts train/ first on sys.path."""
    names = {path.stem for path in (ROOT / "train").iterdir()} - {"__pycache__"}
    assert names == {"clm", "dpo", "distill", "cls", "seq2seq"}
    assert not names & (set(sys.stdlib_module_names) | packages_distributions().keys() - {"train"})


# Libraries that a function may import: they take long, and a message about a recipe, a tool's --help or a run without
# them should not wait; or they are not installed everywhere.
LATE = {
    "torch": "seconds; recipes, launchers and tools are checked before",
    "transformers": "its model code takes a second; a script imports it once the recipe is checked",
    "deepspeed": "seconds, for DeepSpeed pairs alone",
    "peft": "for adapters alone",
    "accelerate": "what `zerofit --help` loads has to be small",
    "safetensors": "with torch",
    "huggingface_hub": "for the hub alone",
    "matplotlib": "when a plot is drawn",
    "pyarrow": "to unpack .zst files",
    "psutil": "what `zerofit --help` loads has to be small",
    "pydantic": "with deepspeed",
    "megatron": "an optional package",
    "bitsandbytes": "an optional package",
    "torchao": "an optional package",
    "charset_normalizer": "to guess an encoding",
    "fcntl": "not on every system",
}
OWN_LATE = {
    ("zerofit.strategy.builds", "zerofit.recipe.errors"),  # the watchdog starts without site-packages, and without
    ("zerofit.strategy.builds", "zerofit.recipe.files"),  # modules of ours that load one of these
    ("zerofit.strategy.builds", "zerofit.recipe.paths"),
    ("zerofit.data.rendering", "zerofit.data.pairs.prepare"),
    ("zerofit.model.configuration", "zerofit.model.attention"),
    ("zerofit.model.pretrained_io", "zerofit.model.parameters"),
    ("zerofit.strategy.gpus", "zerofit.strategy.devices"),
    ("zerofit.strategy.gpus", "zerofit.recipe.errors"),  # scripts/setup.sh runs it before anything is installed
    ("zerofit.strategy.prepare", "zerofit.strategy.pipeline_engine"),  # it loads DeepSpeed
    ("zerofit.training.entry", "zerofit.recipe.addresses"),  # fsspec
    ("zerofit.training.run", "zerofit.training.stored_model"),  # scipy
    ("zerofit.training.evaluation", "zerofit.training.metrics"),  # scipy, sacrebleu, rouge_score
}


def late_imports() -> set[tuple[str, str]]:
    """(module, what it imports in a function), of the packages that train."""
    found = set()
    for name, file in modules().items():
        if name == "zerofit" or package(name) in ("estimate", "tools", "cli"):
            continue
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.ImportFrom):
                        found.add((name, node.module))
                    elif isinstance(node, ast.Import):
                        found |= {(name, alias.name) for alias in node.names}
    return found


def test_imports_stand_at_the_top():
    found = late_imports()
    assert {pair for pair in found if pair[1].partition(".")[0] not in LATE} == OWN_LATE
    assert {target.partition(".")[0] for _, target in found} >= {*LATE}


@pytest.mark.parametrize(
    ("modules", "late"),
    [
        ("training.run training.export training.prepare", ("deepspeed", "peft", "scipy")),
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
