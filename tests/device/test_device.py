"""The core: the simulated device is what it says, and the product's runs on it are those on the CPU."""

import json
import re
from pathlib import Path

import counts
import pytest

from device.runs import GIB, HERE, differences, on_device, peak, steady_peak

# Of the model that benchmarks/counts.py trains: embedding, head and last norm too.
WEIGHTS = 2 * counts.LAYER + 2 * counts.VOCABULARY * counts.HIDDEN + counts.HIDDEN
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB}


def held(output: Path) -> dict[str, int]:
    """Bytes of rank 0's weights and optimizer state at the end."""
    return json.loads((output / "environment.json").read_text())["bytes_held_by_rank_0"]


def bytes_of(amount: str) -> float:
    number, unit = amount.split()
    return float(number.replace(",", "")) * UNITS[unit]


def test_the_device_and_parts_of_the_product_on_it(device):
    done = on_device(device, str(HERE / "operators.py"), str(HERE / "parts.py"))
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 19
    assert "skipped" not in done.stdout


def test_a_run_on_the_device_is_the_run_on_the_cpu(runs):
    """Under the other strategies: test_strategies.py."""
    lines, output = runs("device", "ddp")
    assert "device: simgpu" in (output / "strategy.yaml").read_text()
    reference, _ = runs("cpu", "single")
    largest = differences(lines, reference)
    assert all(value <= 1e-6 for value in largest.values()), largest
    assert lines[-1]["eval_loss"] == pytest.approx(reference[-1]["eval_loss"], rel=1e-6)


@pytest.mark.long
def test_no_state_is_held_twice_under_ddp(runs):
    """The gradients lie in the buckets of DDP, which are as large; two micro-batches, so that there are some."""
    lines, output = runs("device", "single")
    weights = held(output)["parameters"]
    assert peak(lines) > 4 * weights  # gradients and two moments
    assert peak(runs("device", "ddp")[0]) - peak(lines) < weights / 2


def test_out_of_memory_on_one_rank(runs, tmp_path):
    """A block less than the peak of the same run is too little: `peak_memory_bytes` is the allocator's.

    The report's rows are what the rank held: its weights, gradients and moments, and the rest of the peak.
    """
    lines, output = runs("device", "ddp")
    room, weights = steady_peak(lines) - 512, held(output)["parameters"]
    done = runs.launched(tmp_path / "run", "device", "ddp", sizes=(16 * GIB, room))
    assert "exitcode  : 87" in done.stderr
    said = done.stderr
    assert re.search(r"out of memory: rank 1 of 2, \w+ of update 2, the device's memory \(ddp, fp32\)", said), said
    assert "rank 0 leaves in phase" in said, said
    assert "[rank1]: Traceback" not in said
    asked, free, total = (
        bytes_of(amount) for amount in re.search(r"asked for (.*?); (.*?) of (.*?) free", said).groups()
    )
    assert total == pytest.approx(room, rel=0.02)
    assert free < asked < room
    table = re.search(r"held by this rank.*?:\n(.*?)\n +what would help", said, re.DOTALL)[1]
    rows = {name: bytes_of(amount) for name, amount in re.findall(r"^ +(\S.*?)  +([\d,.]+ \w+)$", table, re.MULTILINE)}
    assert len(rows) == 4
    assert rows["weights"] == pytest.approx(weights, rel=0.02)
    assert rows["gradients"] == pytest.approx(weights, rel=0.02)
    assert rows["optimizer state"] == pytest.approx(2 * weights, rel=0.05)
    rounding = 2 * 0.05 * 2**20  # two of the rows are tenths of a MiB
    assert room - free - rounding <= sum(rows.values()) <= room + rounding, "in use now, and at the update's peak"
    assert rows["activations, logits and workspace"] > weights / 4


def test_collectives_and_waits_of_an_update(server):
    """As benchmarks/counts.py counts them. Under DDP: one all-reduce of the gradients for both micro-batches, and
    nothing that the host waits for."""
    ranks = counts.launch(server, "ddp", 2, 2)
    found = {key: each for key, each in counts.collectives(ranks[0], len(ranks)).items() if key[0] != "update"}
    assert found in ({("backward", "all-reduce"): [1, size * WEIGHTS]} for size in (2, 4)), "in bf16 or in fp32"
    assert not [key for key in counts.waits(ranks) if key[0] != "update"]
