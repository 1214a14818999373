"""Installed packages: against the versions that zerofit needs, and those that it is tested with."""

import importlib.metadata
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from train.record.environment import PACKAGES
from train.strategy.pairs import ROOT
from train.tools.doctor.report import ERROR, NOTE, WARNING, Finding

SHOWN = 6  # packages that differ from constraints.txt, in a message


def installed_packages() -> dict[str, dict[str, str]]:
    """{package: {version: folder}}, in the order in which Python looks: the first is imported."""
    versions: dict[str, dict[str, str]] = {}
    for distribution in importlib.metadata.distributions():
        name, folder = distribution.metadata["Name"], str(distribution.locate_file(""))
        if name and not folder.endswith("_vendor"):  # setuptools' own copies, which come last
            versions.setdefault(canonical(name), {}).setdefault(distribution.version, folder)
    return versions


def canonical(name: str) -> str:
    """A package's name as indexes write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_versions(file: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """{package: the version of constraints.txt}; empty where zerofit is installed without its tree."""
    lines = file.read_text().splitlines() if file.is_file() else []
    pairs = (line.partition(";")[0].partition("==") for line in lines if not line.startswith("#"))
    return {canonical(name): version.strip() for name, equals, version in pairs if equals}


def required_packages(file: Path = ROOT / "pyproject.toml") -> list[str]:
    """The dependencies of pyproject.toml, as they stand there."""
    return tomllib.loads(file.read_text())["project"]["dependencies"] if file.is_file() else []


def judge_packages(
    installed: Mapping[str, Mapping[str, str]], pinned: Mapping[str, str], required: list[str]
) -> list[Finding]:
    """Packages that are missing, outside of their range, there twice, or of another version than the tested one.

    Args:
        installed: {package: {version: folder}}, the imported version first.
    """
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, required):
        versions, needed = list(installed.get(canonical(requirement.name), ())), str(requirement.specifier)
        if not versions:
            found.append(Finding(ERROR, f"{requirement.name} is not installed", _install(str(requirement))))
        elif not requirement.specifier.contains(versions[0], prereleases=True):
            found.append(Finding(ERROR, f"{requirement.name} {versions[0]} is installed, and zerofit needs {needed}",
                                 _install(str(requirement))))  # fmt: skip
    for name, versions in installed.items():
        if len(versions) > 1:
            where = ", ".join(f"{version} in {folder}" for version, folder in versions.items())
            found.append(Finding(
                WARNING, f"{name} is installed {len(versions)} times: {where}. Python imports the first",
                f"pip uninstall {name}, until there is none, and install it again"))  # fmt: skip
    different = {
        name: f"{name} {next(iter(installed[name]))} ({version})" for name, version in pinned.items()
        if name in installed and _public(next(iter(installed[name]))) != _public(version)
    }  # fmt: skip
    if different:
        main = [canonical(name) for name in PACKAGES]
        texts = [different[name] for name in sorted(different, key=lambda name: (name not in main, name))]
        more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        found.append(Finding(
            NOTE, f"zerofit is tested with other versions, those of constraints.txt: {', '.join(texts[:SHOWN])}{more}",
            "To have the same: pip install -c constraints.txt -e ."))  # fmt: skip
    return found


def _install(requirement: str) -> str:
    return f"make setup, or pip install {requirement!r}"


def _public(version: str) -> str:
    """2.13.0+cpu -> 2.13.0: builds differ in what follows."""
    return version.partition("+")[0]
