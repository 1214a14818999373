"""The commands of documents, as printed and in their order: docs/tour.md prints what is on the page, and the guides
lead from fine-tuning to preferences."""

import json
import math
import os
import re
import subprocess

import pytest
from helpers import BIN, ROOT, environment, metrics, updates, write_records

STEP = re.compile(r"^```bash\n(.*?)^```\n(?:\n```\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
# What depends on the machine and on its Python: losses, sizes, times and rates.
VARIES = re.compile(r"\d[\d,]*[.:]\d[\d.:]*(e[-+]\d+)?[kMG]?|[\d,]+(?= tokens/s| +\d+\.\dM)")


def typed(commands: str, folder) -> str:
    """What commands print, all of which have to end well."""
    place = environment(PATH=f"{BIN}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    done = subprocess.run(["bash", "-e"], input=commands, cwd=folder, env=place, text=True, timeout=1200,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


def lines_of(text: str, exact: bool) -> list[str]:
    return [" ".join((line if exact else VARIES.sub("#", line)).split()) for line in text.splitlines()]


@pytest.mark.long
def test_the_tour_is_as_the_page_says(tmp_path):
    steps = STEP.findall((ROOT / "docs" / "tour.md").read_text())
    assert len(steps) >= 6
    for commands, shown in steps:
        said = typed(commands, tmp_path)
        exact = commands.startswith("zerofit plan")
        printed = iter(lines_of(said, exact))
        missing = [line for line in lines_of(shown, exact) if line != "..." and line not in printed]
        assert not missing, f"{commands}\n{said}"


@pytest.mark.long
def test_the_guides_commands_run_one_after_the_other(llama, material, tmp_path):
    """From instructions (docs/fine-tune.md) to preferences (docs/preferences.md), as printed but for the base model,
    the number of processes and the length of the runs."""
    guides = ("fine-tune.md", "## Instructions and chats"), ("preferences.md", "# Train on preferences")
    pages = [(ROOT / "docs" / page).read_text().split(heading)[1] for page, heading in guides]
    instructions, preferences = (re.search(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1] for page in pages)
    assert "--model_name_or_path outputs/assistant/model" in preferences, "what the first one has made"
    train, _, chat = instructions.rpartition("zerofit generate")
    short = " --max_train_steps 2 --per_device_train_batch_size 2 --block_size 160"
    train = f"{train.replace('elyza/ELYZA-japanese-Llama-2-7b', str(llama)).rstrip()}{short}\n"
    preferences = f"{preferences.replace('--num_processes 8', '--num_processes 2').rstrip()}{short}\n"
    for name in ("train", "accelerate_configs", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    records = json.loads((material / "instruct" / "english.json").read_text())[:40]
    (tmp_path / "my_data").mkdir()
    write_records(tmp_path / "my_data" / "a.jsonl", records)
    others = [*records[1:], records[0]]
    pairs = [
        {"prompt": record["instruction"], "chosen": record["output"], "rejected": other["output"]}
        for record, other in zip(records, others)
        if record["output"] != other["output"]
    ]
    write_records(tmp_path / "pairs.jsonl", pairs)
    typed(train, tmp_path)
    typed(f"echo 'What is a list?' | zerofit generate{chat}", tmp_path)
    assert "outputs/assistant/model, trained on" in typed(preferences, tmp_path)
    first = updates(metrics(tmp_path / "outputs" / "preferred"))[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3), "the reference is base and adapter"
    settings = json.loads((tmp_path / "outputs" / "preferred" / "model" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == f"./{llama.name}"
