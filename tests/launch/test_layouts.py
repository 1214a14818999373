"""Layouts that have no row in the core of test_agreement.py, each in a short run against one process.

Under sp two ranks split rows. ZeRO++'s hierarchical partitions gather weights within a machine, here of two processes.
FSDP2 is torch's own sharding.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ROOT, check_alike, check_same_weights, completed, cut_after, launch, metrics, updates
from safetensors.torch import load_file

TEXT = ROOT / "docs" / "fine-tune.md"
RUN = ["--model_type", "llama", "--config_overrides",
       "hidden_size=128,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,intermediate_size=320",
       "--train_file", TEXT, "--document_separator", "line", "--train_tokenizer_vocab_size", "301",
       "--block_size", "64", "--packing", "documents", "--global_batch_size", "8", "--max_train_steps", "4",
       "--save_steps", "2", "--learning_rate", "1e-3", "--precision", "fp32", "--sample_tokens", "0"]  # fmt: skip
LAYOUTS = {  # micro-batch, processes, machines; two micro-batches an update
    "single": (4, 1, 1),
    "sp": (4, 2, 1),
    "zero3_hpz": (1, 4, 2),
    "fsdp2": (2, 2, 1),
    "hsdp": (1, 4, 2),
}
HSDP = pytest.param("hsdp", marks=pytest.mark.long)
GROUPS = {"sp": 2, "zero3_hpz": 2, "fsdp2": 1, "hsdp": 3}  # that a rank makes at least


@pytest.fixture(scope="module")
def start(cache):
    """start(strategy, output folder, more options)."""

    def started(strategy, output, *more) -> None:
        micro_batch, processes, machines = LAYOUTS[strategy]
        done = completed(output, *RUN, *more, "--per_device_train_batch_size", micro_batch, "--cache_dir", cache,
                        strategy=strategy, processes=processes, machines=machines)  # fmt: skip
        if strategy in GROUPS and not torch.accelerator.is_available():
            assert len(done.group_timeouts) >= GROUPS[strategy] * processes  # `launched` looks at each

    return started


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    """run(strategy) -> output folder; each is launched once."""
    folder = tmp_path_factory.mktemp("layouts")

    def once(strategy: str) -> Path:
        if not (folder / strategy).exists():
            start(strategy, folder / strategy)
        return folder / strategy

    return once


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("sp", marks=pytest.mark.long), pytest.param("zero3_hpz", marks=pytest.mark.long), "fsdp2", HSDP],
)
def test_it_trains_as_one_process_does(run, strategy):
    check_alike(metrics(run(strategy)), metrics(run("single")))


def test_ddp_that_looks_for_unused_parameters_trains_as_one_process_does(run, cache, tmp_path):
    through = (ROOT / "tests" / "launch" / "disturbed.py", "0,1", "unused")
    completed(tmp_path / "run", *RUN, "--per_device_train_batch_size", "2", "--cache_dir", cache, strategy="ddp",
              processes=2, through=through)  # fmt: skip
    check_alike(metrics(tmp_path / "run"), metrics(run("single")))


@pytest.fixture
def go_on(run, start, tmp_path):
    """go_on(origin, strategy, more options) -> the folder of a run that was killed after update 2, and goes on."""

    def gone_on(origin, strategy, *more):
        output = tmp_path / "run"
        shutil.copytree(run(origin), output, symlinks=True)
        cut_after(output, 2)
        start(strategy, output, *more)
        check_alike(metrics(output), metrics(run("single")))
        return output

    return gone_on


@pytest.mark.long
@pytest.mark.parametrize(
    ("origin", "strategy", "which"),
    [("single", "fsdp2", "selective"), ("single", "sp", "selective"), ("zero3_hpz", "zero3_hpz", "full")],
)
def test_a_run_goes_on_in_another_layout_with_recomputed_activations(go_on, origin, strategy, which):
    go_on(origin, strategy, "--gradient_checkpointing", which)


@pytest.mark.parametrize(
    ("settings", "processes", "name", "value"),
    [
        ({"fsdp_sync_each_batch": False}, 2, "sync_each_batch", False),
        pytest.param({"fsdp_reshard_after_forward": 2}, 4, "reshard_after_forward", 2, marks=pytest.mark.long),
        pytest.param({"fsdp_reduce_dtype": "bf16"}, 2, "reduced_in", "bf16", marks=pytest.mark.long),
    ],
)
def test_settings_of_fsdp2_in_a_yaml(run, cache, tmp_path, settings, processes, name, value):
    pair = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())
    pair["fsdp_config"] |= settings
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(pair))
    flags = ["--per_device_train_batch_size", 4 // processes, "--cache_dir", cache]
    lines = launch(tmp_path / "run", *RUN, *flags, strategy=str(tmp_path / "own.yaml"), processes=processes)
    if value == "bf16":
        ours, theirs = ([line["loss"] for line in updates(each)] for each in (lines, metrics(run("single"))))
        assert ours != theirs
        assert ours == pytest.approx(theirs, rel=1e-2)
    else:
        check_alike(lines, metrics(run("single")))
    made = yaml.safe_load((tmp_path / "run" / "strategy.yaml").read_text())
    assert made["fsdp"][name] == value


@pytest.mark.parametrize("strategy", ["fsdp2", HSDP])
def test_a_rank_holds_half_of_the_rows_and_goes_on_where_one_process_has_left(run, go_on, strategy):
    ours, theirs = (
        json.loads((run(each) / "environment.json").read_text())["bytes_held_by_rank_0"]
        for each in (strategy, "single")
    )
    assert ours == pytest.approx({name: size / 2 for name, size in theirs.items()}, rel=0.01)
    output = go_on("single", strategy)
    check_same_weights(output / "model", run("single") / "model")


@pytest.mark.long
def test_a_refused_update_moves_no_rows(cache, tmp_path):
    """A step so long that the next loss is not a number."""
    flags = ["--per_device_train_batch_size", "2", "--cache_dir", cache, "--learning_rate", "1e12",
             "--lr_scheduler_type", "constant", "--on_anomaly", "skip"]  # fmt: skip
    kept = [word for word in RUN if word not in ("--learning_rate", "1e-3")]
    lines = launch(tmp_path / "run", *kept, *flags, strategy="fsdp2", processes=2)
    assert [line.get("anomaly") for line in updates(lines)] == [None, *3 * ["loss is nan"]]
    weights = load_file(tmp_path / "run" / "checkpoints" / "update_00000002" / "model" / "model.safetensors")
    assert len(weights) > 20
    assert all(weight.isfinite().all() for weight in weights.values())
