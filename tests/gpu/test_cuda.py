"""What needs a real CUDA device. Skipped without one; run with `make test-gpu`."""

import numpy as np
import pytest
import torch
from folders import save_writer, small_tokenizer
from helpers import ROOT, launch, tiny_model, updates

from zerofit.data.collate import CausalCollator
from zerofit.model.attention import choose_attention, takes_lengths
from zerofit.model.loss import install_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_packed_documents_take_a_flash_kernel(precision):
    """Loss and gradients are those of sdpa and its mask; no layer waits for the device."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    samples = [
        ({"input_ids": row, "labels": row, "position_ids": np.r_[:20, :1, :43]}, 0)
        for row in np.random.default_rng(0).integers(0, 97, (2, 64))
    ]
    found = {}
    for wanted in (None, "sdpa"):
        model = tiny_model("llama", hidden_size=64, head_dim=16).cuda().to(dtype)
        install_loss(model, "full")
        said = choose_attention(model, wanted, precision, torch.device("cuda"))
        assert takes_lengths(model) == (wanted is None), said
        batch = CausalCollator(0, flatten=wanted is None)(samples).to(torch.device("cuda"))
        loss = model(**batch.inputs)
        loss.backward()
        found[wanted] = [loss, *(parameter.grad for parameter in model.parameters())]
    for ours, expected in zip(found[None], found["sdpa"]):
        assert (ours - expected).float().norm() < 0.05 * expected.float().norm()


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero2"])
def test_an_adapter_trains_on_a_quantised_model(tmp_path, cache, strategy):
    pytest.importorskip("bitsandbytes")
    save_writer(tmp_path / "llama", small_tokenizer(tmp_path))
    lines = launch(
        tmp_path / "run", "--model_name_or_path", tmp_path / "llama", "--lora", "--train_file", ROOT / "docs" / "*.md",
        "--block_size", "64", "--learning_rate", "1e-2", "--per_device_train_batch_size", "8", "--max_train_steps",
        "30", "--load_in_4bit", "--precision", "bf16", "--cache_dir", cache, strategy=strategy, processes=1,
    )  # fmt: skip
    assert updates(lines)[-1]["loss"] < updates(lines)[0]["loss"] - 0.5
