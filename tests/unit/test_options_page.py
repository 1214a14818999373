"""Pages that scripts write are current: docs/options.md names every option that a user can set."""

import dataclasses
import subprocess
import sys

import pytest
from helpers import ROOT

from zerofit.cli import COMMANDS
from zerofit.recipe import ClmRecipe, ClsRecipe, Seq2SeqRecipe

TEXT = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["options_reference", "recipes_index", "licences"])
def test_the_page_is_current(script):
    command = [sys.executable, ROOT / "scripts" / f"{script}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_option_and_every_tool_is_there():
    fields = {field.name: field for cls in (ClmRecipe, ClsRecipe, Seq2SeqRecipe) for field in dataclasses.fields(cls)}
    assert len(fields) > 120
    missing = [name for name, field in fields.items() if f"`--{name}`" not in TEXT]
    assert not missing
    assert not [name for name in COMMANDS if f"### `zerofit {name}" not in TEXT]
