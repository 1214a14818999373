"""A rank that is slow, or stopped, is named. (That others are not: tests/unit/test_watchdog.py.)"""

import platform
import re
from pathlib import Path

import pytest
from helpers import completed, launched, metrics, updates

SCRIPT = Path(__file__).with_name("disturbed.py")
PLACE = r"slow      rank 1 on machine 0 \(\S+\): since update \d+ "
SAID = {
    "forward": PLACE + r"computing \(forward and backward\) takes [\d.]+ times as long as on .*, which wait [\d.]+ s",
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
    ("ddp", 2, "forward"),
    *(pytest.param(strategy, processes, what, marks=pytest.mark.long)
      for strategy, processes, what in [
          ("ddp", 2, "data"), ("zero2", 2, "data"), ("zero2", 2, "forward"), ("zero3", 2, "forward"),
          ("zero3", 2, "data"), ("fsdp2", 2, "forward"), ("pp", 4, "data"), ("pp", 4, "forward"),
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


@pytest.mark.long
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update", "evaluate", "save"])
def test_a_stopped_rank_is_named_with_its_machine_its_phase_and_what_others_wait_in(options, tmp_path, phase):
    flags = ["--max_train_steps", "6", "--eval_steps", "2", "--save_steps", "2", "--watchdog_minutes", "0.05"]
    done = launched(
        tmp_path / "run", *options, *flags, strategy="ddp", processes=2, through=(SCRIPT, 1, f"stop in {phase}")
    )
    assert done.returncode
    here = rf"\(pid \d+\) on machine 0 \({re.escape(platform.node())}\)"
    assert re.search(rf"rank 1 {here} is stopped \(.*\), in phase {phase} of update 2: other ranks", done.stderr)
    assert re.search(rf"rank 0 {here} has shown no sign of life for", done.stderr)
    assert re.search(r"by the flight recorder: gloo:\w+ of .*: rank 0 waits, rank 1 has left no record", done.stderr)
