"""`zerofit compare --simulate` up to the launch: the devices, the recipe of the trials, refusals, the report."""

from dataclasses import replace

import pytest
from helpers import ROOT, refusal
from unit.test_limits import comparison_of, machine, rows

from zerofit.recipe.parse import parse_recipe
from zerofit.strategy.gpu_table import GPUS
from zerofit.tools.compare import trial_machine
from zerofit.tools.compare.candidates import make_recipe
from zerofit.tools.compare.compare import CompareOptions
from zerofit.tools.compare.comparison_report import ComparisonReport
from zerofit.tools.compare.results import with_rates_of
from zerofit.tools.compare.trial_files import key_of
from zerofit.tools.compare.trial_machine import launch_environment
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


def test_what_cannot_be_simulated_is_refused(built, monkeypatch):
    said = refusal(trial_machine.simulated_machine, "a100-8gb", 1)
    assert "simulate = 'a100-8gb'" in said
    assert "h100-80gb" in said
    monkeypatch.setattr(trial_machine.build, "missing", lambda: "there is no C++ compiler")
    said = refusal(trial_machine.simulated_machine, "24GiB", 1)
    assert "simulate = 24GiB:" in said
    assert "apt install g++" in said


def test_options_without_use_are_refused():
    config = str(ROOT / "recipes" / "clm" / "compare-small.yaml")
    for flags in (["--finish"], ["--steps", "3", "--lengths", "16"]):
        said = refusal(read_with_recipe, CompareOptions, ["--config", config, "--simulate", "1GiB", *flags], "compare")
        assert f"{flags[0][2:]}: no effect with simulate = 1GiB. Remove it" in said


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


def test_launches_and_results_are_those_of_the_simulation():
    real = machine([Device("GPU", GIB, GIB)])
    ours = replace(real, simulated=VARIABLES)
    assert launch_environment(ours, 1) == VARIABLES
    assert launch_environment(real, 1) == {}
    keys = [key_of(machine=each.identity) for each in (real, ours)]
    assert keys[0] != keys[1], "a journal does not take one for the other"
    elsewhere = replace(real, simulated=VARIABLES | {"PYTHONPATH": "/y"})
    assert key_of(machine=elsewhere.identity) == keys[1]


def test_the_report_says_that_it_is_simulated(tmp_path):
    untimed = [replace(row, trials=[with_rates_of(line, []) for line in row.trials]) for row in rows()]
    real = machine([Device("simulated device", GIB, GIB)])
    ours = replace(real, kind="npu", simulated=VARIABLES)
    comparison = comparison_of(rows=lambda: untimed, machine=ours)
    report = ComparisonReport(comparison, "zerofit compare --simulate 1GiB", [trial_machine.NOT_COUNTED])
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Batch sizes, simulated: x\n")
    assert "The devices are simulated." in text
    assert "not in the peaks are workspaces of kernels" in text
    assert "zero2 holds the largest batch, 40 per process, 5 times the 8 of ddp.\n" in text
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 1
    for file in (text, page, (tmp_path / "results.csv").read_text().partition("\n")[2], report.for_terminal()):
        assert "samples/s" not in file
        assert "12.0" not in file, "a rate"


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
    assert [speeds[name][1:5] for name in ("ddp", "zero2")] == [("21", "8", "21", "2,100")] * 2
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Timed on " in text
    assert "2 timed updates of each size" in text
    assert (tmp_path / "report.html").read_text().count("<svg") == 2
