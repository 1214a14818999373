"""docs/recipes.md is what scripts/recipes_index.py writes: it names every recipe."""

import subprocess
import sys

from helpers import ROOT


def test_the_page_is_current():
    script = ROOT / "scripts" / "recipes_index.py"
    done = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_recipe_is_there():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    assert len(recipes) >= 25
    assert not [file for file in recipes if f"(../{file.relative_to(ROOT)})" not in text]
