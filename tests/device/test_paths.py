"""What a run can do beside training in fp32, on the simulated device: go on, adapt, compute in half precision, ..."""

import csv
import json
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, cut_after, environment, launched, metrics, updates

from device.runs import GIB, differences, on_device

pytestmark = pytest.mark.long

DROPOUT = ("--config_overrides", "n_layer=2,n_head=2,n_embd=64,n_positions=64")


@pytest.mark.parametrize(("before", "after"), [("device", "device"), ("device", "cpu"), ("cpu", "device")])
@pytest.mark.parametrize("strategy", ["single", "zero2"])
def test_a_run_goes_on_on_the_device_and_off_it(runs, tmp_path, strategy, before, after):
    """With dropout: from the device to the device to the bit, and else as the CPU rounds."""
    options = (*DROPOUT, "--save_steps", "3")
    whole, output = runs(before, strategy, *options)
    run = shutil.copytree(output, tmp_path / "run", symlinks=True)
    cut_after(run, 3)
    done = runs.launched(run, after, strategy, *options)
    assert "after update 3" in done.stdout, done.stderr
    assert len(updates(metrics(run))) == 6
    largest = differences(metrics(run), whole)
    assert max(largest.values()) <= (0 if before == after else 1e-6), largest


def test_the_largest_batch_within_a_limit_is_exact(device, recipes, tmp_path):
    """Each strategy's largest batch has run within the limit, and one more row has not."""
    limit, output = 12 * 2**20, tmp_path / "comparison"
    command = [
        sys.executable, "-m", "zerofit.cli", "compare", "--task", "clm", *recipes["clm"], "--strategies",
        "ddp,zero2,zero3", "--num_processes", "2", "--memory_limit", "12MiB", "--steps", "2", "--output", output,
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        env=environment(**device(16 * GIB, 16 * GIB)),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    with (output / "results.csv").open() as file:
        rows = [(row["strategy"], int(row["batch_size"]), row["outcome"]) for row in csv.DictReader(file)]
    largest = {
        name: max(size for each, size, outcome in rows if (each, outcome) == (name, "fits"))
        for name in ("ddp", "zero2", "zero3")
    }
    assert all((name, size + 1, "out_of_memory") in rows for name, size in largest.items())
    assert largest["ddp"] < largest["zero2"] <= largest["zero3"]
    lines = map(json.loads, (output / "journal.jsonl").read_text().splitlines())
    for line in (line for line in lines if line["kind"] == "size"):
        if line["outcome"] == "fits":
            assert all(rank["reserved"] <= limit for rank in line["ranks"])
        else:
            assert (line["outcome"], line["where"]) == ("out_of_memory", "device")


def test_ranks_share_a_device_only_to_be_compared(device, recipes, tmp_path):
    arguments = [*recipes["clm"], "--per_device_train_batch_size", "2"]
    done = launched(tmp_path / "run", *arguments, strategy="ddp", processes=2, launcher=True, **device(16 * GIB))
    assert "num_processes: 2 on this machine, which has 1 device. Use --num_processes 1" in done.stderr
    assert "[rank0]: Traceback" not in done.stderr


def test_those_for_gpus_that_need_no_real_one(device):
    done = on_device(
        device, str(ROOT / "tests" / "gpu" / "test_accelerator.py"), "-k", "not fp16 and not fp32 and not share"
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "skipped" not in done.stdout
