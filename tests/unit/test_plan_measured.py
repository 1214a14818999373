"""`zerofit plan` predicts of small models what docs/measurements/plan.md says, beside what was measured."""

import re
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import plan_accuracy
from plan_accuracy import MIB, Configuration, Predictor

PRINTED = 0.06  # MiB: the page has one digit
FURTHEST = 0.045  # of a peak that was measured
PLAIN = {"GPT-2, 3 of 512 zero1 bf16 64 2", "GPT-2, 3 of 512 zero2_offload bf16 96 2", "BERT, 4 of 256 ddp bf16 64 2",
         "Llama, 3 of 384, grouped zero3 bf16 96 2 packing concatenate", "Llama, 4 of 256 zero3 bf16 128 1 lora",
         "Llama, 4 of 256 fsdp2 bf16 128 2 gradient_checkpointing",
         "Llama, 3 of 384, grouped tp bf16 96 2", "GPT-2, 4 of 256 pp fp32 128 2 packing concatenate",
         "Mixtral, 4 of 256 ep bf16 96 2",
         "Llama, 8 of 256 zero3 fp32 256 1 packing concatenate gradient_checkpointing activation_offload"}  # fmt: skip
OLDER = [plan_accuracy.EXPERTS[1], plan_accuracy.OFFLOADED[4]]  # measured and predicted by an earlier commit
CASES = [*(one for half in ("all", "shared") for one in plan_accuracy.chosen(half)), *OLDER]


def published(configuration: Configuration) -> dict[int, tuple[float, float]]:
    """{micro-batch: (predicted, measured)} of the page, in MiB."""
    about = (configuration.model, configuration.strategy, configuration.precision)
    size = f"{configuration.length} x {configuration.accumulation}"
    start = r"\| (?:\w+: )?" + r"(?: \*)? \| ".join(map(re.escape, about)) + rf" \| {size} \|"
    lines = re.findall(rf"^{start}.*$", (ROOT / "docs/measurements/plan.md").read_text(), re.MULTILINE)
    found = (
        {int(size): (float(a), float(b)) for size, a, b in re.findall(r"(\d+): ([\d.]+) / ([\d.]+),", line)}
        for line in lines
    )
    return next(each for each in found if set(each) == set(configuration.sizes))


def test_the_page_has_them():
    assert len(CASES) >= 45
    assert {one.name for one in CASES} >= PLAIN
    assert all(map(published, CASES))


@pytest.mark.parametrize(
    "case", [pytest.param(one, id=one.name, marks=() if one.name in PLAIN else pytest.mark.long) for one in CASES]
)
def test_a_peak_is_predicted_as_published_and_as_measured(case):
    predictor = Predictor(case)
    for size, (predicted, measured) in published(case).items():
        peak = predictor.peak(size).allocated / MIB
        assert case in OLDER or peak == pytest.approx(predicted, abs=PRINTED)
        assert peak == pytest.approx(measured, rel=FURTHEST)
