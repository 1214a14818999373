"""`zerofit compare --simulate` up to the launch: the devices, the recipe of the trials, refusals, the report."""

from dataclasses import replace

import pytest
from helpers import ROOT
from unit.test_limits import comparison_of, machine, rows

from zerofit.recipe.parse import parse_recipe
from zerofit.strategy.gpu_table import GPUS
from zerofit.tools.compare import trial_machine
from zerofit.tools.compare.candidates import make_recipe
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.comparison_report import ComparisonReport
from zerofit.tools.compare.results import with_rates_of
from zerofit.tools.machine import Device
from zerofit.tools.tool_recipe import read_with_recipe

GIB = 2**30
VARIABLES = {"SIMGPU_LIBRARY": "/x/simgpu_c-1.so", "SIMGPU_MEMORY": str(GIB), "PYTHONPATH": "/x"}


@pytest.fixture
def built(monkeypatch, tmp_path):
    """A compiled device, and an inspection that launches nothing."""
    monkeypatch.setattr(trial_machine.build, "target", lambda: ROOT / "README.md")
    monkeypatch.setattr(trial_machine.build, "build", lambda: tmp_path / "simgpu_c.so")
    monkeypatch.setattr(trial_machine, "inspect_trial_machine", lambda variables: variables)


def test_a_device_for_each_process(built):
    variables = trial_machine.simulated_machine("24GiB", 2)
    assert variables["SIMGPU_MEMORY"] == f"{24 * GIB},{24 * GIB}"
    assert variables["SIMGPU_WITHOUT_DATA"] == "1"
    assert variables["SIMGPU_LIBRARY"].endswith("simgpu_c.so")
    variables = trial_machine.simulated_machine("A100-80GB", 1)
    assert variables["SIMGPU_MEMORY"] == str(GPUS["a100-80gb"].usable_bytes)
    assert variables["SIMGPU_MODEL"] == "simulated a100-80gb"


def test_weights_are_not_read(tmp_path):
    """Every recipe in the tree is one without weights, of the same shape."""
    changed = 0
    for path in sorted((ROOT / "recipes").glob("*/*.yaml")):
        given, cls = read_with_recipe(CompareOptions, ["--config", str(path)], "zerofit compare")
        values = trial_machine.without_weights(make_recipe(given, cls).values)
        file = tmp_path / "recipe.yaml"
        file.write_text(make_recipe(given, cls).__class__(values, []).to_yaml())
        made = parse_recipe(cls, ["--config", str(file)])
        assert not made.model_name_or_path
        changed += bool(given.model_name_or_path)
    assert changed >= 5
    values = trial_machine.without_weights({"model_name_or_path": "microsoft/deberta-v2-xlarge", "lora": True})
    assert values == {
        "lora": True, "tokenizer_name": "microsoft/deberta-v2-xlarge", "config_name": "microsoft/deberta-v2-xlarge"
    }  # fmt: skip
    assert trial_machine.without_weights({"config_name": "gpt2"}) == {"config_name": "gpt2"}


def test_speeds_that_were_timed_stand_beside_simulated_sizes(tmp_path):
    """Rates come from this machine and never from the simulation, in fp32 where bf16 is slow."""
    timed = [{"size": 8, "samples_per_s": 21.0, "tokens_per_s": 2100.0}]
    compared = [replace(row, trials=[with_rates_of(line, timed) for line in row.trials]) for row in rows()]
    slow = replace(machine(), bf16_slowdown=12.4)
    timer = trial_machine.Timer(slow)
    assert timer.precision("bf16")[0] == timer.precision("fp16")[0] == timer.precision("fp32")[0] == "fp32"
    assert trial_machine.Timer(machine()).precision("bf16") == ("bf16", "")
    assert "in fp32, for bf16 products take 12 times as long" in timer.note("bf16")
    ours = replace(machine([Device("simulated device", GIB, GIB)]), simulated=VARIABLES)
    comparison = comparison_of(timer=timer, rows=lambda: compared, machine=ours)
    comparison.options.steps = 2
    report = ComparisonReport(comparison, "zerofit compare --simulate 1GiB --steps 2", [trial_machine.NOT_COUNTED])
    speeds = {row[0]: row for row in report.speed_table()[1:]}
    assert [(*speeds[name][1:4], speeds[name][6]) for name in ("ddp", "zero2")] == [("21", "8", "21", "2,100")] * 2
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Timed on " in text
    assert "2 timed updates of each size" in text
    assert (tmp_path / "report.html").read_text().count("<img") == 2
