"""The wheel, without a clone: strategies, recipes and scripts are in it."""

import subprocess
import sys

import pytest
from helpers import BIN, ROOT, environment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the command of an installed wheel in an empty folder; returns what it prints."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    sources = ["zerofit", "train", "accelerate_configs", "ds_configs", "recipes", "pyproject.toml", "setup.py"]
    tree = tmp_path_factory.mktemp("tree")  # building writes into it
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in [*sources, "README.md", "LICENSE"]), tree], check=True)
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    subprocess.run([*pip, *build, folder, tree], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    site, empty = folder / "site", folder / "empty"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True, capture_output=True)
    empty.mkdir()

    def zerofit(*words: str) -> str:
        command = [sys.executable, "-m", "zerofit.cli", *words]
        path = {"PYTHONPATH": str(site), "PATH": f"{BIN}:/usr/bin:/bin"}
        done = subprocess.run(command, cwd=empty, env=environment(**path), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert str(ROOT) not in done.stdout
        return done.stdout

    return zerofit


def test_what_is_in_the_wheel(run):
    """Recipes, scripts and strategies, by their names."""
    shown = run("launch", "stdlib-gpt2", "--dry_run")
    assert "site/zerofit/train/clm.py --config" in shown
    assert "zerofit/recipes/clm/stdlib-gpt2.yaml" in shown
    assert "this strategy can run here" in run("doctor", "--strategy", "zero2", "--num_processes", "2")
