"""The optimizer's state on a disk: updates as under zero3, checkpoints that go to other strategies and come back."""

import ctypes.util
import json
import shutil
from pathlib import Path

import pytest
from helpers import ROOT, check_alike, cut_after, launch, pair_with, updates

RUN = ["--config_name", "gpt2", "--config_overrides", "n_layer=4,n_head=4,n_embd=192,n_positions=64,resid_pdrop=0,"
       "embd_pdrop=0,attn_pdrop=0", "--train_file", ROOT / "docs" / "measurements" / "plan.md",
       "--document_separator", "line",
       "--train_tokenizer_vocab_size", "400", "--block_size", "64", "--per_device_train_batch_size", "2",
       "--gradient_accumulation_steps", "2", "--max_train_steps", "6", "--save_steps", "3", "--learning_rate", "1e-4",
       "--precision", "fp32", "--sample_tokens", "0"]  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(
    ctypes.util.find_library("aio") is None or not Path("/usr/include/libaio.h").is_file(),
    reason="DeepSpeed compiles async_io against libaio's headers",
)
def test_updates_and_checkpoints_are_those_of_zero3(cache, tmp_path):
    run = [*RUN, "--cache_dir", cache]
    config = json.loads((ROOT / "ds_configs" / "zero3_offload_nvme.json").read_text())
    config["zero_optimization"]["sub_group_size"] = 300_000  # so small that each process has several
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "disk")
    on_disk = pair_with(tmp_path, "zero3_offload_nvme", config)
    expected = launch(tmp_path / "zero3", *run, strategy="zero3")
    assert len(updates(expected)) == 6

    def check(output: Path, strategy: str) -> None:
        check_alike(launch(output, *run, strategy=strategy, processes=2), expected)

    check(tmp_path / "disk_run", on_disk)
    left = list((tmp_path / "disk").iterdir())
    assert not left, "nothing stays on the disk"
    for first, then in (("zero3", on_disk), ("disk_run", on_disk), ("disk_run", "ddp")):
        resumed = tmp_path / f"{first}_{Path(then).stem}"
        shutil.copytree(tmp_path / first, resumed, symlinks=True)
        cut_after(resumed, 3)
        check(resumed, then)
