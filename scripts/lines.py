"""Print files and lines of each package: the product, its tests, documents and benchmarks.

python scripts/lines.py               # of the files that git knows
python scripts/lines.py REVISION      # and how many more there are than at an earlier commit
"""

import subprocess
import sys
from collections import Counter
from pathlib import PurePath

PARTS = {"product": ("zerofit", "train"), "tests": ("tests",), "docs": ("docs",), "benchmarks": ("benchmarks",)}
CODE = (".py", ".sh", ".cpp", ".h", ".md")


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def package(path: PurePath) -> str:
    """zerofit/tools/plan/plan.py -> zerofit/tools/plan: two folders deep, tools three."""
    depth = 3 if path.parts[:2] == ("zerofit", "tools") else 2
    return str(PurePath(*path.parts[:-1][:depth]))


def count(revision: str) -> tuple[Counter, Counter]:
    """(files, lines) of each package."""
    files, lines = Counter(), Counter()
    for line in git("grep", "--count", "-I", "", revision).splitlines():
        path, _, number = line.removeprefix(f"{revision}:").rpartition(":")
        if PurePath(path).suffix in CODE:
            files[package(PurePath(path))] += 1
            lines[package(PurePath(path))] += int(number)
    return files, lines


def main(argv: list[str]) -> None:
    files, lines = count("HEAD")
    files_before, lines_before = count(argv[0]) if argv else (files, lines)
    for part, tops in PARTS.items():
        packages = sorted(name for name in files | files_before if PurePath(name).parts and name.split("/")[0] in tops)
        for name, members in {**{name: [name] for name in packages}, part.upper(): packages}.items():
            counts = [sum(count[member] for member in members) for count in (files, lines, files_before, lines_before)]
            change = f"  {counts[0] - counts[2]:+5} {counts[1] - counts[3]:+7,}" if argv else ""
            print(f"{name:32} {counts[0]:5} {counts[1]:8,}{change}")


if __name__ == "__main__":
    main(sys.argv[1:])
