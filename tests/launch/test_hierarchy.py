"""ZeRO++'s hierarchical partitions: weights are gathered within a machine. Here a machine is two processes."""

import shutil

import pytest
import yaml
from helpers import ROOT, launch, metrics, updates

TEXT = ROOT / "docs" / "lora.md"
RUN = ["--model_type", "llama", "--config_overrides",
       "hidden_size=128,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,intermediate_size=320",
       "--train_file", TEXT, "--document_separator", "line", "--train_tokenizer_vocab_size", "301",
       "--block_size", "64", "--per_device_train_batch_size", "1", "--global_batch_size", "8",
       "--max_train_steps", "6", "--save_steps", "3", "--learning_rate", "1e-3", "--precision", "fp32",
       "--sample_tokens", "0"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(cache, tmp_path_factory):
    """{strategy: output folder}."""
    folder = tmp_path_factory.mktemp("hierarchy")
    launch(folder / "single", *RUN, "--cache_dir", cache, strategy="single")
    launch(folder / "zero3_hpz", *RUN, "--cache_dir", cache, strategy="zero3_hpz", processes=4, machines=2)
    return {name: folder / name for name in ("single", "zero3_hpz")}


def check_alike(ours, theirs) -> None:
    assert len(updates(ours)) == len(updates(theirs)) == 6
    for line, other in zip(ours, theirs, strict=True):
        for name in {"loss", "grad_norm", "learning_rate", "eval_loss"} & other.keys():
            assert line[name] == pytest.approx(other[name], rel=1e-5, abs=1e-15), (name, line["update"])


def test_it_trains_as_one_process_does(runs):
    effective = yaml.safe_load((runs["zero3_hpz"] / "strategy.yaml").read_text())
    assert effective["num_machines"] == 2
    assert effective["deepspeed"]["zero_optimization"]["zero_hpz_partition_size"] == 2
    check_alike(metrics(runs["zero3_hpz"]), metrics(runs["single"]))


def test_it_goes_on_with_the_weights_of_the_checkpoint(runs, cache, tmp_path):
    """The copies within a machine are of the weights that were there before it was read."""
    output = tmp_path / "run"
    shutil.copytree(runs["zero3_hpz"], output, symlinks=True)
    shutil.rmtree(output / "checkpoints" / "update_00000006")
    shutil.rmtree(output / "model")  # as if it had been killed before
    again = launch(output, *RUN, "--cache_dir", cache, strategy="zero3_hpz", processes=4, machines=2)
    check_alike(again, metrics(runs["single"]))
