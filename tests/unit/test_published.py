"""Configuration files as two articles print them, through accelerate's own reading of them: docs/articles.md.

Those of the post "Accelerate Large Model Training using DeepSpeed" (S. Mangrulkar and S. Gugger, 2022), and the JSON
of an article on fine-tuning Japanese models with LoRA.
"""

import json

import pytest
import torch
from helpers import ROOT, launcher_variables, recipe_of, refusal

from zerofit.recipe import ClmRecipe
from zerofit.strategy import launch as launch_module
from zerofit.strategy.read import read_strategy
from zerofit.strategy.strategy import Strategy

PRINTED = ROOT / "tests" / "published"
PAIRS = {  # YAML: the JSON that it names
    "zero2_plugin.yaml": None,
    "zero2.yaml": "zero2_config_accelerate.json",
    "zero3_offload.yaml": "zero3_offload_config_accelerate.json",
}
STAGES = {"zero2_plugin.yaml": 2, "zero2.yaml": 2, "zero3_offload.yaml": 3}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """read(YAML, recipe, of=JSON) -> the strategy, as `accelerate launch --config_file YAML` makes it. Nothing is
    changed in the files but the folder of the JSON, and where asked for the precision: `said` in the YAML, and "auto"
    in the JSON."""

    def read(name: str, recipe: ClmRecipe, of: str | None = None, said: str | None = None) -> Strategy:
        of = of or PAIRS[name]
        text = (PRINTED / name).read_text().replace(f"/path/to/{PAIRS[name]}", str(tmp_path / str(of)))
        if of:
            printed = (PRINTED / of).read_text()
            for enabled in ('"true"', "true") if said else ():
                printed = printed.replace(f'"enabled": {enabled}', '"enabled": "auto"')
            (tmp_path / of).write_text(printed)
        (tmp_path / name).write_text(text.replace("mixed_precision: fp16", f"mixed_precision: '{said or 'fp16'}'"))
        of_rank = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for variable, value in {**launcher_variables(tmp_path / name), **of_rank}.items():
            monkeypatch.setenv(variable, value)
        command = ["accelerate", "launch", "--config_file", str(tmp_path / name)]
        monkeypatch.setattr(launch_module, "find_launcher", lambda: launch_module.Launcher(command, 0.0, False))
        return read_strategy(recipe)

    return read


def parsed(strategy: Strategy):
    """The configuration as DeepSpeed has it, which believes in one process here."""
    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads(json.dumps(strategy.deepspeed))
    size = config["train_batch_size"] // 2
    return DeepSpeedConfig({**config, "train_batch_size": size})


@pytest.mark.parametrize("name", PAIRS)
def test_as_printed_a_gpu_is_needed_and_every_place_that_says_so_is_named(read, name, monkeypatch):
    options = recipe_of(per_device_train_batch_size=16, learning_rate=5e-4)
    strategy = read(name, options)
    assert (strategy.precision, strategy.launch.world_size) == ("fp16", 2)
    assert strategy.deepspeed["fp16"]["enabled"] is True
    assert strategy.deepspeed["bf16"]["enabled"] is False
    assert strategy.deepspeed["zero_optimization"]["stage"] == STAGES[name]
    assert strategy.deepspeed["train_batch_size"] == 32
    assert parsed(strategy).float16_config.enabled

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    said = refusal(strategy.check_precision)
    for place in filter(None, (name, PAIRS[name])):
        assert place in said
    assert "needs a GPU" in said
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    strategy.check_precision()


def test_the_zero2_pair(read):
    """fp16.enabled is "true", a string; the schedule is all "auto" with the command's warm-up of 100, and without."""
    options = recipe_of(learning_rate=1e-6, weight_decay=0.0, num_warmup_steps=100)
    strategy = read("zero2.yaml", options)
    assert [note for note in strategy.notes if 'fp16.enabled = "true" is a string, read as true' in note]
    zero = strategy.deepspeed["zero_optimization"]
    assert zero["allgather_bucket_size"] == zero["reduce_bucket_size"] == 200_000_000
    optimizer = strategy.deepspeed["optimizer"]["params"]
    assert (optimizer["lr"], optimizer["weight_decay"], optimizer["torch_adam"]) == (1e-6, 0.0, True)
    assert (options.lr_scheduler_type, options.num_warmup_steps) == ("linear", 100)
    assert "scheduler" not in strategy.deepspeed


def test_the_json_of_the_lora_article(read):
    """It leaves precision, batches and optimizer to the program, so the recipe has them."""
    strategy = read("zero2.yaml", recipe_of(per_device_train_batch_size=1), of="lora.json", said="bf16")
    zero = parsed(strategy).zero_config
    assert (zero.stage, zero.overlap_comm, zero.offload_optimizer.pin_memory) == (3, True, True)
    assert strategy.offloads_optimizer
    assert strategy.shards_parameters
    assert strategy.deepspeed["train_batch_size"] == 2
    strategy.check_precision()
