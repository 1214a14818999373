"""What needs a real CUDA device. Skipped without one; run with `make test-gpu`."""

import pytest
import torch
from folders import save_writer, small_tokenizer
from helpers import ROOT, launch, updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("option", ["--load_in_4bit", "--load_in_8bit"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2"])
def test_an_adapter_trains_on_a_quantised_model(tmp_path, cache, strategy, option):
    pytest.importorskip("bitsandbytes")
    save_writer(tmp_path / "llama", small_tokenizer(tmp_path))
    lines = launch(
        tmp_path / "run", "--model_name_or_path", tmp_path / "llama", "--lora", "--train_file", ROOT / "docs" / "*.md",
        "--block_size", "64", "--learning_rate", "1e-2", "--per_device_train_batch_size", "8", "--max_train_steps",
        "30", option, "--precision", "bf16", "--cache_dir", cache, strategy=strategy, processes=1,
    )  # fmt: skip
    assert updates(lines)[-1]["loss"] < updates(lines)[0]["loss"] - 0.5
