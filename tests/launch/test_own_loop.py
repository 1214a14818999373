"""The changes of docs/own-loop.md, applied to train/clm.py and run."""

import re

import pytest
from helpers import ROOT, forked, metrics

PAGE = (ROOT / "docs" / "own-loop.md").read_text()
CHANGES = dict(re.findall(r"^## (.+?)\n.*?^```diff\n(.*?)^```", PAGE, re.M | re.S))


def test_the_page_has_five():
    assert len(CHANGES) == 5


def patched(text: str, diff: str) -> str:
    """A file with the hunks of a diff applied, each of which has to fit in one place."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = [line for line in hunk.splitlines() if not line.startswith(("--- ", "+++ "))]
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in f" {sign}") for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_loop(change, llama, material, cache, tmp_path):
    script = tmp_path / "clm.py"
    text = patched((ROOT / "train" / "clm.py").read_text(), CHANGES[change])
    text = text.replace("if run.should_save(update):", "if run.should_save(update) or update.number == 3:")
    script.write_text(text.replace("other.txt", str(material / "text" / "valid.txt")))
    forked(
        script, "--output_dir", tmp_path / "run", "--model_name_or_path", llama, "--train_file",
        material / "text" / "train.txt", "--block_size", "64", "--max_train_steps", "4", "--eval_steps", "2",
        "--per_device_train_batch_size", "2", "--max_eval_samples", "8", "--save_steps", "2", "--save_strategy",
        "steps", "--cache_dir", cache, processes=1,
    )  # fmt: skip
    lines = metrics(tmp_path / "run")
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 4]
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert [*(tmp_path / "run" / "checkpoints" / "update_00000003" / "state").glob("*.safetensors")], (
        "one to resume from"
    )
    if change == "A figure of one's own":
        assert all(line["longest_batch"] == 128 for line in lines[1:])
    if change == "Evaluate on a second data set":
        assert lines[-1]["eval_loss_other"] != lines[-1]["eval_loss"]
