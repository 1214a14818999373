"""The memory-saving loss is the loss: same value, same gradients, labels of -100 and tied heads included."""

import pytest
import torch
import torch.nn.functional as F
from helpers import TINY, loss_and_gradients, tiny_model

import train.model.loss as loss_module
from train.model.loss import choose_loss, install_loss
from train.model.probe import losses_differ, random_tokens

needs_chunked = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has no linear_cross_entropy")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3:9] = -100
    labels[2] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("tied", [True, False])
def test_the_plain_loss_is_transformers_own(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    inputs = batch()
    mean = model(**inputs).loss
    install_loss(model, "full")
    trained = (inputs["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(model(**inputs) / trained, mean)


@needs_chunked
@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_bytes", [128 * 2**20, 4 * 97 * 7])
def test_same_loss_and_gradients(family, tied, chunk_bytes, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(loss_module, "SMALLEST_CHUNK", 1)  # so that the small one means several chunks
    model = tiny_model(family, tie_word_embeddings=tied)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    full, full_gradients = loss_and_gradients(model, "full", batch())
    chunked, chunked_gradients = loss_and_gradients(model, "chunked", batch())
    torch.testing.assert_close(chunked, full, rtol=1e-6, atol=0)
    assert len(full_gradients) > 10
    for name, gradient in full_gradients.items():
        torch.testing.assert_close(
            chunked_gradients[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max())
        )


@needs_chunked
def test_it_never_holds_all_logits(monkeypatch):
    """The largest tensor made on the way is far smaller than the logits would be."""
    seen = []
    original = F.linear_cross_entropy

    def spy(hidden, weight, target, **kwargs):
        seen.append((kwargs["options"].batch_chunk_size, hidden.shape[0]))
        return original(hidden, weight, target, **kwargs)

    monkeypatch.setattr(F, "linear_cross_entropy", spy)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 97 * 10)
    monkeypatch.setattr(loss_module, "SMALLEST_CHUNK", 1)
    loss_and_gradients(tiny_model("gpt2"), "chunked", batch())
    assert seen == [(10, 60)]


@needs_chunked
def test_under_autocast_it_computes_in_half_precision():
    model = tiny_model("llama")
    losses = []
    for kind in ("full", "chunked"):
        install_loss(model, kind)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(model(**batch()))
        losses[-1].backward()
    torch.testing.assert_close(losses[1].float(), losses[0], rtol=1e-2, atol=0)


@needs_chunked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_sum_is_whole(dtype):
    """A sum of 8,192 losses is beyond fp16's range, and bf16 would keep two digits of it."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8192, 16, generator=generator), torch.randn(3000, 16, generator=generator)
    targets = torch.randint(0, 3000, (8192,), generator=generator)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert expected > 65504
    halves = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    summed = loss_module._chunked(*halves, None, targets)
    assert summed.dtype == torch.float32
    torch.testing.assert_close(summed, expected, rtol=1e-3, atol=0)
    (summed / 8192).backward()
    plain = hidden.clone().requires_grad_()
    (F.cross_entropy(plain @ weight.T, targets, reduction="sum") / 8192).backward()
    difference = (halves[0].grad.float() - plain.grad).norm() / plain.grad.norm()
    assert difference < 2e-2


@needs_chunked
def test_nothing_to_train_on_gives_zero_and_no_nan():
    model = tiny_model("gpt2")
    inputs = batch()
    inputs["labels"][:] = -100
    for kind in ("full", "chunked"):
        install_loss(model, kind)
        model.zero_grad()
        loss = model(**inputs)
        loss.backward()
        assert loss.item() == 0.0
        assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


def test_without_labels_the_model_answers_as_before():
    model = tiny_model("gpt2")
    expected = model(input_ids=batch()["input_ids"]).logits
    install_loss(model, "chunked")
    assert torch.equal(model(input_ids=batch()["input_ids"]).logits, expected)
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


@needs_chunked
def probe() -> dict[str, torch.Tensor]:
    tokens = random_tokens(97, torch.device("cpu"), count=2)
    return {"input_ids": tokens, "labels": tokens.clone()}


def test_a_model_that_scales_its_logits_is_found_out():
    from transformers import AutoModelForCausalLM, GraniteConfig

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GraniteConfig(vocab_size=97, logits_scaling=0.1, **sizes)).eval()
    install_loss(model, "chunked")
    set_kind = lambda kind: setattr(model, "loss_kind", kind)  # noqa: E731
    assert losses_differ(model, set_kind, "chunked", probe()) > 1e-2
    llama = tiny_model("llama")
    install_loss(llama, "chunked")
    set_kind = lambda kind: setattr(llama, "loss_kind", kind)  # noqa: E731
    assert losses_differ(llama, set_kind, "chunked", probe()) < 1e-5


def test_the_run_says_which_loss_and_why():
    kind, why = choose_loss("full", torch.device("cpu"))
    assert kind == "full"
    assert "as the recipe asks" in why
    kind, why = choose_loss("auto", torch.device("cpu"))
    assert kind == ("chunked" if hasattr(F, "linear_cross_entropy") else "full")
    assert kind in why
