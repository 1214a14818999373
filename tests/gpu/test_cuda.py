"""What no CPU can show. Skipped without a CUDA device; run with `make test-gpu`."""

import pytest
import torch
from helpers import ROOT, launch, tiny_model, updates

from train.model.loss import choose_loss, install_loss
from train.model.probe import documents_leak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRATCH = ["--config_name", "gpt2", "--train_tokenizer_vocab_size", "400", "--block_size", "64",
           "--config_overrides", "n_layer=2,n_head=2,n_embd=64,n_positions=64,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
           "--train_file", str(ROOT / "train" / "**" / "*.py"), "--per_device_train_batch_size", "8",
           "--max_train_steps", "20", "--learning_rate", "1e-3"]  # fmt: skip


def kinds() -> list[str]:
    found = []
    for kind in ("chunked", "liger"):
        try:
            found.append(choose_loss(kind, torch.device("cuda"))[0])
        except Exception:
            continue
    return found


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
def test_memory_saving_losses_agree_with_the_plain_one(family):
    ids = torch.randint(0, 97, (4, 64), device="cuda")
    gradients = {}
    for kind in ("full", *kinds()):
        model = tiny_model(family).cuda()
        install_loss(model, kind)
        model(input_ids=ids, labels=ids).backward()
        gradients[kind] = model.get_output_embeddings().weight.grad
    assert len(gradients) >= 2, "neither torch's nor Liger's loss is at hand"
    for gradient in gradients.values():
        torch.testing.assert_close(gradient, gradients["full"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_stay_apart(attention, dtype):
    for family in ("gpt2", "gpt_neox", "llama"):
        assert not documents_leak(tiny_model(family, attention).cuda().to(dtype), 97, torch.device("cuda"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero2_plain"]
)
def test_every_pair_trains_in_every_precision(tmp_path, cache, strategy, precision):
    lines = launch(
        tmp_path / "run", *SCRATCH, "--precision", precision, "--cache_dir", cache, strategy=strategy, processes=1
    )
    losses = [line["loss"] for line in updates(lines)]
    assert losses[-1] < losses[0] - 0.3
    assert all(line["peak_memory_bytes"] > 0 for line in updates(lines))
