"""What others need to trust a release: one version, locked dependencies, versions that were tried."""

import re
import sys
import tomllib
from importlib.metadata import version

import yaml
from helpers import ROOT, main_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from zerofit import __version__
from zerofit.record import environment
from zerofit.tools.doctor.doctor import make_report, read_options

sys.path.insert(0, str(ROOT / "scripts"))

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


def test_a_version_outside_the_bounds_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    """Of the packages that everybody has; a run says it before it imports them, and so does zerofit doctor."""
    assert environment.untried_versions() == []
    needed = ["torch<2.3,>=2.2", "pytest", "peft>=0.1", 'pyyaml<1; extra == "x"', "not-there>=1", "tqdm>=99"]
    monkeypatch.setattr(environment, "requires", lambda name: needed)
    (line,) = environment.untried_versions()
    installed = f"torch {version('torch')}, tqdm {version('tqdm')}"
    assert line == f"zerofit {__version__} was not tried with {installed}: pip install 'torch<2.3,>=2.2' 'tqdm>=99'"
    assert ("warning", line) in make_report(*read_options([]), {}).findings
    words = f"--config_name gpt2 --tokenizer_name x --train_file {ROOT}/README.md --strategy x --output_dir {tmp_path}"
    assert main_of("clm")(words.split()) == 2
    assert f"warning   {line}" in capsys.readouterr().out


def test_libraries_whose_private_parts_are_used_have_upper_bounds():
    """A set of scripts/test_versions.py tries the lowest and the newest of each."""
    from test_versions import LIBRARIES, NEEDED, sets

    assert len(LIBRARIES) >= 5
    for name in (*LIBRARIES, "torch"):
        assert {"<", ">="} <= {bound.operator for bound in NEEDED[name].specifier}, name
        assert NEEDED[name].specifier.contains(LOCKED[name])
    assert {"lowest", "newest", "torch-lowest", "transformers-newest"} <= sets().keys()
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(jobs["versions"]["strategy"]["matrix"]["set"]) == sets().keys()
