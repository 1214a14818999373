"""Runs in one process, one after the other: each has the figures that it has in a process of its own."""

import json
from pathlib import Path

import pytest
from helpers import forked, metrics

SECONDS = ("seconds", "per_s", "mfu", "tflops", "memory")  # parts of the names of what no two runs have alike
# In this order: what a run leaves behind would change one after it. {name: (task, flags, exit code)}
RUNS = {
    "zero3": ("clm", "--packing none --max_train_samples 60 --strategy zero3 --precision bf16", 0),
    "packed": ("clm", "--packing documents", 0),
    "wrong": ("clm", "--packing documents --attn_implementation nonsense", 2),
    "adapter": ("clm", "--lora --precision bf16 --gradient_checkpointing selective", 0),
    "packed again": ("clm", "--packing documents", 0),
}


def figures(folder: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if not any(part in name for part in SECONDS)}
        for line in metrics(folder)
    ]


@pytest.fixture(scope="module")
def folders(llama, material, cache, tmp_path_factory) -> tuple[Path, Path]:
    """(of the runs in one process, of the runs in a process each)."""
    folder = tmp_path_factory.mktemp("runs")
    # fmt: off
    common = ["--model_name_or_path", str(llama), "--train_file", str(material / "text" / "train.txt"), "--block_size",
              "64", "--max_train_steps", "4", "--per_device_train_batch_size", "2", "--max_eval_samples", "8",
              "--eval_steps", "2", "--learning_rate", "1e-3", "--cache_dir", cache, "--save_strategy", "no"]
    # fmt: on
    for kind, names in (("together", RUNS), ("alone", ["packed"]), ("alone", ["adapter"])):
        output, file = folder / kind, folder / "runs.json"
        runs = [
            {"task": task, "words": [*common, *flags.split(), "--output_dir", str(output / name)], "code": code}
            for name, (task, flags, code) in RUNS.items()
            if name in names
        ]
        file.write_text(json.dumps(runs))
        forked(Path(__file__).with_name("several_runs.py"), file, processes=1)
    return folder / "together", folder / "alone"


@pytest.mark.parametrize("name", ["packed", "adapter", "packed again"])
def test_a_run_has_the_same_figures_after_others(folders, name):
    together, alone = figures(folders[0] / name), figures(folders[1] / name.removesuffix(" again"))
    assert len(alone) == 5
    assert together == alone
