"""Run tests/unit and the short agreement with the lowest and the newest allowed versions of the libraries.

python scripts/test_versions.py                    # every set, each in an environment of its own: hours on two cores
python scripts/test_versions.py newest peft-lowest # these
python scripts/test_versions.py --list

pyproject.toml says what is allowed. A set has one of LIBRARIES at its lowest or newest version and the others as in
constraints.txt, or all at their lowest or newest; what else is installed is what pip takes. torch is that of
constraints.txt but in `torch-lowest`, and of the build for the CPU. docs/measurements/versions.md gets the figures.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "measurements" / "versions.md"
LIBRARIES = ("transformers", "accelerate", "deepspeed", "datasets", "peft")
TESTS = ("tests/launch/test_agreement.py", "tests/unit")
HEAD = """# Versions of the libraries

`pyproject.toml` allows a range of each library whose private parts are used; a run and `zerofit doctor` name a version
outside it. `make test-versions` writes this page: tests/unit and the short agreement, with one library at its lowest
or newest allowed version and the others as in `constraints.txt`, or with all of them so.

"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {line.name: line for line in map(Requirement, PROJECT["dependencies"])}
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def lowest(library: str) -> str:
    version = next(bound.version for bound in NEEDED[library].specifier if bound.operator == ">=")
    return f"{library}=={LOCKED[library] if Version(version) == Version(LOCKED[library]) else version}"


def sets() -> dict[str, dict[str, str]]:
    """{set: {library: what pip is to install}}, without those that are what constraints.txt has."""
    locked = {name: f"{name}=={LOCKED[name]}" for name in ("torch", *LIBRARIES)}
    newest = {name: str(NEEDED[name]) for name in LIBRARIES}
    found = {"lowest": locked | {name: lowest(name) for name in LIBRARIES}, "newest": locked | newest}
    for name in LIBRARIES:
        found[f"{name}-lowest"] = locked | {name: lowest(name)}
        found[f"{name}-newest"] = locked | {name: newest[name]}
    found["torch-lowest"] = locked | {"torch": lowest("torch")}
    return {name: wanted for name, wanted in found.items() if wanted != locked}


def resolved(wanted: dict[str, str]) -> dict[str, str]:
    """{library: the version that pip takes today} of a set, torch aside."""
    words = [wanted[name] for name in LIBRARIES]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    report = subprocess.run([*pip, "--report", "-", *words], capture_output=True, text=True, check=True).stdout
    return {each["metadata"]["name"]: each["metadata"]["version"] for each in json.loads(report)["install"]}


def same_as(name: str, wanted: dict[str, str]) -> dict | None:
    """The figures of a set that has the same versions as one that was run, or as constraints.txt; None: run it."""
    if name == "torch-lowest":
        return None
    versions = resolved(wanted)
    if all(LOCKED[library] == version for library, version in versions.items()):
        return {"versions": {"torch": LOCKED["torch"], **versions}, "as": "constraints.txt, `make test`"}
    for file in sorted(FOLDER.glob("*.json")):
        found = json.loads(file.read_text())
        is_run = file.stem not in (name, "torch-lowest") and "as" not in found
        if is_run and versions.items() <= found["versions"].items():
            return {"versions": found["versions"], "as": file.stem}
    return None


def install(name: str, wanted: dict[str, str]) -> Path:
    """Make the environment of a set. Returns its Python."""
    folder = FOLDER / name
    cpu = os.environ | {"TORCH": "cpu"}
    subprocess.run(["bash", "scripts/setup.sh", folder, wanted["torch"]], cwd=ROOT, env=cpu, check=True)
    extras = PROJECT["optional-dependencies"]
    others = [str(line) for key, line in NEEDED.items() if key not in wanted]
    words = [*wanted.values(), *others, *extras["dev"], *extras["trackers"], *PROJECT_BUILD]
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *words], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", "."], cwd=ROOT, check=True)
    return folder / "bin" / "python"


PROJECT_BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]


def try_set(name: str, wanted: dict[str, str]) -> dict:
    """Install a set and run the tests: {versions, passed, failed (names)}."""
    python = install(name, wanted)
    report = FOLDER / f"{name}.xml"
    report.unlink(missing_ok=True)
    words = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", f"--junitxml={report}", *TESTS]
    subprocess.run([python, "-m", "pytest", *words], cwd=ROOT)
    asked = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {tuple(wanted)}}}))"
    versions = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in bad})
    return {"versions": json.loads(versions), "passed": len(cases) - len(bad) - skipped, "failed": names}


def page() -> str:
    """The figures of all sets that were tried here, and the names of the others."""
    heads = ["set", "torch", *LIBRARIES, "passed", "failed"]
    rows, failures = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"], []
    for name in sets():
        file = FOLDER / f"{name}.json"
        if not file.is_file():
            rows.append(f"| {name} |{' |' * (len(heads) - 3)} not run | |")
            continue
        found = json.loads(file.read_text())
        versions = [found["versions"][library] for library in ("torch", *LIBRARIES)]
        if "as" in found:
            rows.append(f"| {' | '.join([name, *versions])} | as {found['as']} | |")
            continue
        rows.append(f"| {' | '.join([name, *versions, str(found['passed']), str(len(found['failed']))])} |")
        failures += [f"* {name}: `{test}`" for test in found["failed"]]
    where = f"Python {platform.python_version()}, {platform.system()}, {os.cpu_count()} cores."
    return HEAD + "\n".join([*rows, "", where, *(["", "Failed:", "", *failures] if failures else [])]) + "\n"


def main() -> int:
    every = sets()
    if "--list" in sys.argv:
        print(*every, sep="\n")
        return 0
    named = sys.argv[1:] or list(every)
    if unknown := set(named) - every.keys():
        print(f"unknown: {', '.join(unknown)}. Sets: {', '.join(every)}", file=sys.stderr)
        return 2
    failed = 0
    for name in named:
        found = same_as(name, every[name]) or try_set(name, every[name])
        (FOLDER / f"{name}.json").write_text(json.dumps(found))
        failed += len(found.get("failed", []))
        PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
