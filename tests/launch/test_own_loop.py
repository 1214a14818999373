"""The changes of docs/own-loop.md, applied to train/clm.py and run."""

import re
import shutil
import subprocess

import pytest
from helpers import ROOT, forked, metrics

PAGE = (ROOT / "docs" / "own-loop.md").read_text()
CHANGES = dict(re.findall(r"^## (.+?)\n.*?^```diff\n(.*?)^```", PAGE, re.M | re.S))


def test_the_page_has_five():
    assert len(CHANGES) == 5


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_loop(change, llama, material, cache, tmp_path, monkeypatch):
    (tmp_path / "train").mkdir()
    script = shutil.copy(ROOT / "train" / "clm.py", tmp_path / "train")
    before = (tmp_path / "train" / "clm.py").read_text()
    for hunk in re.split(r"(?m)^(?=--- )", CHANGES[change]):
        if hunk:
            command = ["patch", "--batch", "--forward", "-p1"]
            done = subprocess.run(command, cwd=tmp_path, input=hunk, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "train" / "clm.py").read_text() != before
    shutil.copy(material / "text" / "valid.txt", ROOT / "other.txt") if "other.txt" in CHANGES[change] else None
    try:
        forked(
            script, "--output_dir", tmp_path / "run", "--model_name_or_path", llama, "--train_file",
            material / "text" / "train.txt", "--block_size", "64", "--max_train_steps", "4", "--eval_steps", "2",
            "--per_device_train_batch_size", "2", "--max_eval_samples", "8", "--save_steps", "2", "--save_strategy",
            "steps", "--cache_dir", cache,
        )  # fmt: skip
    finally:
        (ROOT / "other.txt").unlink(missing_ok=True)
    lines = metrics(tmp_path / "run")
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 4]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    if change == "A figure of one's own":
        assert all(line["longest_batch"] == 128 for line in lines[1:])
    if change == "Evaluate on a second data set":
        assert lines[-1]["eval_loss_other"] != lines[-1]["eval_loss"]
