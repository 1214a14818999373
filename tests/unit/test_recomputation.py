"""gradient_checkpointing: its values, which layers and operators are computed again, and that the gradients are the
same."""

from collections import Counter

import pytest
import torch
from helpers import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, BlenderbotConfig, T5Config
from transformers.models.deberta_v2 import DebertaV2Config

from zerofit.model.recomputation import enable_recomputation, selective_contexts

aten = torch.ops.aten
SHAPE = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 61}
BLENDERBOT = BlenderbotConfig(**SHAPE, encoder_layers=3, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
                              max_position_embeddings=32, use_cache=False)  # fmt: skip
T5 = T5Config(
    d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=61, decoder_start_token_id=0, use_cache=False
)
DEBERTA = DebertaV2Config(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=61, num_labels=2,
    relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"], max_position_embeddings=32,
)  # fmt: skip
DROPOUT = {
    "gpt2": {"n_layer": 3, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "gpt_neox": {"num_hidden_layers": 3, "hidden_dropout": 0.2},
    "llama": {"num_hidden_layers": 3, "attention_dropout": 0.2},
}


def models():
    yield from ((name, tiny_model(name, "sdpa", **changes)) for name, changes in DROPOUT.items())
    yield "gpt2", tiny_model("gpt2", "eager", **DROPOUT["gpt2"])
    yield "blenderbot", AutoModelForSeq2SeqLM.from_config(BLENDERBOT)
    yield "t5", AutoModelForSeq2SeqLM.from_config(T5)
    yield "deberta", AutoModelForSequenceClassification.from_config(DEBERTA)


def gradients(model, autocast: bool) -> list[torch.Tensor]:
    ids = torch.arange(24).view(3, 8) % 61
    labels = torch.tensor([0, 1, 0]) if hasattr(model, "classifier") else ids
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, attention_mask=(ids != 23).long(), labels=labels).loss
    loss.backward()
    found = [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]
    model.zero_grad()
    return found


def test_gradients_are_the_same_with_dropout_in_every_family():
    tried = set()
    for name, model in models():
        model.train()
        for autocast in (False, True) if name == "llama" else (False,):
            model.activation_checkpointing_disable()
            expected = gradients(model, autocast)
            for which in (True, "selective"):
                enable_recomputation(model, which)
                for mine, theirs in zip(gradients(model, autocast), expected, strict=True):
                    assert torch.equal(mine, theirs), (name, which, autocast)
                tried.add((name, which))
    assert len(tried) == 6 * 2


def test_selective_recomputes_no_product_and_keeps_less():
    class Count(TorchDispatchMode):
        """Counts what is computed: what the contexts of recomputation call, below them."""

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            called[str(operator)] += 1
            return operator(*args, **(kwargs or {}))

    found = []
    for which in (False, "selective", True):
        model, called = tiny_model("gpt2").train(), Counter()
        if which:
            enable_recomputation(model, which)
        with Count():
            gradients(model, False)
        found.append(called)
    none, selective, full = found
    for operator in ("aten.addmm.default", "aten.mm.default"):
        assert none[operator] == selective[operator] > 0
    assert full["aten.addmm.default"] > none["aten.addmm.default"]
    assert selective["aten.tanh.default"] == full["aten.tanh.default"] == 2 * none["aten.tanh.default"]
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert (none[flash], selective[flash], full[flash]) == (2, 2, 4)


@pytest.mark.parametrize(
    "change", [lambda y: y, lambda y: y.relu_(), lambda y: y.mul_(2).add_(1), lambda y: y[:1].exp_()]
)
def test_a_result_that_is_changed_in_place_is_not_changed_again(change):
    """A linear layer adds its bias in place where its input is not contiguous."""
    torch.manual_seed(0)
    linear, values = torch.nn.Linear(4, 5), torch.randn(4, 3, 2)

    def layer(x):
        product = linear(x.permute(2, 1, 0))
        change(product)
        return product.sigmoid().square()

    def gradient(**options):
        x = values.clone().requires_grad_()
        (checkpoint(layer, x, use_reentrant=False, **options)).sum().backward()
        return x.grad

    assert torch.equal(gradient(context_fn=selective_contexts), gradient())
