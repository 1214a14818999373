"""What no CPU can show, on any accelerator: run with `make test-gpu`; also on the simulated device (tests/device)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import colours, save_writer, small_tokenizer
from helpers import ROOT, check_offloaded_inputs, cut_after, launch, tiny_model, updates, write_records
from safetensors.torch import load_file

from zerofit.data.collate import CausalCollator
from zerofit.model.loss import install_loss
from zerofit.model.preflight import documents_leak

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]

SCRATCH = ["--config_name", "gpt2", "--train_tokenizer_vocab_size", "400", "--block_size", "64",
           "--config_overrides", "n_layer=2,n_head=2,n_embd=64,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
           "--train_file", str(ROOT / "zerofit" / "**" / "*.py"), "--per_device_train_batch_size", "8",
           "--max_train_steps", "20", "--learning_rate", "1e-3"]  # fmt: skip
ADAPTER = ["--lora", "--train_file", str(ROOT / "docs" / "*.md"), "--block_size", "64", "--learning_rate", "1e-2",
           "--per_device_train_batch_size", "8", "--max_train_steps", "30"]  # fmt: skip


def device() -> torch.device:
    return torch.accelerator.current_accelerator()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A random Llama whose loss is far above what an adapter can bring it down to."""
    folder = tmp_path_factory.mktemp("base")
    save_writer(folder / "llama", small_tokenizer(folder))
    return folder / "llama"


def test_inputs_of_recomputed_layers_wait_on_the_host():
    check_offloaded_inputs(device())


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_the_memory_saving_loss_agrees_with_the_plain_one(family):
    ids = torch.randint(0, 97, (4, 64), device=device())
    gradients = {}
    for kind in ("full", "chunked"):
        model = tiny_model(family).to(device())
        install_loss(model, kind)
        model(input_ids=ids, labels=ids).backward()
        gradients[kind] = model.get_output_embeddings().weight.grad
    torch.testing.assert_close(gradients["chunked"], gradients["full"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_stay_apart(attention, dtype):
    for family in ("gpt2", "gpt_neox", "llama"):
        model = tiny_model(family, attention).to(device()).to(dtype)
        assert not documents_leak(model, CausalCollator(0), 97, device())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero2_plain", "fsdp2"]
)
def test_every_pair_trains_in_every_precision(tmp_path, cache, strategy, precision):
    if (strategy, precision) == ("fsdp2", "fp16"):
        pytest.skip("fsdp2 refuses fp16: a unit test")
    lines = launch(
        tmp_path / "run", *SCRATCH, "--precision", precision, "--cache_dir", cache, strategy=strategy, processes=1
    )
    losses = [line["loss"] for line in updates(lines)]
    assert losses[-1] < losses[0] - 0.3
    assert all(line["peak_memory_bytes"] > 0 for line in updates(lines))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "zero3_offload"])
@pytest.mark.parametrize("task", ["cls", "seq2seq"])
def test_classification_and_dialogue_train_too(tmp_path, cache, task, strategy, precision):
    rows = write_records(tmp_path / "rows.jsonl", colours())
    sizes = {
        "cls": ["--model_type", "bert", "--config_overrides",
                "num_hidden_layers=2,hidden_size=64,num_attention_heads=2,intermediate_size=128"],
        "seq2seq": ["--config_name", "blenderbot-400M-distill", "--config_overrides",
                    "d_model=64,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,"
                    "encoder_ffn_dim=128,decoder_ffn_dim=128", "--val_max_target_length", "4"],
    }  # fmt: skip
    lines = launch(
        tmp_path / "run", *sizes[task], "--train_tokenizer_vocab_size", "270", "--train_file", rows,
        "--per_device_train_batch_size", "16", "--max_train_steps", "120", "--learning_rate", "2e-3",
        "--precision", precision, "--cache_dir", cache, strategy=strategy, processes=1, task=task,
    )  # fmt: skip
    assert updates(lines)[-1]["loss"] < 0.6 * updates(lines)[0]["loss"]
    assert ("eval_accuracy" if task == "cls" else "eval_bleu") in lines[-1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "zero3_offload", "zero3_offload_optimizer"])
def test_an_adapter_trains_on_a_frozen_model(tmp_path, cache, base, strategy, precision):
    lines = launch(
        tmp_path / "run", "--model_name_or_path", base, *ADAPTER, "--precision", precision, "--cache_dir", cache,
        strategy=strategy, processes=1,
    )  # fmt: skip
    assert updates(lines)[-1]["loss"] < updates(lines)[0]["loss"] - 0.5
    held = json.loads((tmp_path / "run" / "environment.json").read_text())["bytes_held_by_rank_0"]
    trained = sum(
        tensor.numel() for tensor in load_file(tmp_path / "run" / "model" / "adapter_model.safetensors").values()
    )
    assert held["optimizer"] < 12 * trained * 1.1  # moments and fp32 copies of the adapter alone


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2", "zero3", "zero3_offload"])
def test_a_run_goes_on_with_its_loss_scale(tmp_path, cache, strategy, precision):
    """From the checkpoint after update 10 on, the losses are those of the run that was not interrupted."""
    output = tmp_path / "run"
    run = [*SCRATCH, "--cache_dir", cache, "--precision", precision, "--save_steps", "10"]
    whole = updates(launch(output, *run, strategy=strategy, processes=1))
    cut_after(output, 10)
    again = updates(launch(output, *run, strategy=strategy, processes=1))
    assert [line["update"] for line in again] == list(range(1, 21))
    for before, after in zip(whole, again):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-3)


def test_ranks_that_share_a_device_are_compared_each_within_its_cap(tmp_path, cache):
    """Two ranks on whatever devices there are, 1 GiB each: a batch that does not fit ends as out of device memory, and
    what fits has stayed within the cap."""
    recipe = tmp_path / "clm" / "recipe.yaml"
    recipe.parent.mkdir()
    recipe.write_text((ROOT / "recipes" / "clm" / "compare-small.yaml").read_text() + f"cache_dir: {cache}\n")
    output = tmp_path / "comparison"
    command = [sys.executable, "-m", "zerofit.cli", "compare", "--config", recipe, "--strategies",
               "ddp,zero2,zero3,zero3_offload", "--memory_limit", "1GiB", "--granularity", "32", "--steps", "2",
               "--output", output]  # fmt: skip
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    trials = [json.loads(line) for line in (output / "journal.jsonl").read_text().splitlines()]
    trials = [line for line in trials if line["kind"] == "size"]
    fits = [line for line in trials if line["outcome"] == "fits"]
    assert fits
    assert all(rank["reserved"] <= 2**30 for line in fits for rank in line["ranks"])
    assert all(line["where"] == "device" for line in trials if line["outcome"] != "fits")
