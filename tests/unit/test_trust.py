"""What others need to trust a release: one version, and locked dependencies."""

import re
import tomllib

import yaml
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from zerofit import __version__

LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE))


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
