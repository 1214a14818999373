"""Every launcher starts a script alike: python, torchrun, accelerate launch, zerofit launch and deepspeed.

A launch is compared with the same recipe in one process.
"""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers import BIN, ROOT, check_alike, environment, metrics

STORED = ROOT / "tests" / "material" / "checkpoints" / "1-0.1.0"  # tiny random models, and a text
OPTIONS = ("--model_name_or_path", f"{STORED}/gpt2-single/checkpoints/update_00000003/model", "--block_size", "24",
         "--train_file", f"{STORED}/text.txt", "--max_eval_samples", "3",
         "--max_train_steps", "2", "--global_batch_size", "4", "--per_device_train_batch_size", "2",
         "--learning_rate", "1e-3", "--save_strategy", "no", "--precision", "fp32")  # fmt: skip
# {launcher: the exit code of a refused option; torchrun and accelerate launch have 1 for each code of a script}
LAUNCHERS = {"python": 2, "torchrun": 1, "accelerate": 1, "zerofit": 2, "deepspeed": 2}
TABLE = [(launcher, strategy) for launcher in LAUNCHERS
         for strategy in (("single",) if launcher == "python" else ("ddp", "zero2"))]  # fmt: skip


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def command(launcher: str, strategy: str) -> list[str]:
    """What is typed before the options of a script."""
    program, named = str(ROOT / "train" / "clm.py"), ["--strategy", strategy]
    return {
        "python": [BIN / "python", program],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc_per_node", "2", program, *named],
        "accelerate": [BIN / "accelerate", "launch", "--config_file", f"accelerate_configs/{strategy}.yaml",
                       "--main_process_port", "0", program],
        "zerofit": [BIN / "zerofit", "launch", "--num_processes", "2", *named, program],
        "deepspeed": [BIN / "deepspeed", "--num_gpus", "2", "--master_port", free_port(), program, *named],
    }[launcher]  # fmt: skip


def typed(output: Path, launcher: str, strategy: str, *options: str) -> subprocess.CompletedProcess:
    words = [*command(launcher, strategy), "--output_dir", output, *options]
    variables = environment(DS_ACCELERATOR="cpu", PATH=f"{BIN}:{os.environ['PATH']}")
    return subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, timeout=300, env=variables)


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "strategy"), TABLE)
def test_every_launcher_starts_a_script_alike(launcher, strategy, cache, launched_once, tmp_path):
    options = (*OPTIONS, "--cache_dir", cache)
    done = typed(tmp_path / "run", launcher, strategy, *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    reference = launched_once("alone", *options, strategy="single", processes=1)
    check_alike(metrics(tmp_path / "run"), metrics(reference))
    recipe, expected = (yaml.safe_load((run / "recipe.yaml").read_text()) for run in (tmp_path / "run", reference))
    same = recipe.keys() - {"strategy", "output_dir"}
    assert len(same) > 50
    assert {name: recipe[name] for name in same} == {name: expected[name] for name in same}
    strategies = yaml.safe_load((tmp_path / "run" / "strategy.yaml").read_text())
    assert (strategies["name"], strategies["num_processes"]) == (strategy, 1 if launcher == "python" else 2)


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=() if name in ("deepspeed", "zerofit") else pytest.mark.long) for name in LAUNCHERS],
)
def test_an_option_is_refused_alike(launcher, tmp_path):
    """Nothing is imported for it. The record has the code 2 also where the launcher ends with another."""
    output = tmp_path / "refused"
    output.mkdir()
    done = typed(output, launcher, "single" if launcher == "python" else "ddp", *OPTIONS, "--learning_rat", "1")
    assert "--learning_rat is not an option" in done.stderr + done.stdout
    assert done.returncode == LAUNCHERS[launcher]
    assert json.loads((output / "environment.json").read_text())["exit_code"] == 2
