"""What others need to trust a release: versions, locked dependencies, licences, workflows."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from zerofit import __version__

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation["version"] == newest[1] == __version__


def test_the_lock_has_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"--extra (\w+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert {"trackers", "dev", "megatron"} <= set(extras)
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    wanted = [Requirement(line) for group in groups for line in group]
    assert len(wanted) > 25
    versions = {line.name: LOCKED.get(canonicalize_name(line.name)) for line in wanted}
    wrong = [str(line) for line in wanted if not line.specifier.contains(versions[line.name] or "0", prereleases=True)]
    assert not wrong + [name for name, version in versions.items() if version is None], "run make lock"


def test_the_lock_names_no_index():
    assert len(LOCKED) > 120
    assert LOCK.count("--hash=sha256:") > len(LOCKED)
    assert not re.search(r"://|--(extra-)?index-url|--find-links", LOCK)


def test_licences_are_known_and_their_page_is_current():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "licences.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_call_targets_and_pin_actions(file):
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert "permissions" in workflow
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert len(actions) >= 3
    assert not [action for action in actions if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)]
    lines = [step["run"] for step in steps if "run" in step]
    matrices = [job["strategy"]["matrix"].get("target", []) for job in workflow["jobs"].values() if "strategy" in job]
    named = {line.removeprefix("make ") for line in lines if line.startswith("make ")} - {'"$TARGET"'}
    named |= {target for targets in matrices for target in targets}
    assert "test" in named
    assert named <= TARGETS
    assert not [line for line in lines if not line.startswith(("make ", "gh "))]


def test_workflows_pass_actionlint():
    assert len(WORKFLOWS) >= 2
    if shutil.which("actionlint") is None:
        pytest.skip("actionlint missing")
    subprocess.run(["actionlint", *WORKFLOWS], check=True)
