"""Runs in float8, whose products are emulated on the CPU: as in bf16 to 1 %, under each strategy that has it."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, completed, launched, metrics, updates
from safetensors.torch import load_file

OPTIONAL = Path(sys.prefix, "optional")  # scripts/setup.sh: what only tests load
RUN = ["--model_type", "llama", "--config_overrides",
       "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=160,"
       "max_position_embeddings=64", "--train_file", ROOT / "docs" / "fine-tune.md", "--document_separator", "line",
       "--train_tokenizer_vocab_size", "301", "--block_size", "64", "--max_eval_samples", "8", "--learning_rate",
       "3e-3", "--per_device_train_batch_size", "4", "--global_batch_size", "8", "--max_train_steps", "20",
       "--save_steps", "10", "--precision", "bf16", "--torch_compile", "false", "--sample_tokens", "0"]  # fmt: skip

if not OPTIONAL.is_dir():
    pytest.skip("torchao is not there: make setup", allow_module_level=True)


@pytest.fixture(scope="module")
def run(cache, launched_once):
    """run(strategy, further flags): the output folder of 20 updates."""

    def train(strategy: str, *flags: str) -> Path:
        return launched_once("-".join((strategy, *flags)), *RUN, *flags, "--cache_dir", cache, **how(strategy))

    return train


def how(strategy: str) -> dict[str, object]:
    processes = 1 if strategy == "single" else 2
    return {"strategy": strategy, "processes": processes, "ZEROFIT_EMULATES_FLOAT8": "1", "PYTHONPATH": str(OPTIONAL)}


def held_out(output: Path) -> float:
    return [line["eval_loss"] for line in metrics(output) if "eval_loss" in line][-1]


@pytest.mark.parametrize(
    "strategy",
    ["single", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "fsdp2", "zero1", "zero2"))],
)
def test_it_ends_where_bf16_does(run, strategy):
    half, float8 = run(strategy), run(strategy, "--float8")
    first, last = (updates(metrics(float8))[at]["loss"] for at in (0, -1))
    assert len(updates(metrics(float8))) == 20
    assert last < 0.8 * first
    assert held_out(float8) == pytest.approx(held_out(half), rel=0.01)
    assert held_out(float8) != held_out(half)
    stored = (load_file(output / "model" / "model.safetensors") for output in (float8, half))
    ours, theirs = ({name: (each.shape, each.dtype) for name, each in weights.items()} for weights in stored)
    assert ours == theirs


def test_a_run_resumes_in_float8_and_in_nothing_else(run, cache, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(run("single", "--float8"), output)
    whole = updates(metrics(output))
    for part in ("checkpoints/update_00000020", "model"):
        shutil.rmtree(output / part)
    other = launched(output, *RUN, "--cache_dir", cache, **how("single"))
    assert other.returncode
    assert "float8 was True, now False" in other.stderr
    completed(output, *RUN, "--float8", "--cache_dir", cache, **how("single"))
    assert [line["loss"] for line in updates(metrics(output))] == [line["loss"] for line in whole]


@pytest.mark.long
def test_a_yaml_of_accelerate_with_fp8_trains_the_same(run, cache, tmp_path):
    """accelerate hands its backend down as a variable, by which it would convert layers itself."""
    pair = tmp_path / "fp8.yaml"
    content = yaml.safe_load((ROOT / "accelerate_configs" / "single.yaml").read_text())
    pair.write_text(yaml.safe_dump({**content, "mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}))
    completed(tmp_path / "run", *RUN, "--cache_dir", cache, **{**how("single"), "strategy": str(pair)})
    expected = updates(metrics(run("single", "--float8")))
    assert [line["loss"] for line in updates(metrics(tmp_path / "run"))] == [line["loss"] for line in expected]
