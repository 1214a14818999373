"""The extension is built once, and a machine that cannot build it says why. The compiler here is a stand-in."""

import os
import subprocess
import sys

from helpers import ROOT

COMPILER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


def start(folder, **variables) -> subprocess.Popen:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "CXX": str(folder / "c++"), **variables}
    command = [sys.executable, "-m", "zerofit.tools.simulate.build"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def test_two_sessions_build_once(tmp_path):
    (tmp_path / "c++").write_text(COMPILER)
    (tmp_path / "c++").chmod(0o755)
    said = {process.communicate() for process in [start(tmp_path), start(tmp_path)]}
    assert len(said) == 1
    ((exports, problems),) = said
    assert problems == ""
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    (built,) = (tmp_path / "simgpu_c").glob("*.so")
    assert f"export SIMGPU_LIBRARY={built}\n" in exports
