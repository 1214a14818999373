"""`zerofit verify`, for real: one strategy, with a kill and without."""

import subprocess
import sys

import pytest
import yaml
from helpers import ROOT, environment

RECIPE = {
    "config_name": "gpt2", "config_overrides": "n_layer=2,n_head=2,n_embd=32,n_positions=32", "block_size": 32,
    "train_tokenizer_vocab_size": 300, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
    "num_warmup_steps": 100, "train_file": "README.md", "document_separator": "paragraph",
}  # fmt: skip


@pytest.mark.parametrize("kills", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_recipe_is_verified(tmp_path, cache, kills):
    """The tables and the verdict are those of real runs; what they compare is tested in unit/test_verify.py."""
    recipe = tmp_path / "clm" / "tiny.yaml"
    recipe.parent.mkdir()
    recipe.write_text(yaml.safe_dump({**RECIPE, "cache_dir": cache}))
    output = tmp_path / "proof"
    command = [sys.executable, "-m", "zerofit.cli", "verify", "--config", recipe, "--strategies", "ddp", "--updates",
               "6", "--kills", kills, "--output", output]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment()
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shown = done.stdout
    assert "num_warmup_steps 2 instead of 100" in shown
    agreement, *resumed = (line.split() for line in shown.splitlines() if line.startswith("  ddp "))
    assert (agreement[1], agreement[-3:]) == ("2", ["0", "0", "agrees"])
    assert 0 < float(agreement[2]) < 1e-5, "other sums round otherwise: an exact zero would be no comparison"
    assert len(resumed) == kills
    if kills:
        assert "ddp, 2 processes: killed after update" in shown
        assert (resumed[0][1], resumed[0][2], resumed[0][-3:]) == ("2,2", "1", ["0", "0", "agrees"])
    left = "1 kill left no trace" if kills else "no run was killed"
    assert f"verified against one process: ddp; {left} (6 updates, " in shown
    assert {path.name for path in output.iterdir()} == {"recipe.yaml", "report.txt", "logs"}
    assert (output / "report.txt").read_text() in shown
