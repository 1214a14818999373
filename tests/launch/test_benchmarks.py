"""Benchmarks, once in small: that each of them still runs and measures what it says, not how fast anything is."""

import contextlib
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from helpers import ROOT, environment

from zerofit.recipe import ClmRecipe, parse_recipe
from zerofit.strategy.optimizers import make_optimizer

sys.path.insert(0, str(ROOT / "benchmarks"))
import loop_speed
import on_gpu

LOOP = ["loop_speed", "--rounds", "1", "--updates", "2", "--warmup", "1", "--num_layers", "1", "--hidden_size", "32",
        "--block_size", "32", "--vocab_size", "300"]  # fmt: skip
SMALL = {
    "the loop": LOOP,
    "counts": ["counts", "single", "ddp", "--output", "{tmp}/counts.md"],
    "on_gpu": ["on_gpu", "{tmp}/gpu", "--tiny", "--page", "{tmp}/gpu.md"],
    "plan_accuracy": ["plan_accuracy", "measure", "--only", "BERT, 4 of 256", "--output", "{tmp}/accuracy"],
    "published_memory": ["published_memory"],
    "published_times": ["published_times", "--only", "nanogpt", "--parts"],
}
LIBRARIES = {"provenance"}  # that others import


def test_every_benchmark_is_run():
    scripts = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == {words[0] for words in SMALL.values()} | LIBRARIES


def test_every_launch_on_a_gpu_is_a_recipe():
    model, _, options, updates = on_gpu.PADDED
    rows = [*on_gpu.ROWS, *((model, "single", 8, f"--packing none {each}") for each in options)]
    for name, strategy, size, further in rows:
        recipe = parse_recipe(ClmRecipe, on_gpu.words_of({"strategy": strategy, "flags": on_gpu.flags_of(
            on_gpu.MODELS[name], size, further)}, Path("out"), updates)[1:])  # fmt: skip
        assert recipe.max_train_steps == updates
        assert (ROOT / "accelerate_configs" / f"{recipe.strategy}.yaml").is_file()
    assert {*on_gpu.MODELS, "single", "zero2", "zero3", "--torch_compile --float8", ""} <= {*sum(rows, ())}


def test_a_measurement_that_was_stopped_goes_on(tmp_path):
    made: list[int] = []

    def measure(limit_s: float, stops_after_first: bool = False) -> list[dict]:
        results = on_gpu.Results(tmp_path / "on-gpu.json", limit_s, torch.device("cpu"))
        with contextlib.suppress(on_gpu.OutOfTime):
            for number in range(2):
                results.add("updates", {"number": number}, lambda n=number: made.append(n) or {"seconds": n})
                on_gpu.END["s"] = 0 if stops_after_first else on_gpu.END["s"]
        return results.found["parts"]["updates"]

    assert measure(1000, stops_after_first=True) == measure(-1) == [{"number": 0, "seconds": 0}]
    assert measure(1000) == [{"number": number, "seconds": number} for number in range(2)]
    assert made == [0, 1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", "stopped after 2 s"),  # it has to be killed
        ("time.sleep(60)", "stopped after 2 s"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it ended with code -9, without a message"),
        ("raise ValueError('of the test')", "ValueError: of the test"),
        ("print('done')", ""),
    ],
)
def test_a_launch_tells_why_it_ended(monkeypatch, text, reason):
    monkeypatch.setattr(on_gpu, "KILL_S", 1)
    assert on_gpu.run([sys.executable, "-c", f"import os, signal, time; {text}"], 2)[1] == reason


@pytest.mark.parametrize("fails", [False, True])
def test_a_candidate_that_ends_is_freed(tmp_path, monkeypatch, fails):
    """Else the next ones run out of memory on a GPU."""
    models, add = [], loop_speed.Laps.add

    def make_watched_optimizer(model, *arguments):
        models.append(weakref.ref(model))
        return make_optimizer(model, *arguments)

    def add_or_fail(laps):
        if fails:
            raise RuntimeError("of the test")
        add(laps)

    monkeypatch.setattr(loop_speed.Laps, "add", add_or_fail)
    monkeypatch.setattr(loop_speed, "make_optimizer", make_watched_optimizer)
    (model,) = on_gpu.TINY_SHAPES["MODELS"].values()
    shape = on_gpu.Shape(model, 2, torch.device("cpu"), tmp_path)
    results = on_gpu.Results(tmp_path / "on-gpu.json", 1000, torch.device("cpu"))
    name = "zerofit, eager"
    results.add("side by side", {"candidate": name}, lambda: {"seconds": shape.seconds(name)})
    (row,) = results.found["parts"]["side by side"]
    assert row.get("reason") == ("RuntimeError: of the test" if fails else None)
    assert len(models) == 1
    assert models[0]() is None


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
