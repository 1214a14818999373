"""Benchmarks, once in small: that each of them still runs and measures what it says, not how fast anything is."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, environment

sys.path.insert(0, str(ROOT / "benchmarks"))

LOOP = ["loop_speed", "--rounds", "1", "--updates", "2", "--warmup", "1", "--num_layers", "1", "--hidden_size", "32",
        "--block_size", "32", "--vocab_size", "300"]  # fmt: skip
SMALL = {
    "the loop": LOOP,
    "counts": ["counts", "single", "ddp", "--lines", "--output", "{tmp}/counts.md"],
    "on_gpu": ["on_gpu", "{tmp}/gpu", "--tiny", "--page", "{tmp}/gpu.md"],
    "plan_accuracy": ["plan_accuracy", "measure", "--only", "BERT, 4 of 256", "--output", "{tmp}/accuracy"],
    "published_memory": ["published_memory"],
    "published_times": ["published_times", "--only", "nanogpt", "--parts"],
}  # fmt: skip
LIBRARIES = {"provenance"}  # that others import


def test_every_benchmark_is_run():
    scripts = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == {words[0] for words in SMALL.values()} | LIBRARIES


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(tmp_path, material, name):
    script, *flags = (word.format(tmp=tmp_path, material=material) for word in SMALL[name])
    documents = {file: file.read_bytes() for file in (ROOT / "docs").rglob("*") if file.is_file()}
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment())
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
    assert any(character.isdigit() for character in done.stdout), "no figure is shown"
    written = [Path(word) for word in flags if word.startswith(str(tmp_path))]
    for file in (path for path in written if path.suffix in (".md", ".json")):
        assert any(character.isdigit() for character in file.read_text()), file
    assert documents == {file: file.read_bytes() for file in (ROOT / "docs").rglob("*") if file.is_file()}
