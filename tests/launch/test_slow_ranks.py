"""A rank that is slow, or stands still, is named; ranks that are as fast as each other are not."""

import re
from pathlib import Path

import pytest
from helpers import completed, metrics, updates

SCRIPT = Path(__file__).with_name("disturbed.py")
PLACE = r"slow      rank 1 on machine 0 \(\S+\): since update \d+ "
SAID = {
    "forward": PLACE + r"forward and backward take [\d.]+ times as long as on other ranks, which wait [\d.]+ s",
    "data": PLACE + r"an update waits [\d.]+ s for its data, [\d.e-]+ s on other ranks, which wait [\d.]+ s",
}


@pytest.fixture(scope="module")
def options(llama, material, cache) -> list:
    return [
        "--model_name_or_path", llama, "--train_file", material / "text" / "train.txt", "--block_size", "64",
        "--per_device_train_batch_size", "4", "--cache_dir", cache, "--dataloader_num_workers", "0",
        "--max_eval_samples", "8", "--report_to", "none",
    ]  # fmt: skip


CASES = [
    ("ddp", 2, "forward"), ("zero2", 2, "data"), ("zero3", 2, "forward"), ("pp", 4, "forward"),
    *(pytest.param(strategy, processes, what, marks=pytest.mark.long)
      for strategy, processes, what in [
          ("ddp", 2, "data"), ("zero2", 2, "forward"), ("zero3", 2, "data"), ("fsdp2", 2, "forward"),
          ("pp", 4, "data"),
      ]),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "processes", "what"), CASES)
def test_a_slow_rank_is_named(options, tmp_path, strategy, processes, what):
    done = completed(tmp_path / "run", *options, "--max_train_steps", "33", strategy=strategy, processes=processes,
                     through=(SCRIPT, 1, what))  # fmt: skip
    said = re.findall("slow      rank.*", done.stdout)
    assert len(said) == 1, said
    assert re.match(SAID[what], said[0])
    last = [line["rank_seconds"] for line in updates(metrics(tmp_path / "run")) if "rank_seconds" in line][-1]
    assert last["slowest_rank"] == 1
