"""Write docs/licences.md: the licence of each package in constraints.txt, by the metadata of the installed ones. Of a
package that is not installed in that version the page keeps what it has.

python scripts/licences.py            # writes the page
python scripts/licences.py --check    # exit code 1 if the page is not current, or a licence is not in ALLOWED
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
LOCKED = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
ROW = re.compile(r"^\| (.+) \| (.+) \|$", re.MULTILINE)
UNKNOWN = "unknown, since it is not installed in this version (add it to the page by hand, or type make setup)"

# Names in "License" and in classifiers that are not SPDX names. "BSD" is one of its forms.
NAMES = {
    "Academic Free License (AFL)": "AFL-3.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
NVIDIA = re.compile(r"nvidia-|cuda-")  # comes with torch for CUDA
ALLOWED = set(
    "0BSD AFL-3.0 Apache-2.0 BSD BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python ISC LLVM-exception MIT MIT-CMU "
    "MPL-2.0 PSF-2.0 Zlib".split()
)
HEAD = """# Licences of the dependencies

This page is generated: `python scripts/licences.py` writes it from the packages' own metadata, a test keeps it
current. It covers `constraints.txt`. None of these packages is part of zerofit's wheel; pip installs them beside it.

| licence | packages |
|---|---|"""
TAIL = """
`nvidia-*` and `cuda-*` have licences of NVIDIA's own, most of them proprietary. They come with torch for CUDA on
Linux."""


def licence(package: str, locked: str) -> str | None:
    """An SPDX expression, as far as the metadata has one; None: the package is not installed in this version."""
    try:
        about = metadata(package)
    except PackageNotFoundError:
        return None
    if about["Version"].partition("+")[0] != locked:
        return None
    classifiers = [line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    stated = about["License-Expression"] or " OR ".join(NAMES.get(name, name) for name in classifiers)
    return stated or NAMES.get(about["License"], about["License"] or "unknown")


def licences() -> dict[str, list[str]]:
    """{licence: packages}, sorted."""
    by_licence: dict[str, list[str]] = {}
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    on_page = {package: name for name, packages in rows for package in packages.split(", ")}
    for package, locked in LOCKED.findall((ROOT / "constraints.txt").read_text(encoding="utf-8")):
        if not NVIDIA.match(package):
            name = licence(package, locked) or on_page.get(package, UNKNOWN)
            by_licence.setdefault(name, []).append(package)
    return dict(sorted(by_licence.items()))


def not_allowed(found: dict[str, list[str]]) -> list[str]:
    return [
        f"{name}: {', '.join(found[name])}"
        for name in found
        if not set(re.findall(r"[\w.-]+", name)) - {"AND", "OR", "WITH"} <= ALLOWED
    ]


def page(found: dict[str, list[str]]) -> str:
    rows = [f"| {name} | {', '.join(packages)} |" for name, packages in found.items()]
    return "\n".join([HEAD, *rows, TAIL, ""])


def main() -> int:
    found = licences()
    if problems := not_allowed(found):
        print("not in ALLOWED of scripts/licences.py:", *problems, sep="\n  ", file=sys.stderr)
        return 1
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(found), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page(found):
        return 0
    print(f"{PAGE} is not current: run python scripts/licences.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
