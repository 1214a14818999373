"""The device without data: nothing is computed, and the allocator's figures are those of the device that computes."""

import pytest
from helpers import updates


def peaks(lines: list[dict]) -> list[int]:
    return [line["peak_memory_bytes"] for line in updates(lines)]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3"])
def test_peaks_are_those_of_the_device_that_computes(runs, strategy):
    """In every update, to the byte."""
    lines, _ = runs("without_data", strategy)
    assert peaks(lines) == peaks(runs("device", strategy)[0])
    assert len(peaks(lines)) == 6
    assert {line["loss"] for line in updates(lines)} == {0}, "what is floating-point reads as zeros"
