"""`zerofit plan --write`: what is written is what a launch would read, and says what was predicted."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from helpers import ROOT
from test_plan import RECIPE

from zerofit.cli import main
from zerofit.recipe import parse_recipe
from zerofit.recipe.tasks import TASKS

DATA = ["--train_tokenizer_vocab_size", "512", "--dataset_name", "stdlib-docstrings", "--loss", "full"]


def written(tmp_path: Path, *flags: str) -> dict[str, Path]:
    """{name: script} of what a plan writes."""
    folder = tmp_path / "pairs"
    assert main(["plan", *RECIPE, *DATA, "--gpu", "a100-40gb", "--write", str(folder), *flags]) == 0
    return {script.stem: script for script in sorted(folder.glob("*.sh"))}


def command_of(script: Path) -> list[str]:
    """The last line, as the words that accelerate gets."""
    words = shlex.split(script.read_text().splitlines()[-1])
    assert words[:2] == ["accelerate", "launch"]
    return words[2:]


@pytest.mark.parametrize("file", ["strategy.yaml", "metrics.jsonl"])
def test_the_folder_of_a_run_is_not_written_to(tmp_path, capsys, in_root, file):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / file).write_text("")
    (folder / "recipe.yaml").write_text("seed: 3\n")
    assert main(["plan", *RECIPE, "--gpu", "a100-40gb", "--strategies", "ddp", "--write", str(folder)]) == 2
    assert "is the folder of a run" in capsys.readouterr().err
    assert (folder / "recipe.yaml").read_text() == "seed: 3\n"
    assert len(list(folder.iterdir())) == 2


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_written_command_is_one_that_accelerate_and_the_task_take(tmp_path, in_root):
    scripts = written(tmp_path, "--num_gpus", "2", "--strategies", "ddp,zero2,zero3_offload", "--batch_sizes", "4",
                      "--global_batch_size", "16", "--json", str(tmp_path / "plan.json"))  # fmt: skip
    assert set(scripts) == {"ddp", "zero2", "zero3_offload"}
    for name, script in scripts.items():
        arguments = launch_command_parser().parse_args(command_of(script))
        assert Path(arguments.training_script) == Path("train/clm.py")
        recipe = parse_recipe(TASKS["clm"], arguments.training_script_args)
        assert (recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps) == (4, 2)
        assert (recipe.global_batch_size, recipe.loss, recipe.precision) == (16, "full", "bf16")
        content = yaml.safe_load(Path(arguments.config_file).read_text())
        assert (content["num_processes"], content["num_machines"]) == (2, 1)
        original = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
        assert content["distributed_type"] == original["distributed_type"]
        if name != "ddp":
            file = Path(content["deepspeed_config"]["deepspeed_config_file"])
            assert file == script.with_suffix(".json")
            pair = original["deepspeed_config"]["deepspeed_config_file"]
            assert json.loads(file.read_text()) == json.loads((ROOT / pair).read_text())
        assert "micro-batch 4, accumulation 2" in script.read_text()


def test_of_several_machines_each_says_which_it_is(tmp_path, in_root):
    (script,) = written(tmp_path, "--num_gpus", "16", "--strategies", "zero3", "--batch_sizes", "1").values()
    assert '--machine_rank "$MACHINE_RANK"' in script.read_text()
    values = {"$MACHINE_RANK": "1", "$MAIN_PROCESS_IP": "10.0.0.1", "${MAIN_PROCESS_PORT:-29500}": "29500"}
    words = [values.get(word, word) for word in command_of(script)]
    arguments = launch_command_parser().parse_args(words)
    assert (arguments.machine_rank, arguments.main_process_ip) == (1, "10.0.0.1")
    content = yaml.safe_load(Path(arguments.config_file).read_text())
    assert (content["num_processes"], content["num_machines"]) == (16, 2)


@pytest.mark.parametrize(("model", "gpu", "flags", "reshards"), [
    ("gpt2", "a100-80gb", ("--train_tokenizer_vocab_size", "300", "--block_size", "64"), False),
    ("llama-2-13b", "a10-24gb", ("--gradient_checkpointing", "true"), True),
])  # fmt: skip
def test_what_is_written_keeps_blocks_gathered_where_they_fit(tmp_path, in_root, model, gpu, flags, reshards):
    folder = tmp_path / "pairs"
    words = ["--task", "clm", "--config_name", model, "--precision", "bf16", "--gpu", gpu, "--num_gpus", "32", *flags]
    assert main(["plan", *words, "--batch_sizes", "1", "--strategies", "fsdp2", "--write", str(folder)]) == 0
    settings = yaml.safe_load((folder / "fsdp2.yaml").read_text())["fsdp_config"]
    assert settings["fsdp_reshard_after_forward"] is reshards
    assert settings["fsdp_sync_each_batch"] is True  # the rest is the strategy's
