"""Gradients that are not finite never reach the weights under any stage of ZeRO; in bf16 its own check is off."""

import json
from pathlib import Path

import pytest
from helpers import completed, metrics, updates

SCRIPT = Path(__file__).with_name("disturbed.py")
STRATEGIES = ["zero3", *(pytest.param(name, marks=pytest.mark.long)
                         for name in ("zero1", "zero2", "zero2_offload", "zero3_offload"))]  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.long)])
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_are_not_finite_are_refused(llama, material, cache, tmp_path, strategy, processes, precision):
    """Those of the last rank alone, whose loss is as it should be; an update behind them trains."""
    options = ["--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--block_size", "64",
               "--per_device_train_batch_size", "4", "--cache_dir", cache, "--max_train_steps", "5", "--precision",
               precision, "--validation_split_percentage", "0", "--save_strategy", "no", "--on_anomaly", "skip",
               "--report_to", "none"]  # fmt: skip
    completed(tmp_path / "run", *options, strategy=strategy, processes=processes,
              through=(SCRIPT, processes - 1, "gradient 1 nan 1 inf 1"))  # fmt: skip
    found = [json.loads(line) for line in (tmp_path / "run" / "anomalies.jsonl").read_text().splitlines()]
    assert [line["update"] for line in found] == [2, 4]
    assert all(line["reason"].startswith("grad_norm is ") for line in found)
    lines = updates(metrics(tmp_path / "run"))
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["loss"] < 7 and (line["update"] in (2, 4) or 0 < line["grad_norm"] < 100) for line in lines)
    assert lines[2]["loss"] != lines[0]["loss"], "update 1 has trained"
