"""Every strategy on the simulated device against one process on the CPU, for all three tasks."""

import json

import pytest

from device.runs import differences, peak

pytestmark = pytest.mark.long

ALL = ("single", "ddp", "zero1", "zero2", "zero2_plain", "zero2_offload", "zero3", "zero3_offload_optimizer",
       "zero3_offload", "fsdp2")  # fmt: skip
SOME = ("single", "ddp", "zero2", "zero3_offload")
CASES = [("clm", each) for each in ALL] + [(task, each) for task in ("cls", "seq2seq") for each in SOME]


@pytest.mark.parametrize(("task", "strategy"), CASES)
def test_strategies_agree_with_the_cpu(runs, task, strategy):
    (ours, output), (theirs, reference) = runs("device", strategy, task=task), runs("cpu", "single", task=task)
    largest = differences(ours, theirs)
    most = 1e-6 if task == "clm" else 1e-5  # larger weights let rounding grow
    assert all(value <= most for value in largest.values()), largest
    held_out = {name: value for name, value in theirs[-1].items() if name.startswith("eval_")}
    assert len(held_out) >= 2
    assert {name: ours[-1][name] for name in held_out} == pytest.approx(held_out, rel=1e-5)
    if task != "clm":
        predicted, expected = (predictions(folder) for folder in (output, reference))
        assert len(expected) == 10
        assert len(set(expected)) > 1
        assert predicted == expected


def predictions(output) -> list[str]:
    return [json.loads(line)["prediction"] for line in (output / "predictions.jsonl").read_text().splitlines()]


def test_what_is_sharded_or_offloaded_is_not_on_the_device(runs):
    """The peaks of the same run: each of these holds less on the device than the one before it."""
    order = ("ddp", "zero1", "zero2", "zero3", "zero3_offload_optimizer", "zero3_offload")
    peaks = {strategy: peak(runs("device", strategy)[0]) for strategy in order}
    assert sorted(peaks, key=peaks.get, reverse=True) == list(order), peaks
    assert peak(runs("device", "zero2_offload")[0]) < peaks["zero2"]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "fsdp2", "sp", "pp"])
def test_inputs_of_recomputed_layers_wait_on_the_host(runs, strategy):
    """The same run to the last digit, and at its peak the inputs of eight layers less two or three on the device; of
    a pipeline, of four."""
    shape = "hidden_size=64,intermediate_size=64,num_hidden_layers=8,num_attention_heads=2,num_key_value_heads=2"
    deep = ("--config_name", "llama-2-7b", "--config_overrides", f"{shape},max_position_embeddings=256",
            "--block_size", "256", "--gradient_checkpointing")  # fmt: skip
    (plain, _), (offloaded, _) = (runs("device", strategy, *deep, *more) for more in ([], ["--activation_offload"]))
    assert differences(offloaded, plain) == {"loss": 0, "grad_norm": 0, "learning_rate": 0}
    inputs = 2 * 256 * 64 * 4 // (2 if strategy == "sp" else 1)
    assert peak(plain) - peak(offloaded) >= (1 if strategy == "pp" else 5) * inputs
