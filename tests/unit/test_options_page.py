"""Pages that scripts write are current: docs/options.md names every option that a user can set."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize("script", ["options_reference", "recipes_index", "licences"])
def test_the_page_is_current(script):
    command = [sys.executable, ROOT / "scripts" / f"{script}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
