"""docs/options.md is what scripts/options_reference.py writes: it names every option that a user can set."""

import dataclasses
import subprocess
import sys

from helpers import ROOT

from zerofit.cli import COMMANDS
from zerofit.recipe import ClmRecipe, ClsRecipe, Seq2SeqRecipe

SCRIPT = ROOT / "scripts" / "options_reference.py"
TEXT = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")


def test_the_page_is_current():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_option_and_every_tool_is_there():
    fields = {field.name: field for cls in (ClmRecipe, ClsRecipe, Seq2SeqRecipe) for field in dataclasses.fields(cls)}
    assert len(fields) > 120
    missing = [name for name, field in fields.items() if f"`--{name}`" not in TEXT]
    assert not missing
    assert not [command.name for command in COMMANDS if f"### `zerofit {command.name}" not in TEXT]
