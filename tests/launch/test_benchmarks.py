"""Benchmarks, once in small: that each of them still runs and measures what it says, not how fast anything is."""

import subprocess
import sys

import pytest
from helpers import ROOT, environment

pytestmark = pytest.mark.long

SMALL = {
    "loop_speed": ["--rounds", "1", "--updates", "2", "--warmup", "1", "--num_layers", "1", "--hidden_size", "32",
                   "--block_size", "32", "--vocab_size", "300"],
    "corpus_startup": ["--tokens", "1e5"],
    "prepare_speed": ["--rounds", "1", "--workers", "1", "--megabytes", "1", "--memory", "1"],
    "kills": ["--strategies", "ddp", "--kills", "1", "--updates", "8"],
    "continual": ["--updates", "4"],
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(tmp_path, name):
    flags = {"loop_speed": ["--output", tmp_path / "loop.json"], "kills": ["--folder", tmp_path]}.get(name, [])
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *SMALL[name], *flags]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=900,
                          env=environment())  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
    assert any(character.isdigit() for character in done.stdout), "no figure is shown"
